"""The verdict: what was committed against what arrived.

- *lost*: committed, and never received;
- *repeated*: copies of a record beyond the first;
- *reordered*: records of a key that came after a later one of the same key. A repeat right behind its original
  (R0 R0 R1) changes no order; one further behind does (R0 R1 R0);
- *invented*: received, although no transaction committed it. A rolled-back record that gets out shows here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Stashed(NamedTuple):
    """A row of an application's ledger: one record that was committed. Numbers count from 1 within a key."""

    topic: str
    key: str
    number: int
    event_id: str


class Received(NamedTuple):
    """A record as the consumer got it, and when (seconds on the monotonic clock)."""

    topic: str
    key: str
    number: int
    event_id: str
    partition: int
    at: float


@dataclass(kw_only=True)
class Verdict:
    """What became of one topic's records."""

    topic: str
    stashed: int = 0
    received: int = 0
    lost: int = 0
    reordered: int = 0
    repeated: int = 0
    invented: int = 0

    @property
    def is_good(self) -> bool:
        """Whether everything is there, in order. Repeats are what "at least once" allows."""
        return not (self.lost or self.reordered or self.invented)


def check(topics: Iterable[str], stashed: Iterable[Stashed], received: Iterable[Received]) -> list[Verdict]:
    """Compare, topic by topic.

    Args:
        topics: what to report about.
        stashed: all that was committed.
        received: all that arrived, in the order of arrival.
    """
    committed: dict[str, set[str]] = defaultdict(set)
    for row in stashed:
        committed[row.topic].add(row.event_id)
    arrived: dict[str, list[Received]] = defaultdict(list)
    for record in received:
        arrived[record.topic].append(record)
    return [_check_topic(topic, committed[topic], arrived[topic]) for topic in topics]


def _check_topic(topic: str, committed: set[str], arrived: Sequence[Received]) -> Verdict:
    got = {record.event_id for record in arrived}
    by_key: dict[str, list[Received]] = defaultdict(list)
    for record in arrived:
        by_key[record.key].append(record)
    return Verdict(
        topic=topic,
        stashed=len(committed),
        received=len(got & committed),
        lost=len(committed - got),
        reordered=sum(map(_reordered, by_key.values())),
        repeated=len(arrived) - len(got),
        invented=len(got - committed),
    )


def _reordered(records: Sequence[Received]) -> int:
    """How many records of one key came too late; one in another partition has no order with the others at all."""
    count = 0
    latest = records[0]
    for record in records[1:]:
        if record.event_id == latest.event_id and record.partition == latest.partition:
            continue
        if record.number <= latest.number or record.partition != latest.partition:
            count += 1
        else:
            latest = record
    return count
