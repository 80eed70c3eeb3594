"""One assigned partition of the marker topic: it sends ticks, and redelivers expired messages.

- The producer of redeliveries is prepared *before* the tick that judges expired messages, also when it is replaced: so
  everything that another tracker had committed is read before any decision.
- A tick that cannot be sent, or is not read back while nothing else is read either, and messages that cannot be
  redelivered, are work that this tracker could not do: after a while it leaves its group (`outbox_queue.duty`).
- A tick that does not come back within two seconds may wait behind the unfinished transaction of a tracker that died:
  preparing the producer ends that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from outbox_core import election
from outbox_core.kafka.clients import KafkaError, KafkaException, Producer
from outbox_core.outage import Outage
from outbox_core.printable import plural
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.duty import GroupDuty
from outbox_queue.metrics import QueueMetrics
from outbox_queue.protocol.headers import queue_name
from outbox_queue.redelivery.partition import MarkerPartition, Tick
from outbox_queue.redelivery.redeliverer import Redelivered, Redeliverer

_REDELIVERED_AT_ONCE = 500
_REDELIVERED_BYTES = 4_000_000
_TICK_PATIENCE_MS = 2000.0
_TICK_LOST_MS = 10_000.0
_RETRY_MS = 1000.0
_REFUSED_MS = 60_000.0
_METADATA_SECONDS = 1.0
_TICK = "read back what it writes to"
_REDELIVER = "redeliver messages of"

_log = logging.getLogger(__name__)


@dataclass
class TrackerContext:
    """The things that the partitions of one tracker share."""

    config: QueueConfig  # of the queues
    metrics: QueueMetrics  # of the process
    give_up: Callable[[], bool]  # whether to end; asked before steps that may take long
    ticks: Producer  # producer of ticks
    duty: GroupDuty  # told about work that is tried and done
    redelivery: Outage = field(default_factory=lambda: Outage("redelivery", _log))  # log of failed redeliveries
    clock: Outage = field(default_factory=lambda: Outage("asking for the time", _log))  # log of failed ticks
    reading: Outage = field(default_factory=lambda: Outage("reading markers", _log))  # log of refusals


class TrackedPartition:
    """A partition from its assignment until it is revoked."""

    def __init__(self, number: int, ctx: TrackerContext) -> None:
        config = ctx.config
        self.markers = MarkerPartition(
            number,
            tick_interval=milliseconds(config.redelivery_tracker.use_now_if_no_marker_seen),
            longest_ms=milliseconds(config.marker_retention / 2),
        )
        self.committed: int | None = None
        self._ctx = ctx
        self._redeliverer = Redeliverer(config, number)
        self._name = f"partition {number} of the marker topic"
        self._retry_at = 0.0
        self._ticked_at: float | None = None  # when the last tick was sent that has come back
        self._is_closed = False

    def close(self) -> None:
        """Let go of the producer; the partition is another tracker's."""
        self._is_closed = True
        self._ctx.clock.forget()  # of all partitions: they are revoked together
        self._redeliverer.close()

    def attend(self, now: float) -> bool:
        """Send a tick, or redeliver a batch, if it is time to; return whether Kafka let us."""
        if now < self._retry_at:
            return True
        if self.markers.tick is not None:
            return self._wait_for_tick(self.markers.tick, now)
        if self.markers.has_expired:
            return self._redeliver()
        wants_tick = self.markers.wants_tick(now) or self._ctx.reading.is_ongoing  # perhaps there is nothing to read
        return not wants_tick or self.send_tick(now)

    def _wait_for_tick(self, tick: Tick, now: float) -> bool:
        quiet = now - max(tick.sent_at, self.markers.read_at)
        if quiet > _TICK_PATIENCE_MS:
            self._ctx.duty.tried(_TICK, self.markers.number)
        if quiet > _TICK_PATIENCE_MS and not self._redeliverer.is_prepared:
            return self._prepare()
        if quiet > _TICK_LOST_MS:
            self.markers.tick_failed(tick.token)
            self._note_failure(f"what was written {(now - tick.sent_at) / 1000:.0f} s ago cannot be read")
        return True

    def send_tick(self, now: float) -> bool:
        """Send a tick; return False if the producer of redeliveries could not be prepared first."""
        markers = self.markers
        if markers.looks_expired(now):
            self._ctx.duty.tried(_REDELIVER, markers.number)
        if markers.looks_expired(now) and not self._redeliverer.is_prepared and not self._prepare():
            return False
        value, token = markers.send_tick(now, may_judge=self._redeliverer.is_prepared)

        def fail(error: object) -> None:
            markers.tick_failed(token)
            self._retry_at = now_ms() + _RETRY_MS
            self._note_failure(error)

        def report(error: KafkaError | None, _: object) -> None:
            if error is not None and not self._is_closed:
                fail(error.str())

        try:
            self._ctx.ticks.produce(self._ctx.config.marker_topic, value, None, markers.number, on_delivery=report)
        except BufferError as error:
            fail(error)
        except KafkaException as error:
            fail(error.args[0].str())
            if error.args[0].code() == KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  a public constant
                self._learn_partitions()
        return True

    def _learn_partitions(self) -> None:
        """Have the producer of ticks ask for the topic's partitions: the consumer may hear of new ones long before."""
        with suppress(KafkaException):
            self._ctx.ticks.list_topics(self._ctx.config.marker_topic, timeout=_METADATA_SECONDS)

    def note_read(self) -> None:
        """Take in that markers were read."""
        number, ticked_at = self.markers.number, self.markers.last_tick_at
        self._ctx.clock.recovered(number)
        self._ctx.duty.has_read(number)
        if ticked_at != self._ticked_at:
            self._ticked_at = ticked_at
            self._ctx.duty.succeeded(_TICK, number)
        elif self.markers.tick is not None:
            self._ctx.duty.dropped(_TICK, number)  # it waits behind what is being read

    def note_nothing_left(self, now: float) -> bool:
        """Tell whether no message is left to redeliver: others may have been finished by their consumer meanwhile."""
        if self.markers.has_expired or self.markers.looks_expired(now):
            return False
        self._ctx.duty.dropped(_REDELIVER, self.markers.number)
        return True

    def _note_failure(self, error: object) -> None:
        self._ctx.duty.tried(_TICK, self.markers.number)
        self._ctx.clock.failed(f"{self._name}: {error}", self.markers.number)

    def _prepare(self) -> bool:
        failure = self._redeliverer.prepare(self._ctx.give_up)
        if failure is not None:
            self._ctx.redelivery.failed(f"{self._name}: {failure.reason}")
            self._retry_at = now_ms() + _RETRY_MS
        return failure is None

    def _redeliver(self) -> bool:
        markers = self.markers
        batch = markers.take_expired(_REDELIVERED_AT_ONCE, _REDELIVERED_BYTES)
        if not batch:
            return True
        markers.check_unfinished(batch)
        self._ctx.duty.tried(_REDELIVER, markers.number)
        result = self._redeliverer.redeliver(batch, self._is_unable)
        markers.finish(result.done)
        markers.postpone(result.refused, _REFUSED_MS)
        markers.put_back(result.left)
        self._count(result)
        if result.failure is not None:
            markers.judge_again()
            self._ctx.redelivery.failed(f"{self._name}: {result.failure.reason}")
            self._retry_at = now_ms() + _RETRY_MS
            return False
        if result.done:
            self._ctx.redelivery.recovered()
        if result.done or result.refused:
            self._ctx.duty.succeeded(_REDELIVER, markers.number)
        if not self._redeliverer.is_prepared:
            markers.judge_again()
        return True

    def _is_unable(self) -> bool:
        """Tell whether to leave a transaction to the next tracker."""
        return self._ctx.duty.is_unable

    def _count(self, result: Redelivered) -> None:
        metrics, topic = self._ctx.metrics, self._ctx.config.dead_letters
        for queue, count in result.copies.items():
            metrics.of(queue_name(queue)).count("redelivered", count)
        for queue, count in result.dead.items():
            metrics.of(queue_name(queue)).count("dead_lettered", count)
            _log.warning("queue %r: %s set aside in %s", queue_name(queue), plural(count, "message"), topic)


def now_ms() -> float:
    """Return milliseconds of a monotonic clock that goes on while the machine sleeps."""
    return election.now() * 1000
