"""What a tracker knows of one partition of the marker topic, and when it may redeliver: the protocol, without Kafka.

A tracker must never redeliver a message whose end marker, or keep-alive, it just has not read yet: after a start,
after a pause, or behind an open transaction. So expiry is judged only at a **tick**, a marker that the tracker itself
appends to the partition and reads back:

1. something looks expired (`DeadlineClock` says so), or nothing was asked for a while: a tick is sent;
2. it is read back. Whatever was appended before it has been read, and its timestamp is the broker's present time;
3. what has a deadline before the tick is expired: `take_expired` hands it out.

A tick is a keep-alive of a message that cannot exist, in partition -1 at offset -1, so that kafka-mq-go's trackers
skip it. Its `value` is a token; ticks of others are readings of the clock and nothing else.

Until the first tick is read back the partition is *catching up*. On a topic with timestamps of its producers
(CreateTime) a tick tells nothing about time, and the monotonic clock has to do.

Invariants:

- nothing is handed out that has ended, or been kept alive, in a marker that was appended before the tick;
- `offset_to_commit` is the offset of the first unfinished message's start marker: a successor that begins there knows
  what this tracker knows.

Times are milliseconds; `now` is on a monotonic clock. Used by one thread.
"""

from __future__ import annotations

import logging
import math
import uuid
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from outbox_core.kafka import TIMESTAMP_LOG_APPEND_TIME
from outbox_queue import wire
from outbox_queue.deadline_clock import DeadlineClock
from outbox_queue.in_progress import InProgress, QueueLoad, Unfinished

_log = logging.getLogger(__name__)

_NOWHERE = -1
_parse = wire.Marker.FromString


class Tick(NamedTuple):
    """A tick that was sent and not yet read back.

    Attributes:
        token: its value.
        sent_at: on the monotonic clock.
        may_judge: whether what is expired may be handed out when it comes back.
    """

    token: bytes
    sent_at: float
    may_judge: bool


class MarkerPartition:
    """The state of one partition.

    Args:
        number: of the partition.
        tick_interval: how long messages may be in progress without a tick.
        longest_ms: the longest redelivery timeout that is believed; the first unfinished message holds the offset that
            is committed, so a marker of a stranger that names none would hold it for good.

    Attributes:
        tick: the one that is awaited.
        unreadable: how many records were no markers, or of an unknown version.
        read_at: when the last record was read, on the monotonic clock.
    """

    def __init__(self, number: int, *, tick_interval: float, longest_ms: float = math.inf) -> None:
        self.number = number
        self.tick: Tick | None = None
        self.unreadable = 0
        self.read_at = 0.0
        self._tick_interval = tick_interval
        self._longest_ms = longest_ms
        self._has_cut = False
        self._in_progress = InProgress()
        self._clock = DeadlineClock()
        self._position: int | None = None
        self._last_tick_at: float | None = None
        self._judged = -1.0
        self._expired: list[Unfinished] = []

    def __len__(self) -> int:
        return len(self._in_progress)

    @property
    def is_caught_up(self) -> bool:
        """Whether everything that was there when the partition was assigned has been read."""
        return self._last_tick_at is not None

    @property
    def position(self) -> int | None:
        """Offset after the last marker that was read; None before the first."""
        return self._position

    def read(self, offset: int, timestamp: tuple[int, int], key: bytes | None, value: bytes | None, now: float) -> None:
        """Take note of a marker.

        Args:
            offset: of its record.
            timestamp: of its record: what kind it is of, and milliseconds.
            key: of its record.
            value: what it holds.
            now: on the monotonic clock.
        """
        self._position = offset + 1
        self.read_at = now
        if not value:
            self._skip(offset, "it is empty")
            return
        try:
            marker = _parse(value)
        except DecodeError as error:
            self._skip(offset, error)
            return
        if marker.version != wire.VERSION_1:
            self._skip(offset, f"its version is {marker.version}")
            return
        place = marker.message_id
        message_id = (place.partition, place.offset)
        if message_id[0] < 0:
            self._read_tick(marker.value, timestamp, now)
            return
        appended = self._clock.read(timestamp[1], now)
        kind = marker.type
        if kind == wire.END:
            self._in_progress.end(message_id)
        elif kind == wire.START:
            self._in_progress.start(
                message_id,
                queue=marker.key,
                marker_offset=offset,
                started=appended,
                deadline=appended + self._believed(marker.redeliver_after_ms, offset),
                start=(key, value),
            )
        elif kind == wire.KEEPALIVE:
            self._keep_alive(message_id, marker, appended + self._believed(marker.redeliver_after_ms, offset))
        else:
            self._skip(offset, f"its type is {kind}")

    def wants_tick(self, now: float) -> bool:
        """Whether it is time to send one."""
        if self.tick is not None or self._expired:
            return False
        if self._last_tick_at is None:
            return True
        if not self._in_progress:
            return False
        return self.looks_expired(now) or now - self._last_tick_at >= self._tick_interval

    def looks_expired(self, now: float) -> bool:
        """Whether a message seems to be expired, as far as the clock can tell without asking the broker."""
        time = self._clock.time(now)
        return time is not None and self._in_progress.has_expired(time)

    def send_tick(self, now: float, *, may_judge: bool) -> tuple[bytes, bytes]:
        """Note that a tick is sent; return the value of its record, and its token."""
        token = uuid.uuid4().bytes
        self.tick = Tick(token, now, may_judge)
        return tick_marker(token), token

    def tick_failed(self, token: bytes) -> None:
        """The tick was not delivered: another one may be sent."""
        if self.tick is not None and self.tick.token == token:
            self.tick = None

    def take_expired(self, most: int, most_bytes: int) -> list[Unfinished]:
        """What to redeliver now, up to a number and a size; the caller calls `settle` with each batch."""
        taken: list[Unfinished] = []
        size = 0
        while self._expired and len(taken) < most and size < most_bytes:
            entry = self._expired.pop()
            if self._in_progress.get(entry.message_id) is not entry:
                continue  # its end was read since
            if entry.deadline > self._judged:
                continue  # it was kept alive since, and is in the heap again
            taken.append(entry)
            size += len(entry.start[1])
        return taken

    @property
    def has_expired(self) -> bool:
        """Whether `take_expired` may have something."""
        return bool(self._expired)

    def settle(self, entries: list[Unfinished], *, redelivered: bool) -> None:
        """Say what became of a batch: those that are not redelivered come up again."""
        for entry in entries:
            if redelivered:
                self._in_progress.end(entry.message_id)
            else:
                self._in_progress.put_back(entry)

    def postpone(self, entries: list[Unfinished], milliseconds: float) -> None:
        """Have a batch come up again only after a while."""
        for entry in entries:
            entry.deadline = max(entry.deadline, self._judged) + milliseconds
            self._in_progress.put_back(entry)

    def judge_again(self) -> None:
        """Hand out nothing more until another tick has been read back."""
        self.settle(self._expired, redelivered=False)
        self._expired = []
        self.tick = None

    def offset_to_commit(self) -> int | None:
        """From where a successor has to read; None if nothing was read yet."""
        smallest = self._in_progress.smallest_offset()
        return self._position if smallest is None else smallest

    def load(self, now: float) -> dict[bytes, QueueLoad]:
        """What is unfinished of each queue, with the age of the oldest in milliseconds."""
        time = self._clock.time(now) or 0.0
        loads = self._in_progress.by_queue()
        return {queue: QueueLoad(count, max(0.0, time - oldest)) for queue, (count, oldest) in loads.items()}

    def unfinished(self) -> list[Unfinished]:
        """What is in progress, in the order of start markers."""
        return list(self._in_progress)

    def time(self, now: float) -> float | None:
        """The partition's time, in milliseconds."""
        return self._clock.time(now)

    def _keep_alive(self, message_id: tuple[int, int], marker: Any, deadline: float) -> None:
        entry = self._in_progress.keep_alive(message_id, deadline)
        if entry is not None:
            if marker.HasField("attempt"):
                entry.attempt = marker.attempt
            entry.reason = marker.reason

    def _believed(self, redeliver_after_ms: int, offset: int) -> float:
        """A marker's redelivery timeout, cut to the longest."""
        if redeliver_after_ms <= self._longest_ms:
            return redeliver_after_ms
        if not self._has_cut:
            self._has_cut = True
            _log.warning(
                "marker partition %d: offset %d asks for %d ms, more than half of marker_retention; it gets %d ms, and "
                "so does what follows it",
                self.number,
                offset,
                redeliver_after_ms,
                self._longest_ms,
            )
        return self._longest_ms

    def _read_tick(self, token: bytes, timestamp: tuple[int, int], now: float) -> None:
        kind, stamp = timestamp
        appended = self._clock.read(stamp, now) if kind == TIMESTAMP_LOG_APPEND_TIME else None
        tick = self.tick
        if tick is None or tick.token != token:
            return
        self.tick = None
        self._last_tick_at = tick.sent_at
        self._clock.read_up_to(tick.sent_at, now)
        if appended is None:
            appended = (self._clock.time(now) or 0.0) - (now - tick.sent_at)
        if tick.may_judge:
            self._judged = appended
            self._expired = self._in_progress.expired(appended)
            self._expired.reverse()  # handed out from its end

    def _skip(self, offset: int, error: object) -> None:
        self.unreadable += 1
        if self.unreadable == 1:
            _log.warning(
                "marker partition %d: offset %d is no marker, and skipped: %s; more of them are counted, not logged",
                self.number,
                offset,
                error,
            )


def tick_marker(token: bytes) -> bytes:
    """The value of a tick's record."""
    place = wire.Place(partition=_NOWHERE, offset=_NOWHERE)
    data: bytes = wire.Marker(type=wire.KEEPALIVE, message_id=place, value=token).SerializeToString()
    return data
