"""The promises about an outage: one for all passes the partition round slowly and once; expiry and locks are none.

They are looked for in the log, and only in runs in which nothing else disturbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.kafka.duty import NEW_PATIENCE_SECONDS

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

LOG_OF_OUTAGE = "%s: %s; retrying"
LOG_OF_LEAVING = "%s leaves leader group %s: "
_SLACK_SECONDS = 1.0


class Outages:
    """The words of harvesters in an outage of the database, or while transactional.ids expire."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._left_at: list[float] = []  # in the last outage of the database

    def begin(self) -> None:
        """Note an outage for all."""
        if self._simulation.database.server.is_up:
            self._left_at.clear()

    def take_in(self, format_: str, text: str) -> None:
        """Note a broken promise if a log line tells of one."""
        fault = self._simulation.plan.only_fault
        if fault == "expire" and format_.startswith(LOG_OF_OUTAGE):
            self._simulation.broken(f"an outage is told of, and there is none: {text}")
        if fault == "lock" and format_.startswith(LOG_OF_LEAVING):
            self._simulation.broken(f"passed on for a lock that others would wait for, too: {text}")
        if fault == "database" and format_.startswith(LOG_OF_LEAVING) and not self._simulation.database.server.is_up:
            self._leave(text)

    def _leave(self, text: str) -> None:
        simulation, now = self._simulation, self._simulation.scheduler.now
        simulation.seen["partition passed on in an outage for all"] += 1
        if self._left_at and now - self._left_at[-1] < NEW_PATIENCE_SECONDS - _SLACK_SECONDS:
            simulation.broken(f"passed on {now - self._left_at[-1]:.0f} s after it was in one outage for all: {text}")
        self._left_at.append(now)
        if len(self._left_at) >= len(simulation.nodes):
            simulation.broken(f"passed on for the {len(self._left_at)}th time in one outage for all: {text}")
