"""The largest batch of a producer that every topic in use takes.

A topic's `max.message.bytes` limits a batch, not a record. librdkafka fills batches up to its `batch.size` (1,000,000
bytes) for every topic, and does not split a refused one: a topic that takes 64 KiB fails each full batch, and the
transaction with it. So `batch.size`, one setting for all topics, follows the smallest limit in use, which the harvester
asks for now and then; without DESCRIBE_CONFIGS, each refused batch halves it. It is at least 16 KiB for the other
topics' sake: records for topics with less go in smaller transactions, or alone.

Belongs to the harvest thread. The answers come in on threads of the admin client, which only wake it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from outbox_core.kafka.clients import KafkaException
from outbox_core.stores.interface import StoredRecord
from outbox_core.topic_names import is_legal

LimitsAsked = Mapping[str, Future[int | None]]
"""topic -> its max.message.bytes, once it is known; None if the topic has none to show."""

LARGEST_BATCH_BYTES: Final = 1_000_000
"""librdkafka's default of `batch.size` and `message.max.bytes`."""
SMALLEST_BATCH_BYTES: Final = 16 * 2**10
_PATIENCE_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 60.0
_IN_USE_SECONDS = 600.0
_MOST_TOPICS = 10_000
_ASKED_AT_ONCE = 500
_UNLIMITED: Final = 2**62
_OVERHEAD_BYTES: Final = 68  # of a batch of one record, at least


@dataclass(slots=True)
class _Topic:
    used_at: float
    limit: int | None = None  # its max.message.bytes
    learned: int | None = None  # a batch that it might take, after a refusal or while its limit is asked for anew
    ask_at: float = 0.0


class BatchSizes:
    """The limits of topics in use."""

    def __init__(
        self,
        ask: Callable[[Collection[str]], LimitsAsked] = lambda _: {},
        wake: Callable[[], None] = lambda: None,
        *,
        largest: int = LARGEST_BATCH_BYTES,
        is_compressed: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._ask = ask
        self._wake = wake
        self._largest = largest  # by the producer's settings
        self._is_compressed = is_compressed  # then the size of a record is not known beforehand
        self._clock = clock or time.monotonic
        self._topics: dict[str, _Topic] = {}
        self._asked: dict[str, Future[int | None]] = {}
        self._awaited: dict[str, float] = {}  # until when; of those, topics that were never asked for before
        self._wary: set[str] = set()
        self._limit: int | None = None
        self._look_again_at = 0.0

    def meet(self, topics: Iterable[str]) -> None:
        """Ask for unknown limits of topics, as records for them are about to be sent."""
        self._take_answers()
        clock = self._clock()
        wanted = []
        for name in topics:
            topic = self._topics.get(name)
            if topic is None:
                topic = self._topics[name] = _Topic(clock)
            if clock - topic.used_at >= _IN_USE_SECONDS:
                self._look_again_at = 0.0
            topic.used_at = clock
            if clock >= topic.ask_at and name not in self._asked and is_legal(name):
                wanted.append(name)
        if wanted and len(self._asked) < _ASKED_AT_ONCE:
            self._ask_for(wanted[:_ASKED_AT_ONCE], clock)
        if len(self._topics) > _MOST_TOPICS:
            self._forget()

    def _ask_for(self, names: list[str], clock: float) -> None:
        new = {name for name in names if not self._topics[name].ask_at}
        for name in names:
            self._topics[name].ask_at = clock + _ASK_AGAIN_SECONDS
        asked, wake = self._ask(names), self._wake
        for future in asked.values():
            future.add_done_callback(lambda _: wake())  # not by `self`, which holds the future: a cycle
        self._asked.update(asked)
        self._awaited.update(dict.fromkeys(new & asked.keys(), clock + _PATIENCE_SECONDS))

    def _forget(self) -> None:
        """Keep the half that was used last."""
        kept = sorted(self._topics.items(), key=lambda item: item[1].used_at)[-(_MOST_TOPICS // 2) :]
        self._topics = dict(kept)
        self._wary &= self._topics.keys()
        self._look_again_at = 0.0

    @property
    def are_awaited(self) -> bool:
        """True while answers about new topics are worth waiting for before sending: for a second at most."""
        self._take_answers()
        return self._clock() < max(self._awaited.values(), default=0.0)

    @property
    def await_seconds(self) -> float:
        """The longest time to wait for those answers."""
        return max(0.0, max(self._awaited.values(), default=0.0) - self._clock())

    def _take_answers(self) -> None:
        for name, future in [item for item in self._asked.items() if item[1].done()]:
            del self._asked[name]
            self._awaited.pop(name, None)
            topic = self._topics.get(name)
            if topic is None:
                continue
            try:
                limit = future.result()
            except (KafkaException, TimeoutError):
                continue  # it is not there, or we may not know
            if limit is not None:
                topic.limit, topic.learned = limit, None
                self._look_again_at = 0.0

    @property
    def limit(self) -> int | None:
        """The largest batch that every topic in use takes, in bytes; None for that of the settings."""
        self._take_answers()
        clock = self._clock()
        if clock >= self._look_again_at:
            self._look_again_at = clock + _ASK_AGAIN_SECONDS
            in_use = (topic for topic in self._topics.values() if clock - topic.used_at < _IN_USE_SECONDS)
            limits = (topic.limit or topic.learned for topic in in_use)
            smallest = min((limit for limit in limits if limit is not None), default=self._largest)
            self._limit = max(smallest, min(SMALLEST_BATCH_BYTES, self._largest)) if smallest < self._largest else None
        return self._limit

    def limit_of(self, topic: str) -> int | None:
        """Return a topic's `max.message.bytes`, as it was read last; None if it is not known."""
        known = self._topics.get(topic)
        return known.limit if known is not None else None

    def refused(self, topics: Collection[str]) -> None:
        """Note that the broker refused a batch for one of these topics as too large."""
        self._wary.update(name for name in topics if name in self._topics)
        halved = max(SMALLEST_BATCH_BYTES, (self.limit or self._largest) // 2)
        for name in topics:
            topic = self._topics.get(name)
            if topic is not None and topic.limit is None:
                topic.learned = min(halved, topic.learned or halved)
                self._look_again_at = 0.0
            elif topic is not None:
                topic.ask_at = 0.0  # it may have changed

    def too_large(self, records: Iterable[StoredRecord]) -> list[StoredRecord]:
        """Return the records that are known to be too large, even alone, for topics that have refused a batch."""
        # Only those topics: to look at every record would cost more than that.
        if not self._wary or self._is_compressed:
            return []
        limits = {name: self._topics[name].limit for name in self._wary if name in self._topics}
        return [record for record in records if _least_bytes(record) > (limits.get(record.topic) or _UNLIMITED)]

    def ask_anew(self, topics: Collection[str]) -> None:
        """Ask for these limits again: an operator may have just raised one to let a record go."""
        for name in topics:
            topic = self._topics[name]
            topic.limit, topic.learned = None, topic.limit or topic.learned
        new = [name for name in topics if name not in self._asked]
        if new:
            self._ask_for(new, self._clock())
        self._awaited.update(dict.fromkeys(topics, self._clock() + _PATIENCE_SECONDS))


def _least_bytes(record: StoredRecord) -> int:
    """Return the least size of a record in Kafka: characters as bytes, without the harvester's own header."""
    size = len(record.key or "") + len(record.value or "") + _OVERHEAD_BYTES
    if record.header_keys:
        size += sum(len(text or "") for texts in (record.header_keys, record.header_values or ()) for text in texts)
    return size
