"""The promise at any moment: while some harvester can work, no row waits for long, whatever ails the others.

A harvester can work while it reaches the database and all brokers, in both directions, and has its time: its process
has lived for ten seconds, is not suspended or asked to stop, and has a clock that Kafka accepts. Everybody else is ill.

A row waits from its commit, or the release of its last hold. One that is held or refused does not count, nor one that
is not committed. A fault for all (a broker or the database down, rows that are hidden, a topic that is gone, a late
request) holds up the clock, which begins anew when it is over.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.brokers import POISON
from tests.simulation.postgres import Row, covers

if TYPE_CHECKING:
    from tests.simulation.simulation import Node, Simulation

_FLOW_SECONDS = 30.0  # while nobody is ill
_PATIENCE_SECONDS = 45.0  # while one of the others is ill, or was since the clock began
_FURTHER_SECONDS = 75.0  # more for each further one, and for one that was ill already when it began to lead
_DISTANCES_OF_A_RECORD = 10  # between two records of a key
_START_SECONDS = 10.0
_LOOK_SECONDS = 1.0


class Liveness:
    """The state of all harvesters, and the clock of the promise."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ill_at: dict[Node, float] = {}
        self._unfit: set[Node] = set()  # that were ill when they began to lead, and lead
        self._unfit_at: dict[Node, float] = {}
        self._calm_since = 0.0
        self._looked_at = 0.0
        self._longest = 0  # of the keys, counted in rows that wait

    def disturb(self) -> None:
        """Note a fault for all."""
        self._calm_since = self._simulation.scheduler.now

    def fell_ill(self, node: Node) -> None:
        """Note an illness of one harvester that may be over at once."""
        self._ill_at[node] = self._simulation.scheduler.now

    def began_to_lead(self, node: Node) -> None:
        """Note a harvester that may be ill already: it has the patience of a newcomer."""
        if is_ill(node):
            self._unfit.add(node)

    def ended_to_lead(self, node: Node) -> None:
        """Note the end of a leadership."""
        self._unfit.discard(node)

    def watch(self) -> None:
        """Look who is ill; once a second also look for rows that wait for too long."""
        simulation = self._simulation
        for node in simulation.nodes:
            if is_ill(node):
                self.fell_ill(node)
        self._unfit_at.update(dict.fromkeys(self._unfit, simulation.scheduler.now))
        if simulation.is_disturbed:
            self.disturb()
        if simulation.scheduler.now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = simulation.scheduler.now
            self._look()

    def _look(self) -> None:
        simulation = self._simulation
        waiting = [row for row in simulation.database.rows.values() if not self._is_excused(row)]
        keys = Counter(row.record.key for row in waiting if row.record.key)
        self._longest = max(self._longest, *keys.values()) if keys else 0
        if not waiting:
            return
        oldest = min(waiting, key=lambda row: row.waits_since)
        since = max(oldest.waits_since, self._calm_since, simulation.network.delivered_late_at)
        for node in simulation.nodes:
            begin = max(since, self._ill_at.get(node, 0.0))
            ill = [other.name for other, at in self._ill_at.items() if other is not node and at > begin]
            unfit = sum(other is not node and at > begin for other, at in self._unfit_at.items())
            waited, patience = simulation.scheduler.now - begin, self.patience(len(ill) + unfit)
            if waited > patience:
                simulation.broken(
                    f"{len(waiting)} rows still wait after {waited:.0f} s in which {node.name} could work"
                    f" ({', '.join(ill) or 'nobody'} could not): {oldest.record.value!r}"
                )
                return

    def _is_excused(self, row: Row) -> bool:
        holds = self._simulation.database.holds
        return POISON in (row.record.value or b"") or any(covers(hold, row.record) for hold in holds)

    def patience(self, ill: int) -> float:
        """Return how long a row may wait while so many of the others are ill."""
        plan = self._simulation.plan
        seconds = _PATIENCE_SECONDS + _FURTHER_SECONDS * (ill - 1) if ill else _FLOW_SECONDS
        # Records of a key are published one after the other, each with some round trips to the database.
        return seconds + self._longest * plan.latency * plan.database_distance * _DISTANCES_OF_A_RECORD


def is_ill(node: Node) -> bool:
    """Tell whether a harvester cannot work, for a reason of its own."""
    process = node.process
    if process is None or process.is_dead or process.is_suspended or process.clock_error or node.is_stopping:
        return True
    simulation = node.simulation
    if simulation.scheduler.now < process.started_at + _START_SECONDS:
        return True
    return any(each is process for each, _ in simulation.network.cut)
