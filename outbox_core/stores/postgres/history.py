"""The history of an outbox in PostgreSQL: rows of statistics, and events (`outbox_core.retention.history` reads them).

Both tables may be missing, or may be made, dropped or forbidden while a harvester runs: whoever writes asks first, in
the same second. `outbox doctor` says what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from outbox_core.schema import EventKind, TableName, events_beside, statistics_beside
from outbox_core.stores.interface import NewEvent, NewStatistics
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.table import OutboxTable

_log = logging.getLogger(__name__)

STATISTICS_SECONDS = 7 * 86_400
EVENT_SECONDS = 90 * 86_400
"""The time for which rows are kept."""


class NotedChanges(NamedTuple):
    """A part of a statement on holds, and its parameters; empty without a table of events."""

    sql: str = ""
    parameters: dict[str, Any] = {}  # noqa: RUF012  never changed


class PostgresHistory:
    """The history of an outbox; implements `outbox_core.stores.interface.HistoryStore`."""

    def __init__(self, table: OutboxTable) -> None:
        self._table = table
        self._has_warned = False

    def add_events(self, events: Sequence[NewEvent]) -> None:
        """Write events, but for those that are there already, unless there is no table of them."""
        if not self._writable()[1]:
            return
        for event in events:
            parameters = event._asdict() | {"outbox": self._table.layout().outbox, "kind": str(event.kind)}
            self._table.execute(sql.ADD_EVENT, parameters | {"reason": event.reason.replace("\0", "")}, **self._names())

    def add_statistics(self, statistics: NewStatistics) -> None:
        """Write a row of statistics, unless there is no table of them."""
        if not self._writable()[0]:
            return
        parameters: dict[str, Any] = statistics._asdict() | {"outbox": self._table.layout().outbox}
        backlog = parameters.pop("backlog")
        for name in ("deliverable", "held"):
            rows = getattr(backlog, name, None)
            parameters[name] = rows and rows.number
            parameters[f"{name}_age"] = rows and rows.oldest_age_seconds
        self._table.execute(sql.ADD_STATISTICS, parameters, **self._names())

    def prune(self) -> int:
        """Delete statistics older than a week, and events older than 90 days; return how many."""
        outbox = self._table.layout().outbox
        has_statistics, has_events, _ = self._writable()
        statistics = {"outbox": outbox, "seconds": STATISTICS_SECONDS}
        events = {"outbox": outbox, "seconds": EVENT_SECONDS}
        count = self._table.execute(sql.PRUNE_STATISTICS, statistics, **self._names()) if has_statistics else 0
        return count + (self._table.execute(sql.PRUNE_EVENTS, events, **self._names()) if has_events else 0)

    def note_changes(self, kind: EventKind) -> NotedChanges:
        """Return the part of a statement that writes an event of this kind for each changed hold.

        Publishing waits for that statement, so it writes none while somebody has locked the table of events.
        """
        _, has_events, is_locked = self._writable()
        if has_events and is_locked:
            _log.warning(
                "a change of holds (%s) is not noted in the history: %s is locked against writing (by CREATE INDEX, "
                "ALTER TABLE, VACUUM FULL or the like)",
                kind,
                self._names()["events"],
            )
        if not has_events or is_locked:
            return NotedChanges()
        return NotedChanges(self._table.format(sql.NOTE_CHANGES, **self._names()), {"kind": str(kind)})

    def _names(self) -> dict[str, TableName]:
        outbox = self._table.found_outbox
        return {"statistics": statistics_beside(outbox), "events": events_beside(outbox)}

    def _writable(self) -> tuple[bool, bool, bool]:
        """Tell which of the two tables may be written, and if writing events would wait for somebody's lock."""
        names = {part: name.quoted for part, name in self._names().items()}
        ((*found, is_locked),) = self._table.query(sql.HISTORY_RIGHTS, names)
        if False in found and not self._has_warned:
            self._has_warned = True
            forbidden = ", ".join(name for name, may in zip(names.values(), found, strict=True) if may is False)
            _log.warning(
                "nothing is written into the history: GRANT SELECT, INSERT, DELETE ON %s TO %s, which must have no row "
                "level security for this role",
                forbidden,
                self._table.quoted_role,
            )
        return bool(found[0]), bool(found[1]), is_locked
