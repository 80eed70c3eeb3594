"""Faults that one harvester has alone, for minutes: a bad link, a server that hangs for it, a wrong clock."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.liveness import is_ill
from tests.simulation.network import Cut, Server
from tests.simulation.scheduling import Process

if TYPE_CHECKING:
    from tests.simulation.simulation import Node, Simulation

LINKS = ("leader topic", "group", "transaction", "data", "database")
"""Illnesses of the link to a server that has this part in a harvester's work."""

ILLNESSES = (*LINKS, "hang", "asleep", "wrong clock")
_SECONDS = (60.0, 120.0, 240.0)
_CLOCK_ERRORS = (-7200.0, -900.0, 900.0, 7200.0)


class Illnesses:
    """The faults that one harvester has alone."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(simulation.plan.seed * 13 + 5)

    def begin(self, kind: str) -> None:
        """Have a harvester fall ill, the leader as a rule; the last one that is well only now and then."""
        simulation, random = self._simulation, self._random
        if sum(not is_ill(node) for node in simulation.nodes) < 2 and random.random() < 0.8:
            return
        up = [node for node in simulation.nodes if node.is_up]
        leading = [node for node in up if node.lease_left > 0]
        node = random.choice(leading if leading and random.random() < 0.7 else up or simulation.nodes)
        if node.process is None or node.process.is_dead:
            return
        seconds = random.choice(_SECONDS) * (0.5 + random.random())
        simulation.seen[f"ill: {kind}"] += 1
        simulation.scheduler.note("%s falls ill for %.0f s: %s", node.process.name, seconds, kind)
        if kind in LINKS:
            cut = Cut(random.choice(("", "", "requests", "answers")), is_refused=random.random() < 0.25)
            simulation.sever(node.process, self._server(node, kind), cut, seconds)
        elif kind == "hang":
            cut = Cut(is_hung=True, spares_new=random.random() < 0.5)
            simulation.sever(node.process, simulation.database.server, cut, seconds)
        elif kind == "asleep":
            simulation.suspend(node.process, seconds)
        else:
            self._set_clock(node.process, seconds)

    def _set_clock(self, process: Process, seconds: float) -> None:
        process.clock_error = self._random.choice(_CLOCK_ERRORS)
        self._simulation.scheduler.after(seconds, lambda: setattr(process, "clock_error", 0.0))

    def _server(self, node: Node, what: str) -> Server:
        simulation, cluster = self._simulation, self._simulation.cluster
        config = simulation.config(node.name)
        topic = cluster.topics.get(node.leader_topic)
        if what == "database":
            return simulation.database.server
        if what == "leader topic" and topic is not None:
            number = topic[0].leader
        elif what == "group" and cluster.groups:
            number = cluster.coordinator("group", next(iter(cluster.groups)))
        elif what == "transaction":
            number = cluster.coordinator("transaction", config.tracking_names(simulation.outbox).transactional_id)
        else:
            number = self._random.choice([each.leader for each in cluster.topics["orders"]])
        return cluster.brokers[number]
