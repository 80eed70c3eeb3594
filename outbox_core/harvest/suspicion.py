"""Terms that end again and again: is one of the topics that their records go to to blame?

A record that Kafka refuses makes its transaction fail, and is found by trials. But there may be records that break the
*producer*, term after term, so that no trial ever takes place (a topic of Kafka's own, for example). Then nothing would
ever be published again. So, after a few terms that have ended in the middle of a batch with no commit in between:

    several topics in the batch ---> the next batches are half as large
    a single one ------------------> suspected: it is left out, so that others are tried
    others are committed ----------> charged: it is let in again
    it ends a term alone ----------> that counts against it, and it is left out again
    the third time ----------------> guilty: it is held, until somebody decides

An outage makes no topic guilty: nothing else is committed meanwhile. Pure; belongs to the harvest thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outbox_core.ports import StoredRecord

_TOPIC: Final = 1
_BEAR = 3
_MOST_SUSPECTS = 100


class Suspicion:
    """What a leadership's terms have ended with.

    Args:
        most: records that a batch takes as a rule.

    Attributes:
        limit: records that the next batch may take.
        left_out: suspects, which no scan may bring.
        guilty: the topic to hold, and why; None if there is none.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self.left_out: frozenset[str] = frozenset()
        self.guilty: tuple[str, str] | None = None
        self._most = most
        self._charged: set[str] = set()
        self._counts: dict[str, int] = {}
        self._ends = 0

    @property
    def is_failing(self) -> bool:
        """Whether a term ended in the middle of a batch, and nothing was committed since."""
        return self._ends > 0

    def ended(self, records: Sequence[StoredRecord], reason: str) -> None:
        """A term ended in the middle of a transaction of these records."""
        if not records:
            return
        self._ends += 1
        topics = {record[_TOPIC] for record in records}
        if len(topics) > 1:
            self.limit = max(1, len(records) // 2) if self._ends >= _BEAR else self.limit
            return
        (topic,) = topics
        if topic in self._charged:
            self._charged.discard(topic)
            count = self._counts[topic] = self._counts.get(topic, 0) + 1
            if count == _BEAR:
                self.guilty = (topic, reason)
                return
        elif self._ends < _BEAR:
            return
        if len(self.left_out) < _MOST_SUSPECTS:
            self.left_out |= {topic}
        else:
            self.left_out = frozenset()  # hardly all of them: Kafka is to blame

    def committed(self, records: Sequence[StoredRecord]) -> None:
        """A transaction of these records was committed."""
        self._ends = 0
        self.limit = min(self._most, 2 * self.limit)
        if self._charged or self._counts:
            acquitted = {record[_TOPIC] for record in records}
            self._charged -= acquitted
            self._counts = {topic: count for topic, count in self._counts.items() if topic not in acquitted}
        if self.left_out:
            self._charged |= self.left_out
            self.left_out = frozenset()
            self.limit = 1  # what one of them ends shall be its alone

    def found_nothing(self) -> None:
        """A scan without the suspects brought nothing: nobody else waits, and nobody can tell."""
        self.left_out = frozenset()

    def held(self) -> None:
        """The guilty topic is held."""
        self.guilty = None
        self._ends = 0
