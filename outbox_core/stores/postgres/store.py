"""The outbox in PostgreSQL: marks, scans and deletions. Its statements are in `statements`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.errors import FeatureNotSupported, InsufficientPrivilege, UndefinedFunction

from outbox_core.errors import OutboxTableError, RightsMissing, RowsHeld, StoreUnavailable, must
from outbox_core.schema import TableName, archive_rotation
from outbox_core.stores.interface import (
    NO_HOLDS,
    NO_LIMIT,
    Backlog,
    MarkedBatch,
    MarkedRows,
    RowId,
    RowQuery,
    StoredRecord,
    WaitingRows,
)
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.conversion import (
    HeldParameters,
    array,
    multirange,
    only_rows,
    rounded,
    with_oversized,
    without_keys,
    without_rows,
)
from outbox_core.stores.postgres.history import PostgresHistory
from outbox_core.stores.postgres.holds import PostgresHolds
from outbox_core.stores.postgres.marks import PostgresMarks
from outbox_core.stores.postgres.sequence import PostgresSequence
from outbox_core.stores.postgres.table import Layout, OutboxTable

_log = logging.getLogger(__name__)

_BACKLOG_COUNT_BOUND = 100_000
_MOST_TOPICS = 50
_LONGEST_TIMEOUT_SECONDS = 86_400.0
_SKIPPED_SECONDS = 3.0
# No right to the function, or a server that only speaks PostgreSQL's protocol.
_SERVER_ID_WITHHELD = (InsufficientPrivilege, UndefinedFunction, FeatureNotSupported)
_id_of = attrgetter("id")
T = TypeVar("T")


class PostgresStore:
    """An outbox table in PostgreSQL; implements `outbox_core.stores.interface.OutboxStore`.

    A `statement_timeout` of 0.0 seconds is none. A value is not read (`OversizedValue`) if key, value and headers
    together have more than `max_message_bytes`. With `archive_days` published rows go into the archive, for so long.
    A table without a schema is looked up on the search path once, or is the one that was `found` before. If it
    `had_holds` then, their table must be there to the end.
    """

    def __init__(
        self,
        data_source: str,
        table: str = "outbox",
        *,
        application_name: str = "kafka-outbox",
        statement_timeout: float = 0.0,
        max_message_bytes: int = NO_LIMIT,
        archive_days: int | None = None,
        found: TableName | None = None,
        had_holds: bool = False,
    ) -> None:
        self.table = OutboxTable(
            data_source,
            table,
            application_name=application_name,
            statement_timeout=statement_timeout,
            archives=archive_days is not None,
            found=found,
            had_holds=had_holds,
        )
        self.history = PostgresHistory(self.table)
        self.holds = PostgresHolds(self.table, self.history, max_message_bytes)
        self.sequence = PostgresSequence(self.table)
        self.marks = PostgresMarks(self.table, self.holds)
        self._max_message_bytes = max_message_bytes
        self._archive_days = archive_days
        self._held_parameters = HeldParameters()
        self._reading_timeout = statement_timeout
        self._skipped_since: float | None = None
        self._has_told_of_skipped = False
        self._found_none = False  # by the last mark

    def check(self) -> str:
        """Check the table, prepare for its layout, and return `<database>.<schema>.<table>`."""
        layout = self.table.check()
        if self._archive_days is not None:
            self.table.check_archive()
        return f"{layout.database}.{layout.outbox}"

    def server_id(self) -> str:
        """Return the server's system identifier, '' where it may not be read (some hosted databases)."""
        try:
            return str(self.table.query(sql.SERVER_ID)[0][0])
        except (OutboxTableError, RightsMissing) as error:
            if isinstance(error.__cause__, _SERVER_ID_WITHHELD):
                return ""
            raise

    def mark(self, leader_id: UUID, query: RowQuery) -> MarkedBatch:
        """Mark the rows of a query that `leader_id` has not marked yet, and return them."""
        layout = self.table.layout()
        parts = mark_parts(layout, self.table.quoted, query)
        parameters = {"leader_id": leader_id, **self._parameters(query)}
        if self._found_none and not self._finds_any(parameters, parts):  # one statement while nothing comes
            return MarkedBatch(0, ())
        self._found_none = False
        try:
            records = self._read(sql.MARK, parameters, parts)
        except OutboxTableError as error:
            number = self.holds.add_violations(error)
            if not number:
                raise
            raise RowsHeld(  # then the next mark can succeed
                f"{number} row(s) of {self.table.name} violate constraints, which keep them from being marked, and are "
                "held"
            ) from error
        selected = len(records) if len(records) == query.limit else self._selected(parameters, parts, len(records))
        self._found_none = not selected
        self._see_skipped(selected, len(records))
        records.sort(key=_id_of)
        # Ids may repeat only where rows are not found by their addresses: rows of one id are marked together there.
        repeated = None if layout.by_address else next((a for a, b in pairwise(records) if a.id == b.id), None)
        if repeated:
            raise OutboxTableError(
                f"table {self.table.name} has more than one row with id {repeated.id}, so they cannot be told apart: "
                "delete all but one or give them other ids, and ALTER TABLE ... ADD PRIMARY KEY (id)"
            )
        return MarkedBatch(selected, records)

    def _selected(self, parameters: dict[str, Any], parts: dict[str, str], updated: int) -> int:
        """Return how many rows the last mark selected; without an answer it is in doubt, as it has taken effect."""
        try:
            return self._note_of_selected(parameters, parts, updated)
        except StoreUnavailable as error:
            error.in_doubt = True
            raise

    def _note_of_selected(self, parameters: dict[str, Any], parts: dict[str, str], updated: int) -> int:
        ((noted,),) = self.table.query(sql.SELECTED)
        mark, _, selected = (noted or "").partition(" ")
        if mark == parameters["mark"]:
            return int(selected)
        # It was not carried out: without a policy for updates the planner knows that none will be.
        return updated + self._finds_any(parameters, parts)

    def _finds_any(self, parameters: dict[str, Any], parts: dict[str, str]) -> bool:
        ((found,),) = self._timed(lambda: self.table.query(sql.FINDS_ANY, parameters, **parts))
        return bool(found)

    def _see_skipped(self, selected: int, marked: int) -> None:
        """Have the table looked at again after a mark that marked other rows than it selected.

        Raises:
            StoreUnavailable: if marks have lacked selected rows for seconds, and obstacles explain it.
        """
        if selected == marked:
            self._skipped_since, self._has_told_of_skipped = None, False
            return
        self.table.look_again()  # it may have got partitions or heirs
        at = time.monotonic()
        self._skipped_since = self._skipped_since or at
        if at - self._skipped_since < _SKIPPED_SECONDS:
            return
        if obstacles := self.table.obstacles():
            raise StoreUnavailable(
                f"rows of {self.table.name} can be read and cannot be marked: {', '.join(obstacles)}. Nothing is "
                f"published until role {self.table.quoted_role} can mark every row that it can see",
                in_doubt=True,
            )
        if not self._has_told_of_skipped:
            self._has_told_of_skipped = True
            _log.warning(
                "marks of %s have marked other rows than they selected for %g s (the last one %d of %d), so they are "
                "undone and repeated: does another harvester or program set leader_id in this table?",
                self.table.name,
                at - self._skipped_since,
                marked,
                selected,
            )

    def purge(self, leader_id: UUID, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete the rows of which both id and create time match and that `leader_id` still marks; return how many."""
        return self._delete_all(sql.PURGE, sql.UNPURGED, _rows(ids, create_times), leader_id=leader_id)

    def reset(self, leader_id: UUID, ids: Sequence[int]) -> int:
        """Clear the mark of the rows of these ids that `leader_id` still marks; return how many."""
        parameters = {"leader_id": leader_id, "ids": array(ids)}
        try:
            return self.table.execute(sql.RESET, parameters)
        except OutboxTableError as error:
            if not self.holds.add_violations(error):
                raise
        return self.table.execute(sql.RESET_FULFILLING, parameters, fulfilled=self.table.rules().fulfilled)

    def find_lost(self, leader_id: UUID, known: Collection[int], query: RowQuery) -> MarkedRows:
        """Count the rows that `leader_id` marks, and that are not known, among the first of a query, marked or not."""
        parameters = {**self._parameters(query), "leader_id": leader_id, "known": multirange(known)}
        exclusion = (sql.SCAN_EXCLUSION if _leaves_out(query) else "") + _only(query)
        parts = {"others": sql.UNKNOWN, "exclusion": exclusion}
        return MarkedRows(*self._timed(lambda: self.table.query(sql.FIND_LOST, parameters, **parts))[0])

    def scan(self, query: RowQuery) -> Sequence[StoredRecord]:
        """Return the rows of a query, by ascending id, unchanged."""
        floor, parts = query.after.id, scan_parts(self.table.layout(), query)
        # Naming thousands of rows takes longer than reading the next ones, and those up to the floor are not looked at.
        above = query._replace(without_rows=[row for row in query.without_rows if row.id > floor])
        records = self._read(sql.SCAN, self._parameters(above), parts)
        if records and records[0].id <= floor:  # the floor was another table's: this has begun at the head
            records = self._read(sql.SCAN, self._parameters(query), parts)
        # Other rows have the ids of those that are left out, or they are these, with times that were rounded meanwhile.
        meets = bool(records) and not set(map(_id_of, query.without_rows)).isdisjoint(map(_id_of, records))
        if meets and (now_rounded := self._rounded(query.without_rows)):
            query = query._replace(without_rows=[*query.without_rows, *now_rounded])
            records = self._read(sql.SCAN, self._parameters(query), parts)
        return records

    def delete_published(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete the rows of which both id and create time match, marked or not; return how many."""
        return self._delete_all(sql.DELETE_PUBLISHED, sql.UNDELETED_PUBLISHED, _rows(ids, create_times))

    def _delete_all(self, statement: str, remaining: str, rows: list[tuple[int, int]], **others: Any) -> int:
        """Delete published rows, also if their times were rounded meanwhile; raise RowsRemain if some are still there.

        Rows that are not found were deleted by somebody else, or the type of `create_time` was changed.
        """
        parameters = others | _of_rows(rows)
        deleted = self._delete(statement, parameters)
        if deleted == len(rows):
            return deleted
        self.table.refuse_what_remains(remaining, parameters)
        if now_rounded := self._rounded(map(RowId._make, rows)):
            parameters = others | _of_rows(now_rounded)
            deleted += self._delete(statement, parameters)
            self.table.refuse_what_remains(remaining, parameters)
        return deleted

    def _rounded(self, rows: Iterable[RowId | StoredRecord]) -> list[RowId]:
        """Return rows that were read with a finer `create_time` than the column has now, with the time that it has."""
        digits = self.table.time_digits()
        return [] if digits is None else rounded(rows, digits)

    def _delete(self, statement: str, parameters: dict[str, Any]) -> int:
        """Delete published rows, or move them into the archive; return how many."""
        archiving = self.table.archived(sql.DELETE_INTO_ARCHIVE, delete=self.table.format(statement))
        with self.table.deleting():
            if archiving:
                statement, parts = "{archiving}", {"archiving": archiving}
            else:
                parts = {}
            deleted = self.table.execute(statement, parameters, **parts)
        self.table.statement_succeeded()
        return deleted

    def rotate_archive(self) -> int:
        """Make the archive's next partitions, and drop those that are too old; return how many."""
        if self._archive_days is None:
            return 0
        rotate = archive_rotation(self.table.found_outbox)
        ((dropped,),) = self.table.query(sql.ROTATE_ARCHIVE, {"days": self._archive_days}, rotate=rotate)
        return int(dropped)

    def find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """Return the rows of these ids, by ascending id, marked or not."""
        return self.table.records(sql.FIND, {"ids": array(ids)}, partition=self.table.layout().partition)

    def is_empty(self) -> bool:
        """Return True if no row is visible."""
        return bool(self.table.query(sql.IS_EMPTY)[0][0])

    def at_work(self, seconds: float) -> str:
        """Return what the database does for a long statement of this role and program on another connection."""
        waits = [wait for (wait,) in self.table.ask_apart(sql.AT_WORK, {"seconds": seconds})]
        if not waits:
            return ""
        return "has it wait for a lock" if "Lock" in waits else "is at work on it"

    def backlog(self) -> Backlog:
        """Count the waiting rows: exactly up to 100,000, by ids and the planner's statistics beyond."""
        holds = self.holds.read(warn=False) or NO_HOLDS
        held_parameters = self._held_parameters.of(holds)
        deliverable = self._count(f"true {sql.WITHOUT_HELD}" if holds else "true", held_parameters)
        held = self._count(f"NOT (true {sql.WITHOUT_HELD})", held_parameters) if holds else WaitingRows()
        bound = _BACKLOG_COUNT_BOUND
        if bound in (deliverable.number, held.number):
            ((estimate,),) = self.table.query(sql.ESTIMATE_ROWS, {"name": self.table.quoted}, bound=bound)
            total = int(estimate or 0)
            if deliverable.number == bound:
                deliverable = deliverable._replace(number=max(bound, total - held.number))
            else:
                held = held._replace(number=max(bound, total - deliverable.number))
        return Backlog(deliverable, held)

    def _count(self, condition: str, parameters: dict[str, Any]) -> WaitingRows:
        parts = {"bound": _BACKLOG_COUNT_BOUND, "topics": _MOST_TOPICS + 1, "condition": condition}
        (_, number, age), *topics = self.table.query(sql.COUNT_ROWS, parameters, **parts)
        return WaitingRows(number, max(0.0, age), {topic: count for topic, count, _ in topics})

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        self.table.close()

    def _parameters(self, query: RowQuery) -> dict[str, Any]:
        return {
            "mark": str(time.monotonic_ns()),
            "limit": query.limit,
            "max_bytes": query.max_bytes,
            "max_message": self._max_message_bytes,
            **without_rows(query.without_rows),
            **without_keys(query.without_keys),
            **only_rows(query.only_rows),
            **self._held_parameters.of(query.holds, query.without_topics),
            **self.sequence.floor_parameters(query.after),
        }

    def _read(self, statement: str, parameters: dict[str, Any], parts: dict[str, str]) -> list[StoredRecord]:
        """Run a mark or a scan."""
        records = self._timed(lambda: self.table.records(statement, parameters, **parts))
        self.table.statement_succeeded()
        return with_oversized(records, self._max_message_bytes)

    def _timed(self, read: Callable[[], T]) -> T:
        """Read from the head of the table. After a timeout the next attempt gets more time, or none would succeed."""
        timeout, usual = self._reading_timeout, self.table.statement_timeout
        if timeout != usual:
            self.table.set_timeout(timeout)
        began = time.monotonic()
        try:
            result = read()
        except StoreUnavailable as error:
            was_cancelled = isinstance(error.__cause__, psycopg.errors.QueryCanceled)
            if was_cancelled and 0 < 0.9 * timeout < time.monotonic() - began:  # and not by somebody
                self._give_more_time()
            raise
        if timeout != usual:
            self._reading_timeout = usual
            self.table.set_timeout(usual)
        return result

    def _give_more_time(self) -> None:
        usual = self.table.statement_timeout
        if self._reading_timeout == 2 * usual:  # not at the first: a probe of the table reads once
            _log.warning(
                "reading %s from its head takes longer than statementTimeout (%g s): next time it may take twice as "
                "long, and so on until it succeeds. Dead rows that vacuum cannot remove (is an old snapshot open?), a "
                "large backlog that is held, or somebody's lock are in the way",
                self.table.name,
                usual,
            )
        self._reading_timeout = min(2 * self._reading_timeout, max(_LONGEST_TIMEOUT_SECONDS, usual))


def mark_parts(layout: Layout, table: str, query: RowQuery) -> dict[str, str]:
    """Return the parts of `MARK` for a query; `table` is the quoted name."""
    return {
        "others": sql.UNMARKED,
        "exclusion": (sql.MARK_EXCLUSION if query.without_rows or _leaves_out(query) else "") + _only(query),
        "partition": layout.partition,
        **(sql.by_address(table) if layout.by_address else sql.BY_ID),
    }


def scan_parts(layout: Layout, query: RowQuery) -> dict[str, str]:
    """Return the parts of `SCAN` for a query."""
    exclusion = (sql.SCAN_EXCLUSION if _leaves_out(query) else "") + _only(query)
    return {"others": sql.WITHOUT_ROWS, "exclusion": exclusion, "partition": layout.partition}


def _only(query: RowQuery) -> str:
    return "" if query.only_rows is None else sql.ONLY_ROWS


def _rows(ids: Sequence[int], create_times: Sequence[int]) -> list[tuple[int, int]]:
    number, times = len(ids), len(create_times)  # SQL would fill up the shorter list with NULL
    must(number == times, "a purge must name a create time for each id; it names %d for %d", times, number)
    return [*zip(ids, create_times, strict=True)]


def _of_rows(rows: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Return the parameters of `OF_IDS`."""
    ascending = sorted(rows)
    return {"ids": array([identity for identity, _ in ascending]), "create_times": array([at for _, at in ascending])}


def _leaves_out(query: RowQuery) -> bool:
    return bool(query.without_keys or query.without_topics or query.holds)
