"""The place between stashes and the database that captures share, and what becomes of captured records.

A record is captured as it stands in its row: when its INSERT has succeeded, or when it is kept in memory instead.
Adapters follow the connections of their framework and report the ends of transactions and savepoints here. The
invariants:

- a record counts as stashed until the transaction or savepoint around it is rolled back, as it would in the database;
- after the commit of its transaction nothing changes it any more;
- a savepoint that was begun before the first stash on a connection takes all of that connection's records along.

Where nobody follows a connection (a bare DB-API connection, a stand-in), its records count as stashed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outbox_core import stasher
from outbox_core.record import OutboxRecord

__all__ = ["CapturedRecord", "Interception", "Outcome", "RecordLog", "interception", "record_of"]


class Outcome(Enum):
    """The outcome of a captured record's transaction, as far as it is known."""

    OPEN = "in an open transaction"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


@dataclass(slots=True, eq=False)
class CapturedRecord:
    """A record, the connection it was stashed on, and its number among all captured records of this process."""

    record: OutboxRecord
    connection: object
    number: int
    outcome: Outcome = Outcome.OPEN


class RecordLog:
    """The records of one capture, in the order of their stashing. Any thread may append; `Interception` has the lock.

    Attributes:
        writes: False if this capture keeps records from the database.
        requires_transaction: True if stashing outside a transaction is refused, as the database's adapters do.
        entries: all captured records, whatever became of them.
    """

    def __init__(self, *, writes: bool, requires_transaction: bool = True) -> None:
        self.writes = writes
        self.requires_transaction = requires_transaction
        self.entries: list[CapturedRecord] = []


class Interception:
    """The open captures of this process; it is `outbox_core.stasher.interceptor` while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: tuple[RecordLog, ...] = ()
        self._numbers = itertools.count(1)
        self._followed: dict[int, tuple[object, Callable[[], None]]] = {}

    def open(self, log: RecordLog) -> None:
        """Capture from now on."""
        with self._lock:
            self._logs = (*self._logs, log)
            stasher.interceptor = self

    def close(self, log: RecordLog) -> None:
        """Capture no more; the last one to close lets go of all connections."""
        with self._lock:
            self._logs = tuple(other for other in self._logs if other is not log)
            if self._logs:
                return
            stasher.interceptor = None
            followed, self._followed = self._followed, {}
        for _, unfollow in followed.values():
            unfollow()

    @property
    def writes(self) -> bool:
        """True if stashes go on to the database."""
        return all(log.writes for log in self._logs)

    @property
    def requires_transaction(self) -> bool:
        """True if a stash that is kept in memory has to be in a transaction, too."""
        return all(log.requires_transaction for log in self._logs)

    def keep(self, connection: object, rows: Sequence[Sequence[Any]]) -> None:
        """Keep rows in memory; raise TransactionRequired as a stash in the database would."""
        if self.requires_transaction:
            stasher.require_transaction(connection)
        self.stashed(connection, rows)

    def stashed(self, connection: object, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows to all open captures, as records."""
        records = [record_of(row) for row in rows]
        with self._lock:
            for record in records:
                number = next(self._numbers)
                for log in self._logs:
                    log.entries.append(CapturedRecord(record, connection, number))

    def follow(self, connection: object, begin: Callable[[], Callable[[], None]]) -> None:
        """Follow a connection, once; `begin` starts that and returns a function that ends it."""
        with self._lock:
            if id(connection) in self._followed or not self._logs:
                return
            self._followed[id(connection)] = connection, begin()

    def moment(self) -> int:
        """Return a number that all records captured so far are below or equal to."""
        with self._lock:
            return next(self._numbers)

    def committed(self, connection: object) -> None:
        """Note the commit of a connection's transaction."""
        self._end(connection, Outcome.COMMITTED, after=0)

    def rolled_back(self, connection: object, *, after: int = 0) -> None:
        """Note a rollback of a connection's transaction, or to a savepoint that was begun at the moment `after`."""
        self._end(connection, Outcome.ROLLED_BACK, after=after)

    def _end(self, connection: object, outcome: Outcome, *, after: int) -> None:
        with self._lock:
            for log in self._logs:
                for entry in log.entries:
                    if entry.connection is connection and entry.outcome is Outcome.OPEN and entry.number > after:
                        entry.outcome = outcome


def record_of(row: Sequence[Any]) -> OutboxRecord:
    """Return a row of `TableLayout.row` as a record: bytes that are UTF-8 as text, whatever they were made of."""
    topic, key, value, header_keys, header_values, *partition = row
    headers = [(name, _text(header)) for name, header in zip(header_keys, header_values, strict=True)]
    return OutboxRecord(topic, key, _text(value), headers, *partition)


def _text(value: bytes | str | None) -> bytes | str | None:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


interception = Interception()
