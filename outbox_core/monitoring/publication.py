"""Counts of published batches: by topic, in bytes, and the time that records took from their stash to Kafka.

Each batch costs a handful of calls in C, not one of Python for each record: the harvest thread makes them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from outbox_core.monitoring.histogram import DELIVERY_BUCKETS, WeightedHistogram
from outbox_core.stores.interface import StoredRecord

MOST_TOPICS = 50
OTHER_TOPICS = "(other)"
"""The label of all topics beyond the first fifty. No topic can have this name."""

_MOST_SAMPLES = 8
_RECORDS_TO_A_SAMPLE = 32
_topic_of = attrgetter("topic")
_value_of = attrgetter("value")


class TopicLabels:
    """The topics that are labels of their own: the first fifty that were met, as each label is a series for ever."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def label(self, topic: str) -> str:
        """Return the label of a topic."""
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= MOST_TOPICS:
                return OTHER_TOPICS
            known = self._known[topic] = topic
        return known


class PublicationCounts:
    """Totals over all published batches. Written under the lock of `HarvestMetrics`."""

    def __init__(self) -> None:
        self.labels = TopicLabels()
        self.by_topic: Counter[str] = Counter()
        self.bytes = 0
        self.delivery_latency = WeightedHistogram(DELIVERY_BUCKETS)
        self.last_at = 0.0  # seconds since the epoch; 0.0 before the first

    def add(self, records: Sequence[StoredRecord]) -> None:
        """Count the records of one batch, all acknowledged now; there is at least one.

        Latency is taken of some records of the batch, eight or so of a large one, each for those that follow it:
        neighbours were stashed at about the same time.
        """
        self.last_at = at = time.time()
        for topic, count in Counter(map(_topic_of, records)).items():
            self.by_topic[self.labels.label(topic)] += count
        values = list(filter(None, map(_value_of, records)))
        if values and isinstance(values[0], str):
            # A transform of a relay may have made bytes of some.
            self.bytes += sum(len(value.encode() if isinstance(value, str) else value) for value in values)
        else:
            self.bytes += sum(map(len, values))
        step = max(_RECORDS_TO_A_SAMPLE, len(records) // _MOST_SAMPLES)
        for first in range(0, len(records), step):
            stashed_at = records[first].create_time / 1_000_000
            if stashed_at:
                self.delivery_latency.observe(max(0.0, at - stashed_at), min(step, len(records) - first))

    def merge(self, other: PublicationCounts) -> None:
        """Add what another process has counted."""
        self.last_at = max(self.last_at, other.last_at)
        self.bytes += other.bytes
        self.delivery_latency.merge(other.delivery_latency)
        for topic, count in other.by_topic.items():
            self.by_topic[topic if topic == OTHER_TOPICS else self.labels.label(topic)] += count
