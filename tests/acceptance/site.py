"""An outbox under load with its harvesters, from the start to the verdict."""

from pathlib import Path
from typing import Any

from devstack.processes import wait_until
from tests.acceptance.fleet import Fleet
from tests.acceptance.load import Load
from tests.acceptance.terms import overlaps
from tests.acceptance.verdict import Verdict, judge, read_sightings

_PATIENCE = 90.0


class Site:
    """One outbox table, a load on it, and harvesters.

    Args:
        directory: for the files of the processes; its name becomes theirs.
        dsn: the database.
        bootstrap: the broker.
        topics: topics that exist.
        table: the outbox table, made here.
        load: settings of `Load`.
        command: whether the harvesters are `outbox harvest`.
        via: the database as the harvesters reach it, if not by `dsn`.
        worker: settings of `worker.Settings`.
    """

    def __init__(
        self,
        directory: Path,
        dsn: str,
        bootstrap: str,
        topics: list[str],
        *,
        table: str = "outbox",
        load: dict[str, Any] | None = None,
        command: bool = False,
        via: str | None = None,
        **worker: Any,
    ) -> None:
        self._bootstrap = bootstrap
        self._topics = topics
        self.load = Load(dsn, topics, table=table, **(load or {}))
        self.fleet = Fleet(directory, command=command, dsn=via or dsn, bootstrap=bootstrap, table=table, **worker)

    def start(self, harvesters: int) -> None:
        """Start load and harvesters."""
        self.fleet.start(harvesters)
        self.load.start()

    def settle(self) -> Verdict:
        """End the load, let the harvesters empty the outbox and stop, and judge the published records."""
        self.load.stop()
        empty = wait_until(lambda: self.load.pending() == 0, timeout=_PATIENCE, interval=0.2)
        assert empty, f"{self.load.pending()} rows are left in the outbox; {self.fleet.tails()}"
        self.fleet.stop()
        return judge(self.load.committed(), read_sightings(self._bootstrap, self._topics))

    def assert_one_leader(self, *, strays: bool = False) -> None:
        """Assert that never two processes led, and (unless `strays`) that no record was sent without a lease."""
        terms = self.fleet.terms()
        assert terms, "nobody ever led"
        both = overlaps(terms)
        assert not both, f"two leaders at once: {both}"
        assert strays or self.fleet.count("stray") == 0, "records were sent without a lease"

    def discard(self) -> None:
        """Stop all that still run."""
        self.load.stop()
        self.fleet.discard()
