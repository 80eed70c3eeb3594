"""The unfinished messages of one marker partition: by id, by offset of their start markers, and by deadline.

A dict has them **by message id** and, since start markers arrive in the order of their **offsets**, in that order: its
first entry has the smallest offset, and reading the partition from there on finds every unfinished message. A heap has
them **by deadline**. A keep-alive that moves a deadline back changes nothing there: when the old deadline comes up, the
entry is put back with its new one. Only an earlier deadline is pushed.

Invariants:

- an entry is in the heap with a deadline no later than its own, unless `expired` has taken it out;
- a second start marker replaces the first, offset included: it carries everything the first one did;
- a keep-alive or an end marker of an unknown message changes nothing, so that a late one revives no message;
- the heap never holds more than twice the unfinished messages, plus a constant: beyond that it is rebuilt.

Times are milliseconds of the partition's own clock (`deadline_clock`). Used by one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

MessageId = tuple[int, int]  # partition and offset in the message topic

_SLACK = 1024


@dataclass(slots=True, eq=False)
class Unfinished:
    """A message between its start marker and its end marker."""

    message_id: MessageId  # partition and offset in the message topic
    queue: bytes  # id of its queue, as in the marker
    marker_offset: int  # offset of its last start marker
    started: float  # when that was written
    deadline: float  # when to redeliver it
    start: Any  # the start marker, with all that redelivery needs; not read here
    attempt: int | None = None  # of a keep-alive, in place of the start marker's
    reason: str = ""  # of the last nack
    queued: float | None = None  # the earliest deadline in the heap, None if it has none


class QueueLoad(NamedTuple):
    """Unfinished messages of one queue."""

    messages: int  # how many
    oldest_started: float  # start of the oldest, on the partition's clock


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
        """Return the unfinished message of that id, if there is one."""
        return self._by_id.get(message_id)

    @property
    def heap_size(self) -> int:
        """Entries in the heap, those of finished messages included."""
        return len(self._by_deadline)

    def start(
        self,
        message_id: MessageId,
        *,
        queue: bytes,
        marker_offset: int,
        started: float,
        deadline: float,
        start: Any,
    ) -> None:
        """Apply a start marker; offsets must increase from call to call."""
        known = self._by_id.pop(message_id, None)
        entry = Unfinished(message_id, queue, marker_offset, started, deadline, start)
        if known is not None:
            entry.queued = known.queued
        self._by_id[message_id] = entry
        self._queue(entry)

    def keep_alive(self, message_id: MessageId, deadline: float) -> Unfinished | None:
        """Apply a keep-alive marker; return its message if that is unfinished."""
        entry = self._by_id.get(message_id)
        if entry is not None:
            entry.deadline = deadline
            self._queue(entry)
        return entry

    def end(self, message_id: MessageId) -> bool:
        """Forget a message that is finished or redelivered; return whether it was unfinished."""
        return self._by_id.pop(message_id, None) is not None

    def has_expired(self, now: float) -> bool:
        """True if `expired(now)` would return anything."""
        return self._due(now) is not None

    def expired(self, now: float) -> list[Unfinished]:
        """Take messages with a deadline of `now` or before out of the heap, in the order of deadlines.

        They stay unfinished until `end` is called for redelivered ones, and `put_back` for the others.
        """
        found: list[Unfinished] = []
        while (entry := self._due(now)) is not None:
            heappop(self._by_deadline)
            entry.queued = None
            found.append(entry)
        return found

    def put_back(self, entry: Unfinished) -> None:
        """Put a message back into the heap, unless it has ended."""
        if self._by_id.get(entry.message_id) is entry:
            self._queue(entry)

    def smallest_offset(self) -> int | None:
        """Return the offset of the first start marker whose message is unfinished; None if all are finished."""
        first = next(iter(self._by_id.values()), None)
        return None if first is None else first.marker_offset

    def by_queue(self) -> dict[bytes, QueueLoad]:
        """Sum up the unfinished messages of each queue, in one pass."""
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
        """Correct outdated entries at the heap's head; return the entry there if it is due."""
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
