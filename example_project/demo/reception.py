"""The consumer: it reads all topics from their beginning, on a thread of its own, and keeps every record."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition

from example_project.demo.check import Received
from example_project.demo.children import DemoError
from outbox_core.kafka import headers_of

_SECONDS_TO_APPEAR = 20
_SECONDS_TO_FINISH = 20
_BATCH = 500
_ID, _NUMBER = "ce_id", "ce_number"  # of the payments' CloudEvents


class Reception:
    """A thread that receives records until `finish`, or until the context ends.

    `received` belongs to the thread until that has ended; `distinct` may be read at any time.

    Args:
        bootstrap: the broker.
        topics: made if they are missing.
    """

    def __init__(self, bootstrap: str, topics: Sequence[str]) -> None:
        self.received: list[Received] = []
        self._ids: set[str] = set()
        self._next_offset: dict[tuple[str, int], int] = {}
        self._finishing = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "demo",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "allow.auto.create.topics": True,
                "fetch.wait.max.ms": 100,
            }
        )
        self._partitions = [(topic, number) for topic in topics for number in self._make(topic)]
        self._thread = threading.Thread(target=self._run, name="reception")

    @property
    def distinct(self) -> int:
        """Return the number of different records that have arrived."""
        return len(self._ids)

    def check(self) -> None:
        """Raise DemoError if receiving has failed."""
        if self._failure is not None:
            raise DemoError(f"the consumer failed: {self._failure}")

    def finish(self) -> list[Received]:
        """Read on to the present end of every topic; return all received records, in order of arrival."""
        self._finishing.set()
        self._thread.join()
        self.check()
        return self.received

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _make(self, topic: str) -> list[int]:
        """Return the partitions of a topic; both brokers make one that is requested by name."""
        deadline = time.monotonic() + _SECONDS_TO_APPEAR
        while not (known := self._consumer.list_topics(topic, timeout=10).topics[topic].partitions):
            if time.monotonic() > deadline:
                raise DemoError(f"the broker did not make the topic {topic} within {_SECONDS_TO_APPEAR} s")
            time.sleep(0.1)
        return list(known)

    def _run(self) -> None:
        try:
            self._consumer.assign([TopicPartition(*partition, OFFSET_BEGINNING) for partition in self._partitions])
            while not (self._finishing.is_set() or self._closing.is_set()):
                self._take()
            if self._finishing.is_set():
                self._read_to_the_end()
        except Exception as error:
            self._failure = error
        finally:
            self._consumer.close()

    def _read_to_the_end(self) -> None:
        """Read up to the high watermarks: they are the ends, as all writers are done and no transaction is open."""
        ends = {
            partition: self._consumer.get_watermark_offsets(TopicPartition(*partition), timeout=10)[1]
            for partition in self._partitions
        }
        deadline = time.monotonic() + _SECONDS_TO_FINISH
        while any(self._next_offset.get(partition, 0) < end for partition, end in ends.items()):
            if time.monotonic() > deadline:
                raise DemoError(f"the topics were not read to their ends within {_SECONDS_TO_FINISH} s")
            self._take()

    def _take(self) -> None:
        messages = self._consumer.consume(_BATCH, timeout=0.2)
        at = time.monotonic()
        for message in messages:
            if message.error() is not None:
                if message.error().retriable():
                    continue
                raise KafkaException(message.error())
            record = _read(message, at)
            self.received.append(record)
            self._ids.add(record.event_id)
            self._next_offset[record.topic, record.partition] = message.offset() + 1


def _read(message: Message, at: float) -> Received:
    headers = dict(headers_of(message))
    return Received(
        topic=message.topic(),
        key=message.key().decode(),
        number=int(headers[_NUMBER if _ID in headers else "number"]),
        event_id=headers[_ID if _ID in headers else "event-id"].decode(),
        partition=message.partition(),
        at=at,
    )
