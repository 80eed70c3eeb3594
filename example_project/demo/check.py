"""The verdict: committed records against received ones.

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
    """A record as the consumer received it, and the time of that (seconds on the monotonic clock)."""

    topic: str
    key: str
    number: int
    event_id: str
    partition: int
    at: float


@dataclass(kw_only=True)
class Verdict:
    """The counts of one topic's records that arrived, and of those that did not arrive as they should."""

    topic: str
    stashed: int = 0
    received: int = 0
    lost: int = 0
    reordered: int = 0
    repeated: int = 0
    invented: int = 0

    @property
    def is_good(self) -> bool:
        """Tell whether all records arrived, in order; repeats are allowed in at-least-once delivery."""
        return not (self.lost or self.reordered or self.invented)


def check(topics: Iterable[str], stashed: Iterable[Stashed], received: Iterable[Received]) -> list[Verdict]:
    """Compare the ledger with the received records, topic by topic.

    Args:
        topics: the topics of the report.
        stashed: all committed records.
        received: all received records, in the order of arrival.
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
    """Count the records of one key that came too late, and those in another partition, which have no order."""
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
