"""Sending messages to a queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from outbox_core.kafka import KafkaError, KafkaException, make_producer
from outbox_core.kafka import Producer as KafkaProducer
from outbox_queue.clients import producer_settings
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueClosed, SendFailed
from outbox_queue.headers import UserHeaders
from outbox_queue.metrics import QueueCounters
from outbox_queue.payloads import PayloadCheck
from outbox_queue.waiting import Timeout, seconds

_POLL_EVERY = 256
_FULL_QUEUE_WAIT_SECONDS = 0.05
_MEASURE_EVERY = 16
_SLACK_SECONDS = 1.0
_MOST_KEPT = 10_000
_MOST_KEPT_BYTES = 64 * 2**20

# The record was under way when the client gave it up: it may have arrived.
_UNCERTAIN = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001  confluent's public constants
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)

_log = logging.getLogger(__name__)


class Producer:
    """Sends messages to one queue, from any thread. Made by `Queue.producer`; a context manager.

    `send` does not wait: a batch goes out every few milliseconds. Leaving the `with` block without an error, or a
    `flush` that returns, means that every message sent so far is in Kafka, once.

    Args:
        config: of the queue.
        queue: its name.
        counters: of the queue.
    """

    def __init__(self, config: QueueConfig, queue: str, counters: QueueCounters) -> None:
        self._config = config
        self._queue = queue
        self._key = queue.encode()
        self._counters = counters
        self._check = PayloadCheck(config, queue)
        self._producer = self._make()
        self._patience = config.delivery_timeout.total_seconds() + _SLACK_SECONDS
        self._sent = 0
        self._delivered = 0
        self._latency = 0.0
        self._failures: Counter[str] = Counter()
        self._undelivered: list[bytes] = []
        self._undelivered_bytes = 0
        self._uncertain = 0
        self._reporting = threading.Lock()
        self._is_closed = False

    def _make(self) -> KafkaProducer:
        # Successes are reported too: they are what `produced` counts.
        return make_producer({**producer_settings(self._config), "delivery.report.only.error": False})

    def __repr__(self) -> str:
        return f"<Producer of {self._queue!r}>"

    def send(self, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None) -> None:
        """Send a message. Returns at once, unless very many are under way.

        Args:
            payload: `bytes` as they are, `str` as UTF-8, anything else but None becomes JSON.
            headers: a mapping or (name, value) pairs; a name may occur more than once, and must not begin with `kmq-`.
            delay: it is not handed out before this time has passed; None for at once. Goes by the wall clocks of this
                process and the consumer.

        Raises:
            InvalidMessage: naming what is wrong; nothing was sent.
            MessageTooLarge: if a consumer could not start it; nothing was sent.
            SendFailed: if no place got free for it within `delivery_timeout`; it was not sent.
            QueueClosed: if the producer has been closed.
        """
        if self._is_closed:
            raise QueueClosed(f"the producer of queue {self._queue!r} has been closed")
        value, pairs = self._check.encode(payload, headers, delay)
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
        """`send`, and `flush`: the message is in Kafka when this returns.

        Raises:
            SendFailed: if it is not, or that is not known; also for messages that were sent before.
            InvalidMessage, MessageTooLarge, QueueClosed: as `send`.
        """
        self.send(payload, headers=headers, delay=delay)
        self.flush(timeout)

    def flush(self, timeout: Timeout = None) -> None:
        """Wait until every message that was sent is in Kafka.

        Args:
            timeout: None for as long as the setting `delivery_timeout` allows.

        Raises:
            SendFailed: with the reasons, and what was not delivered; the producer can go on.
        """
        left = self._producer.flush(self._patience if timeout is None else seconds(timeout))
        with self._reporting:
            self._count()
            failures, self._failures = self._failures, Counter()
            undelivered, self._undelivered = self._undelivered, []
            uncertain, self._uncertain = self._uncertain, 0
            self._undelivered_bytes = 0
        if not left and not failures:
            return
        reasons = [f"{number} not delivered: {reason}" for reason, number in failures.items()]
        if uncertain:
            reasons.append(f"{uncertain} of these may have arrived")
        if left:
            reasons.append(f"{left} not acknowledged in time")
        raise SendFailed(
            f"messages to queue {self._queue!r}: {'; '.join(reasons)}",
            dict(failures),
            undelivered=undelivered,
            unconfirmed=left + uncertain,
        )

    def close(self) -> None:
        """Flush for `close_timeout` at most, and send nothing any more.

        Raises:
            SendFailed: if a message was not delivered, or that is not known.
        """
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
            _log.error("%s", failed)  # the block's own error is what the caller should see
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
        if error.fatal():  # the client delivers nothing any more; what it has comes back as not delivered
            with self._reporting:
                broken, self._producer = self._producer, self._make()
            broken.purge()
            broken.flush(_SLACK_SECONDS)
        return self._not_sent(error.str())

    def _not_sent(self, reason: str) -> SendFailed:
        return SendFailed(f"a message to queue {self._queue!r} was not sent: {reason}", {reason: 1})

    def _report(self, error: KafkaError | None, message: Any) -> None:
        """On whichever thread polls or flushes."""
        with self._reporting:
            if error is None:
                self._delivered += 1
                self._latency = message.latency()
                if self._delivered == _MEASURE_EVERY:
                    self._count()
                return
            is_first = not self._failures
            self._failures[error.str()] += 1
            if error.code() in _UNCERTAIN:
                self._uncertain += 1
            else:
                self._keep(message.value())
        if is_first:  # who only sends, and never flushes, hears of it here
            _log.warning(
                "queue %r: a message was not delivered: %s; `flush` and `close` tell of all", self._queue, error.str()
            )

    def _keep(self, payload: bytes) -> None:
        """For whoever wants to send it again; not without end, if nobody ever asks."""
        self._undelivered_bytes += len(payload)
        if len(self._undelivered) < _MOST_KEPT and self._undelivered_bytes <= _MOST_KEPT_BYTES:
            self._undelivered.append(payload)

    def _count(self) -> None:
        """Count what was delivered; the last of them stands for the time of all."""
        if self._delivered:
            self._counters.produced(self._delivered, self._latency)
            self._delivered = 0
