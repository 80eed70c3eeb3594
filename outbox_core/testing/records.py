"""The records that a test's code has stashed, and assertions about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import EllipsisType
from typing import Any, overload

from outbox_core.record import OutboxRecord
from outbox_core.testing.expectation import Expectation, ExpectedHeaders, ExpectedKey, describe, is_same
from outbox_core.testing.interception import CapturedRecord, Outcome, RecordLog, interception

__all__ = ["StashedRecords", "capture_stashed", "in_memory_outbox"]

_MOST_SHOWN = 20


class StashedRecords(Sequence[OutboxRecord]):
    """The captured records that were not rolled back, in the order of their stashing: a sequence that grows.

    A record counts from its stash on, committed or not, as the test's own transaction may never commit. It counts no
    more when the transaction or savepoint around it is rolled back. Of a bare DB-API connection the capture sees
    neither, so its records count in any case. Any thread may stash, and any may look.

    Records are as the table has them; values and header values that are UTF-8 are text, whatever they were made of.
    Compared are records as Kafka would get them: `b"x"` and "x" are one value.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log

    @overload
    def __getitem__(self, index: int) -> OutboxRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[OutboxRecord]: ...
    def __getitem__(self, index: int | slice) -> OutboxRecord | list[OutboxRecord]:
        return [entry.record for entry in self.entries()][index]

    def __len__(self) -> int:
        return len(self.entries())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return False
        records = list(self)
        return len(records) == len(other) and all(map(is_same, records, other))

    def __contains__(self, record: object) -> bool:
        return any(is_same(own, record) for own in self)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"<StashedRecords:\n{_listing(self.entries())}\n>" if self else "<StashedRecords: none>"

    @property
    def committed(self) -> list[OutboxRecord]:
        """The records whose transactions are known to be committed."""
        return self._of(Outcome.COMMITTED)

    @property
    def rolled_back(self) -> list[OutboxRecord]:
        """The records whose transactions or savepoints were rolled back: they will never be published."""
        return self._of(Outcome.ROLLED_BACK)

    def clear(self) -> None:
        """Forget all records captured so far."""
        self._log.entries.clear()

    def entries(self) -> list[CapturedRecord]:
        """Return the records with their numbers and outcomes, those left out that were rolled back."""
        return [entry for entry in tuple(self._log.entries) if entry.outcome is not Outcome.ROLLED_BACK]

    def matching(
        self,
        topic: str | EllipsisType = ...,
        *,
        key: ExpectedKey = ...,
        value: Any = ...,
        headers: ExpectedHeaders = ...,
        partition: int | EllipsisType | None = ...,
    ) -> list[OutboxRecord]:
        """Return the records that are as described; for the arguments see `assert_stashed`."""
        expected = Expectation(topic=topic, key=key, value=value, headers=headers, partition=partition)
        return [record for record in self if expected.matches(record)]

    def assert_stashed(
        self,
        topic: str | EllipsisType = ...,
        *,
        key: ExpectedKey = ...,
        value: Any = ...,
        headers: ExpectedHeaders = ...,
        partition: int | EllipsisType | None = ...,
        count: int | None = None,
    ) -> OutboxRecord:
        """Assert that a record was stashed, and return it; the first, if there are several.

        An argument that is left out (`...`) may be anything.

        Args:
            topic: the very name.
            key: compared as the table keeps it: 7, "7" and b"7" are one key. None: without a key.
            value: `bytes` and `str` are compared with the record's bytes, None with a tombstone. Anything else is
                compared with the value read as JSON; `unittest.mock.ANY` in it equals whatever is there.
            headers: these are among the record's; it may have others.
            partition: the explicit partition. None: none was given.
            count: exactly so many such records; None for one or more.

        Raises:
            AssertionError: with the differences of the record that comes nearest, and all that was stashed.
            InvalidRecord: if no record could have such a topic, key or header.
        """
        __tracebackhide__ = True
        expected = Expectation(topic=topic, key=key, value=value, headers=headers, partition=partition)
        found = [record for record in self if expected.matches(record)]
        if not found or (count is not None and len(found) != count):
            raise AssertionError(self._complaint(expected, len(found), count))
        return found[0]

    def assert_not_stashed(
        self,
        topic: str | EllipsisType = ...,
        *,
        key: ExpectedKey = ...,
        value: Any = ...,
        headers: ExpectedHeaders = ...,
        partition: int | EllipsisType | None = ...,
    ) -> None:
        """Assert that no such record was stashed, or was rolled back; without arguments: that there is none at all.

        Arguments are those of `assert_stashed`.
        """
        __tracebackhide__ = True
        expected = Expectation(topic=topic, key=key, value=value, headers=headers, partition=partition)
        found = [entry for entry in self.entries() if expected.matches(entry.record)]
        if found:
            raise AssertionError(f"{_number(len(found))} stashed {expected}:\n{_listing(found)}")

    def _of(self, outcome: Outcome) -> list[OutboxRecord]:
        return [entry.record for entry in tuple(self._log.entries) if entry.outcome is outcome]

    def _complaint(self, expected: Expectation, found: int, count: int | None) -> str:
        entries = self.entries()
        gone = [entry for entry in tuple(self._log.entries) if entry.outcome is Outcome.ROLLED_BACK]
        lines = [
            f"no record was stashed {expected}"
            if not found
            else f"{_number(found)} stashed {expected}; expected {count}"
        ]
        if not found and any(expected.matches(entry.record) for entry in gone):
            lines += ["", "it was stashed, but its transaction or savepoint was rolled back"]
        elif not found and entries:
            nearest = max(entries, key=lambda entry: expected.likeness(entry.record))
            lines += ["", f"nearest miss: {describe(nearest.record)}"]
            lines += [f"  {difference}" for difference in expected.differences(nearest.record)]
        lines += ["", f"stashed: {'nothing' if not entries else ''}".rstrip(), *_lines(entries)]
        if gone:
            lines += ["", "rolled back:", *_lines(gone)]
        return "\n".join(lines).rstrip()


@contextmanager
def capture_stashed() -> Iterator[StashedRecords]:
    """Capture the records that any thread of this process stashes within the block; they are written as usual.

    Yields:
        the records; they can be asked after the block, too.
    """
    with _captured(RecordLog(writes=True)) as records:
        yield records


@contextmanager
def in_memory_outbox(*, require_transaction: bool = True) -> Iterator[StashedRecords]:
    """Keep the records that this process stashes within the block in memory: the outbox table is not needed.

    For unit tests without a database, and for projects whose tests run on SQLite. Records are checked as ever, also
    against the columns of the table that they were meant for. The session or connection may be any stand-in; records
    that are stashed on a real one are rolled back with its transactions and savepoints.

    Args:
        require_transaction: refuse to stash outside a transaction, as the database's adapters do. False is for code
            whose callers begin the transaction, tested without them.

    Yields:
        the records; they can be asked after the block, too.
    """
    with _captured(RecordLog(writes=False, requires_transaction=require_transaction)) as records:
        yield records


@contextmanager
def _captured(log: RecordLog) -> Iterator[StashedRecords]:
    interception.open(log)
    try:
        yield StashedRecords(log)
    finally:
        interception.close(log)


def _listing(entries: Sequence[CapturedRecord]) -> str:
    return "\n".join(_lines(entries))


def _lines(entries: Sequence[CapturedRecord]) -> list[str]:
    lines = [f"  {position}. {describe(entry.record)}" for position, entry in enumerate(entries[:_MOST_SHOWN], 1)]
    more = len(entries) - _MOST_SHOWN
    return [*lines, f"  ... and {more} more"] if more > 0 else lines


def _number(count: int) -> str:
    return "1 record was" if count == 1 else f"{count} records were"
