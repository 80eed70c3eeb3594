"""Queues, and the service that they belong to.

    service = QueueService(QueueConfig(bootstrap_servers="localhost:9092"))
    queue = service.queue("emails")

A service has no connection of its own. Its topics are looked at, and made if they are missing, when the first producer
or consumer is made; stashing needs neither them nor Kafka.
"""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outbox_core.errors import InvalidConfig
from outbox_core.printable import escape_log_lines
from outbox_core.record import OutboxRecord
from outbox_queue import stashing
from outbox_queue.aio import AsyncConsumer
from outbox_queue.config import QueueConfig
from outbox_queue.consumer import Consumer
from outbox_queue.errors import InvalidMessage
from outbox_queue.headers import UserHeaders
from outbox_queue.metrics import QueueMetrics
from outbox_queue.payloads import PayloadCheck, check_queue_name
from outbox_queue.producer import Producer
from outbox_queue.topics import Topics, ensure_message_topic, ensure_topics
from outbox_queue.worker import Handler, RetryDelay, Worker, backoff, check_handler

_OF_A_QUEUE = frozenset(
    {
        "max_attempts",
        "redelivery_timeout",
        "max_processing_time",
        "max_delay",
        "max_in_progress",
        "receive_buffer_capacity",
        "transactional",
    }
)

if TYPE_CHECKING:
    from outbox_queue.tracker import RedeliveryTracker


class QueueService:
    """The queues of a pair of topics. Any thread may use it.

    Args:
        config: of all its queues.
        metrics: where they count; a new one by default. Share one between the services of a process.
    """

    def __init__(self, config: QueueConfig, *, metrics: QueueMetrics | None = None) -> None:
        escape_log_lines("outbox_queue")
        self.config = config
        self.metrics = metrics if metrics is not None else QueueMetrics()
        self._topics: Topics | None = None
        self._message_partitions: int | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<QueueService over {self.config.message_topic!r} and {self.config.marker_topic!r}>"

    def queue(self, name: str, **settings: Any) -> Queue:
        """A queue. It needs no making: it exists as soon as somebody uses it.

        Args:
            name: 1 to 200 characters.
            settings: of this queue instead of the service's: `max_attempts`, `redelivery_timeout`,
                `max_processing_time`, `max_delay`, `max_in_progress`, `receive_buffer_capacity`, `transactional`.

        Raises:
            InvalidMessage: if the name cannot be one.
            InvalidConfig: if a setting is out of range, or belongs to the whole service.
        """
        for setting in settings.keys() - _OF_A_QUEUE:
            raise InvalidConfig(f"{setting}: a queue can have of its own {', '.join(sorted(_OF_A_QUEUE))}")
        return Queue(self, check_queue_name(name), self.config.for_queue(**settings) if settings else self.config)

    def tracker(self) -> RedeliveryTracker:
        """A redelivery tracker for all queues; at least one has to run somewhere. See `outbox queue tracker`."""
        from outbox_queue.tracker import RedeliveryTracker

        return RedeliveryTracker(self.config, metrics=self.metrics)

    def topics(self) -> Topics:
        """The topics, made if they are missing; looked at once.

        Raises:
            QueueTopicError: if one is missing and cannot be made, or messages would be lost by its settings.
            KafkaUnavailable: if the cluster does not answer.
        """
        with self._lock:
            if self._topics is None:
                self._topics = ensure_topics(self.config)
                self._message_partitions = self._topics.message_partitions
            return self._topics

    def message_topic(self) -> None:
        """See that the message topic is there, which is all that producers use; it is looked at once.

        Raises:
            QueueTopicError: if it is missing and cannot be made, or messages would be lost by its settings.
            KafkaUnavailable: if the cluster does not answer.
        """
        with self._lock:
            if self._message_partitions is None:
                self._message_partitions = ensure_message_topic(self.config)

    @property
    def known_message_partitions(self) -> int | None:
        """Partitions of the message topic, as far as they are known without asking Kafka."""
        return self.config.message_partitions if self._message_partitions is None else self._message_partitions


class Queue:
    """One queue. Made by `QueueService.queue`; has no connection of its own, and may be made at module level.

    Attributes:
        name: its name.
        config: its settings.
    """

    def __init__(self, service: QueueService, name: str, config: QueueConfig) -> None:
        self.name = name
        self.config = config
        self._service = service
        self._check = PayloadCheck(config, name)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    def producer(self) -> Producer:
        """A producer; one serves all threads of a process.

        Raises:
            QueueTopicError: if the message topic is missing and cannot be made, or would lose messages.
            KafkaUnavailable: if the cluster does not answer.
        """
        self._service.message_topic()
        return Producer(self.config, self.name, self._service.metrics.of(self.name))

    def consumer(self, *, concurrency: int | None = None) -> Consumer:
        """A consumer; it begins to read at once.

        Args:
            concurrency: how many messages may be handed out and not settled; None for the setting `max_in_progress`.

        Raises:
            QueueTopicError: if a topic is missing and cannot be made, or has settings that would lose messages.
            KafkaUnavailable: if the cluster does not answer.
        """
        _check_concurrency(concurrency)
        topics = self._service.topics()
        counters = self._service.metrics.of(self.name)
        return Consumer(self.config, self.name, topics, counters, concurrency=concurrency)

    def async_consumer(self, *, concurrency: int | None = None) -> AsyncConsumer:
        """The same for asyncio: `async with queue.async_consumer() as consumer: async for message in consumer: ...`."""
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
        """Call a handler for each message, until stopped.

        Args:
            handler: called with a `Message`, on one of `concurrency` threads. When it returns, the message is
                acknowledged, unless the handler settled it; when it raises, the message is given back; when it raises
                `Reject`, it is set aside.
            concurrency: how many handlers run at the same time.
            retry_delay: how long a failed message waits; by default `backoff()`, 1 second to 5 minutes.
            drain_timeout: how long handlers may go on after it was told to stop.
            stop: ends it when it is set.
            on_signals: whether SIGTERM and SIGINT end it; only in the main thread. A second one exits at once.

        Returns:
            Whether every handler had finished in time; the messages of others are redelivered.

        Raises:
            InvalidMessage: if the handler is asynchronous: it would be begun, and never done.
            QueueError: if the queue cannot be read.
            KafkaUnavailable: if the cluster does not answer at the beginning.
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
        """A message as a record for an outbox: stash it with whatever adapter and table you use.

        Args:
            payload: as for `Producer.send`.
            headers: as for `Producer.send`.
            delay: as for `Producer.send`, from now.
            spread: name a partition at random, as far as their number is known (`message_partitions`), so that all
                consumers of the queue get messages; False for an outbox table without `kafka_partition`.

        Raises:
            InvalidMessage: naming what is wrong.
            MessageTooLarge: if a consumer could not start it.
        """
        value, pairs = self._check.encode(payload, headers, delay)
        partitions = self._service.known_message_partitions if spread else None
        return OutboxRecord(
            topic=self.config.message_topic,
            key=self.name,
            value=value,
            headers=pairs,
            partition=random.randrange(partitions) if partitions else None,  # noqa: S311  not for secrets
        )

    def stash(self, session: Any, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None) -> None:
        """Send a message if, and only if, the session's transaction commits. A harvester publishes it.

        Args:
            session: a session or connection of SQLAlchemy, Django's `connection` (or `connections["alias"]`), or a
                connection of a PostgreSQL driver.
            payload: as for `Producer.send`.
            headers: as for `Producer.send`.
            delay: as for `Producer.send`, from now.

        Raises:
            InvalidMessage: naming what is wrong; nothing was written.
            MessageTooLarge: if a consumer could not start it; nothing was written.
            TransactionRequired: if the connection commits by itself; nothing was written.
        """
        stashing.stash(session, self.record(payload, headers=headers, delay=delay))

    async def astash(
        self, session: Any, payload: Any, *, headers: UserHeaders = (), delay: timedelta | None = None
    ) -> None:
        """`stash` for SQLAlchemy's asynchronous sessions and connections."""
        await stashing.astash(session, self.record(payload, headers=headers, delay=delay))


def _check_concurrency(concurrency: int | None, *, may_be_none: bool = True) -> None:
    if concurrency is None and may_be_none:
        return
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidMessage(f"concurrency: expected a whole number of 1 or more, got {concurrency!r}")
