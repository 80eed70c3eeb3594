"""The table of holds of an outbox in PostgreSQL, as harvesters use it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg

from outbox_core.errors import OutboxTableError, RightsMissing, StoreUnavailable, TableUnusable
from outbox_core.schema import HOLD_COLUMNS, EventKind, hold_id
from outbox_core.stores.interface import NO_HOLDS, HoldSet, NewHold, StoredRecord, held_key, may_hold
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.connection import Connection, one_line
from outbox_core.stores.postgres.conversion import array, key_as_held, with_oversized
from outbox_core.stores.postgres.history import NotedChanges, PostgresHistory
from outbox_core.stores.postgres.table import OutboxMissing, OutboxTable

_log = logging.getLogger(__name__)

_VIOLATIONS_AT_ONCE = 1_000
_VIOLATES = "the constraint came after the row, or judges anew, and keeps it from being marked; correct it, or skip it"


class _Version(NamedTuple):
    """The holds that were read last: on which connection, how many, and a checksum of their row versions."""

    connection: Connection | None = None
    number: int | None = None
    checksum: int | None = None


class _Hold(NamedTuple):
    """A row of `READ_HOLDS`."""

    topic: str
    key: str | None
    record_id: int | None
    dead_letter: bool
    error: str | None
    is_long: bool


class PostgresHolds:
    """The holds of an outbox; implements `outbox_core.stores.interface.HoldStore`."""

    def __init__(self, table: OutboxTable, history: PostgresHistory, max_message_bytes: int) -> None:
        self._table = table
        self._history = history
        self._max_message_bytes = max_message_bytes
        self._has_table: bool | None = None
        self._holds = NO_HOLDS
        self._version = _Version()

    def read(self, *, warn: bool = True) -> HoldSet | None:
        """Return the holds, None if there is no table of them.

        It counts as an outage if a right to read it is missing, or the table that held something is gone.

        Whoever reads them only to count need not `warn` of what is missing, which the harvest thread does.
        """
        table = self._table
        with self._naming_rights():
            if not self._has_table and not self._find_table(warn=warn):
                self._refuse_to_lose()
                return None
            parameters = {"outbox": table.layout().outbox, "name": table.holds.quoted}
            connection = table.connected()
            known = self._version if self._version.connection is connection else _Version(connection)
            parameters |= {"number": known.number, "versions": known.checksum}  # type: ignore[dict-item]
            try:
                found = table.query(sql.READ_HOLDS, parameters)
            except OutboxTableError as error:
                self._has_table = None  # dropped, perhaps
                if isinstance(error, OutboxMissing) or self._find_table(warn=warn and not self._holds):
                    raise
                self._refuse_to_lose(error)
                return None
        if not found:
            raise StoreUnavailable(f"table {table.hold_name} was replaced at this moment")
        may_change, number, checksum, *_ = found[0]
        version = _Version(connection, number, checksum)
        if version != known or may_change != self._holds.may_change:
            if version == known and number:  # the requests that were not there for want of rights
                self._version = _Version()
                return self.read(warn=warn)
            if warn and self._holds.may_change and not may_change:
                self._warn_of_rights()
            holds = [_Hold(*columns) for _, _, _, is_hold, *columns in found if is_hold]
            self._holds, self._version = _hold_set(holds, may_change=may_change), version
        return self._holds

    def add(self, holds: Sequence[NewHold]) -> None:
        """Add holds, but for those that are there already, and those of rows that are gone."""
        outbox = self._table.layout().outbox
        parameters = {
            "outbox": outbox,
            "hold_ids": [hold_id(outbox, hold.topic, hold.key, hold.record_id) for hold in holds],
            "topics": [hold.topic for hold in holds],
            "keys": [None if hold.key is None else held_key(hold.key) for hold in holds],
            "ids": [hold.record_id for hold in holds],
            "dead": [hold.dead_letter for hold in holds],
            "create_times": [hold.create_time for hold in holds],
            "reasons": [hold.reason for hold in holds],
            "errors": [hold.error.replace("\0", "") for hold in holds],
        }
        self._change(sql.ADD_HOLDS, EventKind.HELD, parameters)

    def fetch(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """Return the held rows of these ids, by ascending id, marked or not."""
        layout = self._table.layout()
        parameters = {"ids": array(ids), "outbox": layout.outbox, "max_message": self._max_message_bytes}
        records = self._table.records(sql.FETCH_HELD, parameters, partition=layout.partition)
        return with_oversized(records, self._max_message_bytes)

    def refuse_dead_letters(self, ids: Sequence[int], error: str) -> int:
        """Keep records held that the dead-letter topic refused, with its error; return how many."""
        parameters = {"ids": array(ids), "error": error.replace("\0", ""), "outbox": self._table.layout().outbox}
        return self._change(sql.REFUSE_DEAD_LETTERS, EventKind.DEAD_LETTER_REFUSED, parameters)

    def delete_dead_lettered(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete held rows of which both id and create time match, and their holds; return how many rows."""
        outbox = self._table.layout().outbox
        parameters = {"ids": array(ids), "create_times": array(create_times), "outbox": outbox}

        def delete(noted: NotedChanges) -> list[tuple[Any, ...]]:
            parts = {"noted": noted.sql, "archived": self._table.archived(sql.ARCHIVE_DEAD_LETTERS)}
            return self._table.query(sql.DELETE_DEAD_LETTERED, parameters | noted.parameters, **parts)

        with self._table.deleting(), self._naming_rights():
            deleted = self._noting(EventKind.DEAD_LETTERED, delete)
        if deleted < len(ids):
            self._table.refuse_what_remains(sql.UNDELETED_PUBLISHED, parameters)
        return deleted

    def release_gone(self) -> int:
        """Delete the holds of records that are no longer in the table; return how many.

        Of a partitioned table only those of records that were refused: others may come back with their partition. It
        is worth no wait: raise StoreUnavailable if a lock of somebody else's keeps it waiting.
        """
        with self._table.briefly_waiting():
            with self._naming_rights():
                parameters = {"outbox": self._table.layout().outbox, "name": self._table.quoted}
                ((finds_gone,),) = self._table.query(sql.FINDS_GONE, parameters)
            return self._release(sql.RELEASE_GONE, parameters) if finds_gone else 0

    def release_for(self, reason: str) -> int:
        """Delete the holds of records that have this reason; return how many."""
        return self._release(sql.RELEASE_FOR, {"reason": reason}) if self.read() is not None else 0

    def _release(self, statement: str, parameters: dict[str, Any]) -> int:
        return self._change(statement, EventKind.RELEASED, parameters | {"outbox": self._table.layout().outbox})

    def _change(self, statement: str, kind: EventKind, parameters: dict[str, Any]) -> int:
        """Change holds, and note the changes in the history; return how many."""
        with self._naming_rights():
            change = sql.CHANGE_HOLDS.replace("{change}", statement)
            return self._noting(
                kind, lambda noted: self._table.query(change, parameters | noted.parameters, noted=noted.sql)
            )

    def _noting(self, kind: EventKind, change: Callable[[NotedChanges], list[tuple[Any, ...]]]) -> int:
        """Make a change of holds and note it in the history, or make it alone where the history refuses the event."""
        noted = self._history.note_changes(kind)
        try:
            ((count,),) = change(noted)
        except OutboxTableError as error:  # a constraint, a trigger or a missing partition of that table, perhaps
            if not noted.sql:
                raise
            ((count,),) = change(NotedChanges())
            _log.warning("a change of holds (%s) is not noted in the history: %s", kind, error)
        return int(count)

    def add_violations(self, error: OutboxTableError) -> int:
        """Hold the rows that violate a constraint by now, and so cannot be changed.

        Return how many are held, some of them perhaps before; 0 if the error has another cause. Raise OutboxTableError
        if no hold can be added here.
        """
        if not isinstance(error.__cause__, psycopg.errors.CheckViolation | psycopg.errors.NotNullViolation):
            return 0
        table = self._table
        if not may_hold(self):
            raise OutboxTableError(
                f"{error}. `outbox doctor` shows how to find such rows. Delete "
                f"or correct them, or let them be held: make {table.hold_name}, with all rights on it"
            ) from error
        with table.without_timeout():
            parts = {"limit": _VIOLATIONS_AT_ONCE, **table.rules()._asdict()}
            found = table.query(sql.FIND_VIOLATIONS, {"outbox": table.layout().outbox}, **parts)
        if found:
            self.add(
                [
                    NewHold(topic, key_as_held(key), identity, f"violates {broken}", _VIOLATES)
                    for identity, topic, key, broken in found
                ]
            )
        return len(found)

    def _find_table(self, *, warn: bool) -> bool:
        before = self._has_table
        self._table.refuse_unseen()  # for want of a right, say
        _, missing = self._table.inspect_holds()
        if 0 < len(missing) < len(HOLD_COLUMNS):
            raise OutboxTableError(
                f"table {self._table.hold_name} lacks the column(s) {', '.join(missing)}: nothing is published, as "
                "what is held there would be, too. Put them back; or, if nothing is held in it, drop it and make it "
                f"anew (`outbox schema --only hold --table {self._table.name} --apply`)"
            )
        self._has_table = not missing
        if warn and before is None and missing and not self._table.had_holds:
            _log.warning(
                "nothing can be held or paused, and a bad record is tried for ever: there is no table %s; make it with "
                "`outbox schema --only hold --table %s --apply`, with Alembic or with `manage.py migrate`",
                self._table.hold_name,
                self._table.name,
            )
        return self._has_table

    def _refuse_to_lose(self, error: OutboxTableError | None = None) -> None:
        """Raise TableUnusable if the table was there and is gone: what is held in it would be published.

        By this process no less than by another one, which need not know that there were holds: no reason to hand over.
        """
        if not self._table.had_holds:
            return
        raise TableUnusable(
            f"table {self._table.hold_name} is gone: nothing is published meanwhile, as what is held there would be, "
            "too. Put it back; or, if all of that may be published, make it anew (`outbox schema --only hold --table "
            f"{self._table.name} --apply`)"
        ) from error

    def _warn_of_rights(self) -> None:
        _log.warning(
            "missing rights on %s: what is held there is not published, but nothing can be added to it, so a bad "
            "record is tried for ever, and no record goes to the dead-letter topic; %s",
            self._table.hold_name,
            self._table.grant_holds(),
        )

    @contextmanager
    def _naming_rights(self) -> Iterator[None]:
        """Name the table of holds, and the rights on it, where one is missing."""
        try:
            yield
        except RightsMissing as error:
            table, cause = self._table, error.__cause__
            why = one_line(cause) if isinstance(cause, psycopg.Error) else str(error)
            message = f"{table.hold_name}: {why}; {table.grant_holds()}"
            raise RightsMissing(message, in_doubt=error.in_doubt) from error


def _hold_set(holds: Sequence[_Hold], *, may_change: bool) -> HoldSet:
    topics = [hold for hold in holds if hold.key is None and hold.record_id is None]
    records = [(hold.record_id, hold) for hold in holds if hold.record_id is not None]
    return HoldSet(
        frozenset(hold.topic for hold in topics),
        frozenset((hold.topic, hold.key) for hold in holds if hold.key is not None),
        # Those with a long key need not be looked up by it, which means reading it.
        frozenset(record_id for record_id, hold in records if hold.key is None or hold.is_long),
        {record_id: hold.error or "" for record_id, hold in records if may_change and hold.dead_letter},
        {hold.topic: hold.error for hold in topics if hold.error},
        may_change=may_change,
    )
