"""Which messages of one marker partition are unfinished, from which offset they could be rebuilt, and which expired.

The seed's three structures, in two:

- **by message id**: a dict, from the start marker until the end marker;
- **by marker offset**: the same dict. Start markers arrive in the order of their offsets and a dict keeps that order,
  so its first entry has the smallest offset. Whoever reads the partition from there on finds everything that is
  unfinished.
- **by deadline**: a heap. A keep-alive that moves a deadline back changes nothing there: when the old deadline comes
  up, the entry is put back with its new one. Only an earlier deadline is pushed.

Invariants:

- an entry is in the heap with a deadline no later than its own, unless `expired` has handed it out;
- a second start marker replaces the first, offset included: it carries everything the first one did;
- a keep-alive or an end marker of an unknown message changes nothing, so that a straggler revives nobody;
- the heap is rebuilt when most of it belongs to finished messages: it never holds more than twice what is unfinished,
  and a constant.

Times are milliseconds of the partition's own clock (`outbox_queue.deadline_clock`). Used by one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

MessageId = tuple[int, int]
"""Partition and offset of a message in the message topic."""

_SLACK = 1024


@dataclass(slots=True, eq=False)
class Unfinished:
    """A message between its start marker and its end marker.

    Attributes:
        message_id: partition and offset in the message topic.
        queue: id of its queue, as in the marker.
        marker_offset: offset of its last start marker.
        started: when that was written.
        deadline: when to redeliver it.
        start: that start marker, with all that redelivery needs; not looked at here.
        attempt: what a keep-alive put in the place of the start marker's attempt, None if none did.
        reason: what the last keep-alive said about why the message was given back.
        queued: the earliest deadline that the heap has for it, None if it has none.
    """

    message_id: MessageId
    queue: bytes
    marker_offset: int
    started: float
    deadline: float
    start: Any
    attempt: int | None = None
    reason: str = ""
    queued: float | None = None


class QueueLoad(NamedTuple):
    """What is unfinished of one queue.

    Attributes:
        messages: how many.
        oldest_started: when the first of them was started, on the partition's clock.
    """

    messages: int
    oldest_started: float


class InProgress:
    """The unfinished messages of one marker partition."""

    def __init__(self) -> None:
        self._by_id: dict[MessageId, Unfinished] = {}
        self._by_deadline: list[tuple[float, MessageId]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Unfinished]:
        return iter(self._by_id.values())

    def get(self, message_id: MessageId) -> Unfinished | None:
        """The unfinished message of that id, if there is one."""
        return self._by_id.get(message_id)

    @property
    def heap_size(self) -> int:
        """Entries in the heap, those of finished messages included."""
        return len(self._by_deadline)

    def start(
        self, message_id: MessageId, *, queue: bytes, marker_offset: int, started: float, deadline: float, start: Any
    ) -> None:
        """A start marker was read; offsets must increase from call to call."""
        known = self._by_id.pop(message_id, None)
        entry = Unfinished(message_id, queue, marker_offset, started, deadline, start)
        if known is not None:
            entry.queued = known.queued
        self._by_id[message_id] = entry
        self._queue(entry)

    def keep_alive(self, message_id: MessageId, deadline: float) -> Unfinished | None:
        """A keep-alive marker was read; return its message if that is unfinished."""
        entry = self._by_id.get(message_id)
        if entry is not None:
            entry.deadline = deadline
            self._queue(entry)
        return entry

    def end(self, message_id: MessageId) -> bool:
        """An end marker was read, or the message redelivered; return whether it was unfinished."""
        return self._by_id.pop(message_id, None) is not None

    def has_expired(self, now: float) -> bool:
        """Whether `expired(now)` would return anything."""
        return self._due(now) is not None

    def expired(self, now: float) -> list[Unfinished]:
        """Take out of the heap whatever has a deadline of `now` or before, in the order of deadlines.

        The entries stay unfinished. Call `end` for each that was redelivered, and `put_back` for each that was not.
        """
        found: list[Unfinished] = []
        while (entry := self._due(now)) is not None:
            heappop(self._by_deadline)
            entry.queued = None
            found.append(entry)
        return found

    def put_back(self, entry: Unfinished) -> None:
        """Have `expired` hand it out again, unless it has ended."""
        if self._by_id.get(entry.message_id) is entry:
            self._queue(entry)

    def smallest_offset(self) -> int | None:
        """Offset of the first start marker whose message is unfinished; None if all are finished."""
        first = next(iter(self._by_id.values()), None)
        return None if first is None else first.marker_offset

    def by_queue(self) -> dict[bytes, QueueLoad]:
        """What is unfinished of each queue: one pass over everything."""
        loads: dict[bytes, QueueLoad] = {}
        for entry in self._by_id.values():
            count, oldest = loads.get(entry.queue, (0, entry.started))
            loads[entry.queue] = QueueLoad(count + 1, min(oldest, entry.started))
        return loads

    def _queue(self, entry: Unfinished) -> None:
        if entry.queued is not None and entry.queued <= entry.deadline:
            return
        entry.queued = entry.deadline
        if len(self._by_deadline) > 2 * len(self._by_id) + _SLACK:
            self._rebuild()
        else:
            heappush(self._by_deadline, (entry.deadline, entry.message_id))

    def _rebuild(self) -> None:
        self._by_deadline = [(entry.queued, key) for key, entry in self._by_id.items() if entry.queued is not None]
        heapify(self._by_deadline)

    def _due(self, now: float) -> Unfinished | None:
        """The entry at the heap's head if it is due, after whatever is outdated there has been put right."""
        heap = self._by_deadline
        while heap and heap[0][0] <= now:
            queued, message_id = heap[0]
            entry = self._by_id.get(message_id)
            if entry is None or entry.queued != queued:
                heappop(heap)
            elif entry.deadline > queued:
                heappop(heap)
                entry.queued = None
                self._queue(entry)
            else:
                return entry
        return None
