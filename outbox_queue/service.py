"""Queues, and the service that they belong to: it checks the topics, but has no connection of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outbox_core.claims import ClaimCheck, ClaimStore
from outbox_core.errors import InvalidConfig, OutboxError
from outbox_core.plain import plain
from outbox_core.printable import escape_log_lines
from outbox_core.record import OutboxRecord
from outbox_queue.config import QueueConfig
from outbox_queue.consuming.aio import AsyncConsumer
from outbox_queue.consuming.consumer import Consumer
from outbox_queue.consuming.worker import Handler, RetryDelay, Worker, backoff, check_handler
from outbox_queue.errors import InvalidMessage
from outbox_queue.metrics import QueueMetrics
from outbox_queue.producing import stashing
from outbox_queue.producing.payloads import PayloadCheck, check_queue_name, with_creation
from outbox_queue.producing.producer import Producer
from outbox_queue.protocol.headers import UserHeaders
from outbox_queue.protocol.topics import Topics, ensure_message_topic, ensure_topics

_QUEUE_SETTINGS = frozenset({"max_attempts", "redelivery_timeout", "max_processing_time", "max_delay", "transactional"})
_QUEUE_SETTINGS |= {"max_in_progress", "receive_buffer_capacity"}

if TYPE_CHECKING:
    from outbox_queue.redelivery.tracker import RedeliveryTracker


class QueueService:
    """The queues of a pair of topics. Any thread may use it; the services of a process share one `metrics`.

    Payloads of more than `claim_check_above` bytes go to `claim_store`, and come back from there when they are used;
    both or neither, and the same for producers and consumers (`outbox_core.claims`).
    """

    def __init__(
        self,
        config: QueueConfig,
        *,
        metrics: QueueMetrics | None = None,
        claim_check_above: int | None = None,
        claim_store: ClaimStore | None = None,
    ) -> None:
        escape_log_lines("outbox_queue")
        self.config = config
        self.claims = ClaimCheck.of(claim_store, claim_check_above)
        self.metrics = metrics if metrics is not None else QueueMetrics()
        self._topics: Topics | None = None
        self._message_partitions: int | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<QueueService over {self.config.message_topic!r} and {self.config.marker_topic!r}>"

    def queue(self, name: str, **settings: Any) -> Queue:
        """Return a queue. It exists as soon as it is used.

        Args:
            name: 1 to 200 characters; else `InvalidMessage`.
            settings: of this queue alone: `max_attempts`, `redelivery_timeout`, `max_processing_time`, `max_delay`,
                `max_in_progress`, `receive_buffer_capacity`, `transactional`; `InvalidConfig` refuses others.
        """
        for setting in settings.keys() - _QUEUE_SETTINGS:
            raise InvalidConfig(f"{setting}: a queue can have of its own {', '.join(sorted(_QUEUE_SETTINGS))}")
        return Queue(self, check_queue_name(name), self.config.for_queue(**settings) if settings else self.config)

    def tracker(self) -> RedeliveryTracker:
        """Make a redelivery tracker for all queues; at least one must run, see `outbox queue tracker`."""
        from outbox_queue.redelivery.tracker import RedeliveryTracker

        return RedeliveryTracker(self.config, metrics=self.metrics)

    def topics(self) -> Topics:
        """Make missing topics and check the others, once; for the errors see `Queue.consumer`."""
        with self._lock:
            if self._topics is None:
                self._topics = ensure_topics(self.config)
                self._message_partitions = self._topics.message_partitions
            return self._topics

    def message_topic(self) -> None:
        """Make or check the message topic, once: producers need no other."""
        with self._lock:
            if self._message_partitions is None:
                self._message_partitions = ensure_message_topic(self.config)

    @property
    def known_message_partitions(self) -> int | None:
        """Number of partitions of the message topic, if it is known without asking Kafka."""
        return self.config.message_partitions if self._message_partitions is None else self._message_partitions


class Queue:
    """One queue, made by `QueueService.queue`, also at module level: it has no connection of its own."""

    def __init__(self, service: QueueService, name: str, config: QueueConfig) -> None:
        self.name = name
        self.config = config
        self._service = service
        self.claims = service.claims
        self._check = PayloadCheck(config, name, self.claims)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    def producer(self) -> Producer:
        """Make a producer; one serves all threads of a process. Errors are those of `consumer`."""
        self._service.message_topic()
        return Producer(self.config, self.name, self._service.metrics.of(self.name), self.claims)

    def consumer(self, *, concurrency: int | None = None) -> Consumer:
        """Make a consumer; it begins to read at once.

        Args:
            concurrency: limit of received messages that are not settled; None for the setting `max_in_progress`.

        Raises:
            QueueTopicError: if a topic is missing and cannot be made, or has settings that would lose messages.
            KafkaUnavailable: if the cluster does not answer.
        """
        _check_concurrency(concurrency)
        topics = self._service.topics()
        counters = self._service.metrics.of(self.name)
        return Consumer(self.config, self.name, topics, counters, concurrency=concurrency, claims=self.claims)

    def async_consumer(self, *, concurrency: int | None = None) -> AsyncConsumer:
        """Make a consumer for asyncio: an asynchronous context manager, and an asynchronous iterator of messages."""
        _check_concurrency(concurrency)
        return AsyncConsumer(lambda: self.consumer(concurrency=concurrency))

    def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 1,
        retry_delay: RetryDelay | None = None,
        drain_timeout: timedelta = timedelta(seconds=30),
        stop: threading.Event | None = None,
        on_signals: bool = True,
    ) -> bool:
        """Call a handler for each message, until stopped; return whether every handler finished in time.

        Args:
            handler: called with a `Message`, on one of `concurrency` threads. When it returns, the message is
                acknowledged, unless the handler settled it; when it raises, redelivered; when it raises `Reject`, made
                a dead letter.
            concurrency: number of handlers that run at the same time.
            retry_delay: delay of a failed message; by default `backoff()`, 1 second to 5 minutes.
            drain_timeout: time that handlers have to finish after the stop; messages of the others are redelivered.
            stop: ends the work when it is set.
            on_signals: end the work at SIGTERM, SIGINT and SIGHUP, in the main thread only. A second one exits at once.

        Raises:
            InvalidMessage: if the handler is asynchronous: it would be begun, and never finished.
            QueueError: if the queue cannot be read.
        """
        check_handler(handler)
        _check_concurrency(concurrency, may_be_none=False)
        worker = Worker(
            self.consumer(concurrency=concurrency),
            handler,
            concurrency=concurrency,
            retry_delay=retry_delay or backoff(longest=min(timedelta(minutes=5), self.config.max_delay / 2)),
            drain_timeout=drain_timeout,
        )
        return worker.run(stop, on_signals=on_signals)

    def record(
        self, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None, spread: bool = True
    ) -> OutboxRecord:
        """Make a record for an outbox: stash it with any adapter and table.

        Arguments and errors are those of `Producer.send`, as far as they are about the message. `spread` chooses a
        random partition if their number is known (`message_partitions`), so that all consumers get messages; False is
        for a table without `kafka_partition`. Value and headers that are UTF-8 are text, which fits tables of either
        layout.
        """
        return self._record(payload, headers, delay, spread=spread)[0]

    def _record(
        self, payload: Any, headers: UserHeaders, delay: timedelta | None, *, spread: bool = True
    ) -> tuple[OutboxRecord, str | None]:
        """Make a record; return the name of its payload in the claim store, too, if that went there."""
        value, pairs, claim = self._check.encode(payload, with_creation(self.name, headers), delay)
        partitions = self._service.known_message_partitions if spread else None
        record = OutboxRecord(
            topic=self.config.message_topic,
            key=self.name,
            value=_text(value),
            headers=[(name, None if content is None else _text(content)) for name, content in pairs],
            partition=random.randrange(partitions) if partitions else None,  # noqa: S311  not for secrets
        )
        return record, claim

    def stash(self, session: Any, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None) -> None:
        """Send a message if, and only if, the session's transaction commits. A harvester publishes it.

        The session is a session or connection of SQLAlchemy, Django's `connection` (or `connections["alias"]`), or a
        connection of a PostgreSQL driver. Other arguments are those of `Producer.send`.

        Raises:
            InvalidMessage: naming the part that is wrong, also a message that is too large for a consumer to start it.
            TransactionRequired: if the connection commits by itself; nothing was written.
        """
        record, claim = self._record(payload, headers, delay)
        with _withdrawn_if_refused(self.claims, claim):
            stashing.stash(session, record)

    async def astash(
        self, session: Any, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None
    ) -> None:
        """Stash on one of SQLAlchemy's asynchronous sessions or connections, as `stash` does."""
        record, claim = self._record(payload, headers, delay)
        with _withdrawn_if_refused(self.claims, claim):
            await stashing.astash(session, record)


@contextmanager
def _withdrawn_if_refused(claims: ClaimCheck | None, claim: str | None) -> Iterator[None]:
    """Take a large payload out of its store again if the record is refused before any SQL."""
    try:
        yield
    except OutboxError:
        if claims is not None and claim is not None:
            claims.withdraw(claim)
        raise


def _text(content: bytes) -> bytes | str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


def _check_concurrency(concurrency: int | None, *, may_be_none: bool = True) -> None:
    if concurrency is None and may_be_none:
        return
    number = plain(concurrency)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidMessage(f"concurrency: expected a whole number of 1 or more, got {concurrency!r}")
