"""Topics within a test: stashed records are handed to the project's own consumers, without Kafka.

    kafka = InProcessKafka(outbox_records)
    kafka.deliver({"orders": handle_order})                       # a handler alone
    consumer = kafka.consumer("orders", group="billing")          # or the whole loop, with its inbox and transactions
    consume(consumer, handle_order, Session, stop=consumer.drained)

A record is published when a consumer asks for it, unless it was rolled back by then: in the order of stashing, with the
header `outbox-id` of a harvester, to the partition that it names, else to partition 0. Needs confluent-kafka, as the
handlers get its messages; it does not connect to anything.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from outbox_core.claims.claims import ClaimStore
from outbox_core.errors import refuse_unfinished
from outbox_core.kafka.clients import Consumer, Message, TopicPartition
from outbox_core.kafka.messages import ID_HEADER, bring_back
from outbox_core.testing.expectation import bytes_of, headers_of
from outbox_core.testing.interception import CapturedRecord
from outbox_core.testing.records import StashedRecords

__all__ = ["InProcessConsumer", "InProcessKafka"]

_CREATE_TIME = 1  # the type of a message's timestamp
_GROUP_METADATA = b"CGMDv2:\0\0\0\0%b\0"  # as librdkafka writes it: magic, generation, group


class InProcessKafka:
    """The topics of the records that a test has stashed, and the positions of consumer groups. Used by one thread.

    Args:
        stashed: of a capture, or an outbox in memory.
        outbox: the outbox's name in `outbox-id` headers.
    """

    def __init__(self, stashed: StashedRecords, *, outbox: str = "in-process") -> None:
        self.published: list[Message] = []
        self._stashed = stashed
        self._outbox = outbox
        self._latest = 0  # number of the last record that was published
        self._ends: Counter[tuple[str, int]] = Counter()
        self._delivered = 0
        self._positions: dict[str, int] = {}

    def publish(self) -> list[Message]:
        """Publish the records that were stashed since the last call; return all messages so far."""
        for entry in self._stashed.entries():
            if entry.number > self._latest:
                self._latest = entry.number
                self.published.append(self._message(entry))
        return self.published

    def deliver(
        self, handlers: Mapping[str, Callable[[Message], object]], *, claim_store: ClaimStore | None = None
    ) -> int:
        """Hand each message to the handler of its topic, once and in order; return the number of messages handled.

        Messages of records that the handlers stash are delivered, too, until none is left. Those of other topics are
        passed over.

        Args:
            handlers: a function of a message, by topic.
            claim_store: as of `consume`: handlers find large payloads in `message.value()`.

        Raises:
            ClaimMissing: if a payload is in a claim store that does not have it, or that was not given.
            OutboxError: if a handler returns a coroutine, which would never run.
            Exception: of a handler. The next call begins with its message.
        """
        handled = 0
        while self._delivered < len(self.publish()):
            message = self.published[self._delivered]
            handler = handlers.get(message.topic() or "")
            if handler is not None:
                bring_back(message, claim_store)
                refuse_unfinished(handler(message), message.topic())
                handled += 1
            self._delivered += 1
        return handled

    def consumer(self, *topics: str, group: str = "test") -> InProcessConsumer:
        """Return a consumer that begins where its group has committed, at first with the first message."""
        return InProcessConsumer(self, topics, group)

    def position(self, group: str) -> int:
        """Return the number of published messages that a group has behind it."""
        return self._positions.get(group, 0)

    def commit(self, group: str, position: int) -> None:
        """Move a group to behind so many published messages."""
        self._positions[group] = max(position, self.position(group))

    def rewind(self, group: str) -> None:
        """Have a group get all messages again, as after a crash: a consumer has to recognise the repeats."""
        self._positions[group] = 0

    def _message(self, entry: CapturedRecord) -> Message:
        record = entry.record
        partition = record.partition or 0
        offset = self._ends[record.topic, partition]
        self._ends[record.topic, partition] += 1
        headers: list[tuple[str, Any]] = [
            (name, bytes_of(value)) for name, value in headers_of(record) if name != ID_HEADER
        ]
        return Message(
            topic=record.topic,
            partition=partition,
            offset=offset,
            key=None if record.key is None else str(record.key).encode(),
            value=bytes_of(record.value),
            headers=[*headers, (ID_HEADER, f"{self._outbox}:{entry.number}".encode())],
            timestamp=(_CREATE_TIME, time.time_ns() // 1_000_000),
        )


class InProcessConsumer(Consumer):
    """The part of a Kafka consumer that `consume` needs, over topics within a test. Used by one thread.

    Other methods than these raise "Consumer closed".

    Attributes:
        drained: set when there is no further message: `consume(consumer, ..., stop=consumer.drained)`.
    """

    def __init__(self, kafka: InProcessKafka, topics: tuple[str, ...], group: str) -> None:  # no client is made
        self.drained = threading.Event()
        self._kafka = kafka
        self._topics = frozenset(topics)
        self._group = group
        self._position = kafka.position(group)

    def poll(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None and set `drained`; never waits."""
        del timeout
        messages = self._kafka.publish()
        while self._position < len(messages):
            message = messages[self._position]
            self._position += 1
            if message.topic() in self._topics:
                return message
        self.drained.set()
        return None

    def seek(self, partition: TopicPartition) -> None:
        """Go back to a message; all that came after it, in any topic, come again, too."""
        self._position = self._index(partition.topic, partition.partition, partition.offset)

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Accept offsets to be committed by the client, which this one does at once."""
        del offsets  # of messages that are not handled yet
        if message is not None:
            self._commit(message)

    def commit(self, *, message: Message | None = None, **options: Any) -> Any:
        """Commit the position behind a message, for the next consumer of this group."""
        del options
        if message is not None:
            self._commit(message)
        return []

    def consumer_group_metadata(self) -> bytes:
        """Return the group, in librdkafka's form."""
        return _GROUP_METADATA % self._group.encode()

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _commit(self, message: Message) -> None:
        index = self._index(message.topic(), message.partition(), message.offset())
        self._kafka.commit(self._group, index + 1)

    def _index(self, *place: object) -> int:
        places = [(message.topic(), message.partition(), message.offset()) for message in self._kafka.published]
        return places.index(place)  # type: ignore[arg-type]
