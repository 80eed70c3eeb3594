"""Knowledge of one partition of the marker topic, and of its expired messages: the protocol, without Kafka.

A tracker must never redeliver a message whose end marker or keep-alive it has just not read yet: after a start, after
a pause, or behind an open transaction. So it judges expiry only at a **tick**, a marker that it appends itself:

1. something looks expired (`DeadlineClock` says so), or there was no tick for a while: a tick is sent;
2. it is read back. Everything that was appended before it has been read, and its timestamp is the broker's time;
3. messages whose deadline is before the moment at which it was sent are expired: `take_expired` returns them.

A tick is a keep-alive of a message that cannot exist, in partition -1 at offset -1, which kafka-mq-go's trackers skip.
Its `value` is a token; ticks of other trackers are only readings of the clock.

Until its first tick is read back a partition is *catching up*. On a topic with timestamps of its producers (CreateTime)
a tick tells no time, and the monotonic clock has to do.

Invariants:

- no message is taken that was ended, or kept alive, by a marker that was appended before the tick;
- a successor that begins at `offset_to_commit` knows everything that this tracker knows.

Times are milliseconds; `now` is on a monotonic clock. Used by one thread.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from google.protobuf.message import DecodeError

from outbox_core.errors import must
from outbox_core.kafka.clients import TIMESTAMP_LOG_APPEND_TIME
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.markers_pb2 import Marker
from outbox_queue.redelivery.deadline_clock import DeadlineClock
from outbox_queue.redelivery.in_progress import InProgress, QueueLoad, Unfinished

_log = logging.getLogger(__name__)

_parse = wire.Marker.FromString


class Tick(NamedTuple):
    """A tick that was sent and not yet read back."""

    token: bytes  # its value
    sent_at: float  # on the monotonic clock
    may_judge: bool  # whether messages may expire when it comes back


class _Judgement(NamedTuple):
    at: float
    expired: list[Unfinished]


class MarkerPartition:
    """The state of one partition: markers read, the awaited tick, and messages judged as expired."""

    def __init__(self, number: int, *, tick_interval: float, longest_ms: float = math.inf) -> None:
        self.number = number
        self.tick: Tick | None = None
        self.unreadable = 0
        self.read_at = 0.0
        self._tick_interval = tick_interval
        self._timeouts = _Timeouts(number, longest_ms)
        self._in_progress = InProgress()
        self._clock = DeadlineClock()
        self._position: int | None = None
        self._last_tick_at: float | None = None
        self._judgement = _Judgement(-1.0, [])

    def __len__(self) -> int:
        return len(self._in_progress)

    @property
    def is_caught_up(self) -> bool:
        """True if everything that was there when the partition was assigned has been read."""
        return self._last_tick_at is not None

    @property
    def last_tick_at(self) -> float | None:
        """When the last tick was sent that has been read back; None before the first."""
        return self._last_tick_at

    @property
    def position(self) -> int | None:
        """Offset after the last marker that was read; None before the first."""
        return self._position

    def read(self, offset: int, timestamp: tuple[int, int], key: bytes | None, value: bytes | None, now: float) -> None:
        """Apply a marker."""
        position = self._position
        if position is not None and offset < position:  # a call would cost more than the rest of the check
            what = "markers must be read in the order of offsets; %d follows %d (in a topic made anew: start again)"
            must(False, what, offset, position - 1)
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
                deadline=self._clock.latest(appended, now) + self._timeouts.cut(marker.redeliver_after_ms, offset),
                start=(key, value),
            )
        elif kind == wire.KEEPALIVE:
            latest = self._clock.latest(appended, now)
            self._keep_alive(message_id, marker, latest + self._timeouts.cut(marker.redeliver_after_ms, offset))
        else:
            self._skip(offset, f"its type is {kind}")

    def wants_tick(self, now: float) -> bool:
        """Return whether it is time to send a tick."""
        if self.tick is not None or self.has_expired:
            return False
        if self._last_tick_at is None:
            return True
        if not self._in_progress:
            return False
        return self.looks_expired(now) or now - self._last_tick_at >= self._tick_interval

    def looks_expired(self, now: float) -> bool:
        """Return whether a message seems to be expired, by the clock alone."""
        time = self._clock.time(now)
        return time is not None and self._in_progress.has_expired(time)

    def send_tick(self, now: float, *, may_judge: bool) -> tuple[bytes, bytes]:
        """Await a new tick; return the value of its record, and its token."""
        token = uuid.uuid4().bytes
        self.tick = Tick(token, now, may_judge)
        return wire.tick_marker(token), token

    def tick_failed(self, token: bytes) -> None:
        """Await this tick no longer: it was not delivered."""
        if self.tick is not None and self.tick.token == token:
            self.tick = None

    def take_expired(self, most: int, most_bytes: int) -> list[Unfinished]:
        """Take messages to redeliver, up to a number and a size; pass each to `finish`, `put_back` or `postpone`."""
        taken: list[Unfinished] = []
        size = 0
        judged_at, expired = self._judgement
        while expired and len(taken) < most and size < most_bytes:
            entry = expired.pop()
            if self._in_progress.get(entry.message_id) is not entry:
                continue  # its end was read since
            if entry.deadline > judged_at:
                continue  # it was kept alive since, and is in the heap again
            taken.append(entry)
            size += len(entry.start[1])
        return taken

    @property
    def has_expired(self) -> bool:
        """True if `take_expired` may return something."""
        return bool(self._judgement.expired)

    def finish(self, entries: Iterable[Unfinished]) -> None:
        """Forget messages that are redelivered."""
        for entry in entries:
            self._in_progress.end(entry.message_id)

    def put_back(self, entries: Iterable[Unfinished]) -> None:
        """Have the next tick judge these again."""
        for entry in entries:
            self._in_progress.put_back(entry)

    def postpone(self, entries: Iterable[Unfinished], milliseconds: float) -> None:
        """Have these expire again only after a while."""
        for entry in entries:
            entry.deadline = max(entry.deadline, self._judgement.at) + milliseconds
            self._in_progress.put_back(entry)

    def judge_again(self) -> None:
        """Put everything back until another tick has been read."""
        self.put_back(self._judgement.expired)
        self._judgement.expired.clear()
        self.tick = None

    def offset_to_commit(self) -> int | None:
        """Return the offset from which a successor has to read; None if no marker was read yet."""
        smallest, position = self._in_progress.smallest_offset(), self._position
        if smallest is None or position is None:
            return position
        must(smallest < position, "a message in progress must have been read; %d is not, up to %d", smallest, position)
        return smallest

    def check_unfinished(self, entries: Iterable[Unfinished]) -> None:
        """Raise InvariantBroken unless these are in progress, and the tick that they were judged at has been read."""
        must(self.is_caught_up and self.tick is None, "nothing must be redelivered before a tick has been read back")
        get = self._in_progress.get
        ended = [entry.message_id for entry in entries if get(entry.message_id) is not entry]
        must(not ended, "only messages in progress must be redelivered; %s are not", ended)

    def load(self, now: float) -> dict[bytes, QueueLoad]:
        """Sum up the unfinished messages of each queue, with the age of the oldest in milliseconds."""
        time = self._clock.time(now) or 0.0
        loads = self._in_progress.by_queue()
        return {queue: QueueLoad(count, max(0.0, time - oldest)) for queue, (count, oldest) in loads.items()}

    def unfinished(self) -> list[Unfinished]:
        """Return all unfinished messages, in the order of start markers."""
        return list(self._in_progress)

    def time(self, now: float) -> float | None:
        """Return the partition's time, in milliseconds."""
        return self._clock.time(now)

    def _keep_alive(self, message_id: tuple[int, int], marker: Marker, deadline: float) -> None:
        entry = self._in_progress.keep_alive(message_id, deadline)
        if entry is not None:
            if marker.HasField("attempt"):
                entry.attempt = marker.attempt
            entry.reason = marker.reason

    def _read_tick(self, token: bytes, timestamp: tuple[int, int], now: float) -> None:
        kind, stamp = timestamp
        tick = self.tick if self.tick is not None and self.tick.token == token else None
        if tick is not None and self.is_caught_up:
            self._clock.read_up_to(tick.sent_at, now)  # before its own timestamp, which is checked by that
        if kind == TIMESTAMP_LOG_APPEND_TIME:
            self._clock.read(stamp, now)
        if tick is None:
            return
        self.tick = None
        self._last_tick_at = tick.sent_at
        self._clock.read_up_to(tick.sent_at, now)
        if tick.may_judge:
            # It was appended after that; its timestamp would be too late if the broker's clock was set forward.
            sent = (self._clock.time(now) or 0.0) - (now - tick.sent_at)
            expired = self._in_progress.expired(sent)
            expired.reverse()
            self._judgement = _Judgement(sent, expired)

    def _skip(self, offset: int, error: object) -> None:
        self.unreadable += 1
        if self.unreadable == 1:
            _log.warning(
                "marker partition %d: offset %d is no marker, and skipped: %s; more of them are counted, not logged",
                self.number,
                offset,
                error,
            )


class _Timeouts:
    """Redelivery timeouts of markers, cut to the longest; the first cut is logged."""

    def __init__(self, partition: int, longest_ms: float) -> None:
        self._partition = partition
        self._longest_ms = longest_ms
        self._has_cut = False

    def cut(self, redeliver_after_ms: int, offset: int) -> float:
        if redeliver_after_ms <= self._longest_ms:
            return redeliver_after_ms
        if not self._has_cut:
            self._has_cut = True
            _log.warning(
                "marker partition %d: offset %d asks for %d ms, more than half of marker_retention; it gets %d ms, and "
                "so do those behind it",
                self._partition,
                offset,
                redeliver_after_ms,
                self._longest_ms,
            )
        return self._longest_ms
