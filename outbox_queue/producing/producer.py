"""Sending messages to a queue."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from outbox_core.claims import ClaimCheck
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import KafkaError, KafkaException, make_producer
from outbox_core.kafka.clients import Producer as KafkaProducer
from outbox_core.kafka.errors import MAYBE_DELIVERED
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueClosed, SendFailed, refuse_forked
from outbox_queue.metrics import QueueCounters
from outbox_queue.producing.payloads import PayloadCheck, with_creation
from outbox_queue.protocol.clients import producer_settings
from outbox_queue.protocol.headers import UserHeaders
from outbox_queue.times import Timeout, seconds

_POLL_EVERY = 256
_FULL_QUEUE_WAIT_SECONDS = 0.05
_MEASURE_EVERY = 16
_SLACK_SECONDS = 1.0
_MOST_KEPT = 10_000
_MOST_KEPT_BYTES = 64 * 2**20


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reports:
    """Deliveries since the last count, and failures since the last flush."""

    delivered: int = 0
    latency: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    uncertain: int = 0  # failures of messages that may have arrived
    undelivered: list[bytes] = field(default_factory=list)
    undelivered_bytes: int = 0

    def keep(self, payload: bytes) -> None:
        """Keep an undelivered payload for `SendFailed`, up to a limit: the application may never flush."""
        self.undelivered_bytes += len(payload)
        if len(self.undelivered) < _MOST_KEPT and self.undelivered_bytes <= _MOST_KEPT_BYTES:
            self.undelivered.append(payload)


class Producer:
    """A producer for one queue and any thread. Made by `Queue.producer`; a context manager.

    `send` does not wait: a batch goes out every few milliseconds. Leaving the `with` block without an error, or a
    `flush` that returns, means that every message sent so far is in Kafka, once.
    """

    def __init__(
        self, config: QueueConfig, queue: str, counters: QueueCounters, claims: ClaimCheck | None = None
    ) -> None:
        self._config = config
        self._queue = queue
        self._key = queue.encode()
        self._counters = counters
        self._check = PayloadCheck(config, queue, claims)
        self._producer = self._make()
        self._sent = 0
        self._reports = _Reports()
        self._reporting = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def _patience(self) -> float:
        return self._config.delivery_timeout.total_seconds() + _SLACK_SECONDS

    def _make(self) -> KafkaProducer:
        # Successes are reported too, for the metric `produced`.
        return make_producer({**producer_settings(self._config), "delivery.report.only.error": False})

    def __repr__(self) -> str:
        return f"<Producer of {self._queue!r}>"

    def send(self, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None) -> None:
        """Send a message. Returns at once, unless very many are under way.

        Args:
            payload: `bytes` as they are, `str` as UTF-8, anything else but None becomes JSON.
            headers: a mapping or (name, value) pairs; a name may occur more than once, and must not begin with `kmq-`.
            delay: shortest time until it is handed out, by the wall clocks of this process and the consumer.

        Raises:
            InvalidMessage: naming the part that is wrong; nothing was sent.
            MessageTooLarge: if a consumer could not start it; nothing was sent.
            ClaimStoreFailed: if it is large and its claim store did not take it; nothing was sent.
            SendFailed: if no place got free for it within `delivery_timeout`; it was not sent.
            QueueClosed: if the producer has been closed.
            QueueError: if it was made before this process was forked, which its client does not survive.
        """
        if self._is_closed:
            raise QueueClosed(f"the producer of queue {self._queue!r} has been closed")
        refuse_forked(self, self._pid)
        value, pairs, _ = self._check.encode(payload, with_creation(self._queue, headers), delay)
        try:
            self._produce(value, pairs)
        except BufferError:
            self._wait_and_produce(value, pairs)
        except KafkaException as error:
            raise self._refused(error.args[0]) from None
        self._sent += 1
        if self._sent % _POLL_EVERY == 0:
            self._producer.poll(0)

    def send_and_wait(
        self,
        payload: Any,
        *,
        headers: UserHeaders = (),
        delay: timedelta | None = None,
        timeout: Timeout = None,
    ) -> None:
        """Send a message and flush: it is in Kafka when this returns. Errors are those of `send` and `flush`."""
        self.send(payload, headers=headers, delay=delay)
        self.flush(timeout)

    def flush(self, timeout: Timeout = None) -> None:
        """Wait until every message that was sent is in Kafka, by default as long as `delivery_timeout` allows.

        Raises:
            SendFailed: with the reasons and the undelivered payloads; the producer can go on.
        """
        left = self._producer.flush(self._patience if timeout is None else seconds(timeout))
        with self._reporting:
            self._count()
            reports, self._reports = self._reports, _Reports()
        if not left and not reports.failures:
            return
        reasons = [f"{number} not delivered: {reason}" for reason, number in reports.failures.items()]
        if reports.uncertain:
            reasons.append(f"{reports.uncertain} of these may have arrived")
        if left:
            reasons.append(f"{left} not acknowledged in time")
        raise SendFailed(
            f"messages to queue {self._queue!r}: {'; '.join(reasons)}",
            dict(reports.failures),
            undelivered=reports.undelivered,
            unconfirmed=left + reports.uncertain,
        )

    def close(self) -> None:
        """Flush for `close_timeout` at most, and send no more messages; raises `SendFailed` as `flush` does."""
        if self._is_closed:
            return
        self._is_closed = True
        self.flush(self._config.close_timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SendFailed as failed:
            if error is None:
                raise
            _log.error("%s", failed)  # the caller sees the block's own error
            error.add_note(str(failed))

    def _produce(self, value: bytes, pairs: list[Any]) -> None:
        if pairs:
            self._producer.produce(
                self._config.message_topic, value, self._key, headers=pairs, on_delivery=self._report
            )
        else:
            self._producer.produce(self._config.message_topic, value, self._key, on_delivery=self._report)

    def _wait_and_produce(self, value: bytes, pairs: list[Any]) -> None:
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            self._producer.poll(_FULL_QUEUE_WAIT_SECONDS)
            try:
                self._produce(value, pairs)
            except BufferError:
                continue
            except KafkaException as error:
                raise self._refused(error.args[0]) from None
            return
        raise self._not_sent("too many messages are waiting for their delivery")

    def _refused(self, error: KafkaError) -> SendFailed:
        if error.fatal():  # the client is broken; its queue comes back as not delivered
            try:
                made = self._make()
            except KafkaUnavailable as away:  # the next message tries again
                return self._not_sent(f"{error.str()}; {away}")
            with self._reporting:
                broken, self._producer = self._producer, made
            broken.purge()
            broken.flush(_SLACK_SECONDS)
        return self._not_sent(error.str())

    def _not_sent(self, reason: str) -> SendFailed:
        return SendFailed(f"a message to queue {self._queue!r} was not sent: {reason}", {reason: 1})

    def _report(self, error: KafkaError | None, message: Any) -> None:
        """Count a delivery; called on any thread that polls or flushes."""
        with self._reporting:
            reports = self._reports
            if error is None:
                reports.delivered += 1
                reports.latency = message.latency()
                if reports.delivered == _MEASURE_EVERY:
                    self._count()
                return
            is_first = not reports.failures
            reports.failures[error.str()] += 1
            if error.code() in MAYBE_DELIVERED:
                reports.uncertain += 1
            else:
                reports.keep(message.value())
        if is_first:  # the only sign for an application that never flushes
            _log.warning(
                "queue %r: a message was not delivered: %s; `flush` and `close` tell of all", self._queue, error.str()
            )

    def _count(self) -> None:
        """Count deliveries; the latency of the last one stands for all."""
        reports = self._reports
        if reports.delivered:
            self._counters.count("produced", reports.delivered, reports.latency)
            reports.delivered = 0
