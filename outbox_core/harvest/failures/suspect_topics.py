"""Topics that may be to blame for terms that end again and again.

Some records break the *producer*, term after term (of a topic of Kafka's own, for example), so that bisection never
gets a turn. So, after a few terms that ended in the middle of a batch without a commit in between:

    several topics in the batch ---> the next batches are half as large
    a single one ------------------> suspected: it is excluded, so that others are tried
    others are committed ----------> charged: it is included again
    it ends a term alone ----------> one more count against it, and it is excluded again
    the third count ---------------> guilty: it is held, until an operator decides

An outage makes no topic guilty: no others are committed meanwhile. Pure; belongs to the harvest thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from outbox_core.stores.interface import StoredRecord

_TOLERATED = 3
_MOST_SUSPECTS = 100


class SuspectTopics:
    """The ends of a leadership's terms: limit and exclusions of the next batch, a guilty topic and the reason."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self.excluded: frozenset[str] = frozenset()
        self.guilty: tuple[str, str] | None = None
        self._most = most
        self._charged: set[str] = set()
        self._counts: dict[str, int] = {}
        self._ends = 0

    @property
    def is_failing(self) -> bool:
        """True after a term that ended in the middle of a batch, until a commit."""
        return self._ends > 0

    def term_ended(self, records: Sequence[StoredRecord], reason: str) -> None:
        """Note that a term ended in the middle of a transaction of these records."""
        if not records:
            return
        self._ends += 1
        topics = {record.topic for record in records}
        if len(topics) > 1:
            self.limit = max(1, len(records) // 2) if self._ends >= _TOLERATED else self.limit
            return
        (topic,) = topics
        if topic in self._charged:
            self._charged.discard(topic)
            count = self._counts[topic] = self._counts.get(topic, 0) + 1
            if count == _TOLERATED:
                self.guilty = (topic, reason)
                return
        elif self._ends < _TOLERATED:
            return
        if len(self.excluded) < _MOST_SUSPECTS:
            self.excluded |= {topic}
        else:
            self.excluded = frozenset()  # so many are hardly to blame: Kafka is

    def committed(self, records: Sequence[StoredRecord]) -> None:
        """Note that a transaction of these records was committed."""
        self._ends = 0
        self.limit = min(self._most, 2 * self.limit)
        if self._charged or self._counts:
            acquitted = {record.topic for record in records}
            self._charged -= acquitted
            self._counts = {topic: count for topic, count in self._counts.items() if topic not in acquitted}
        if self.excluded:
            self._charged |= self.excluded
            self.excluded = frozenset()
            self.limit = 1  # a batch that ends a term shall have one topic

    def scan_found_none(self) -> None:
        """Include the suspects again: without them there is no record to commit, and no evidence."""
        self.excluded = frozenset()

    def guilty_is_held(self) -> None:
        """Note that the guilty topic is held."""
        self.guilty = None
        self._ends = 0
