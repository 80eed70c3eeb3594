"""The verdict on a run: the committed records compared with those on the topics.

The promise under test is at least once, in order: of each key (that is, topic and key) the numbers on the topic,
adjacent repeats removed, are 1 2 3 ... to the last one committed. `1 1 2` is fine, `1 2 1 2` is a reversal.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from tests.kafka_reader import read_topic

ID_HEADER = "outbox-id"


class Item(NamedTuple):
    """A record of the load: the number `n` counts the committed records of its key, from 1.

    Records without a key are in no order; their numbers are only unique.
    """

    topic: str
    key: str | None
    n: int


class Sighting(NamedTuple):
    """A message on a topic, in the order of its partition, with its outbox id."""

    item: Item
    identity: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The differences between committed and received records.

    Attributes:
        committed: records committed.
        received: messages on the topics, repeats included.
        lost: records committed and not received.
        strangers: records received and not committed, so rolled back by the application.
        reversals: pairs of successive records of a key, the second with the lower number.
        adjacent_repeats: messages that repeat the message of their key just before them.
        distant_repeats: messages that repeat an earlier one of their key, with others in between.
        mislabelled: outbox ids that stand on different records, and records that carry different ids.
    """

    committed: int
    received: int
    lost: list[Item]
    strangers: list[Item]
    reversals: list[tuple[Item, Item]]
    adjacent_repeats: int
    distant_repeats: int
    mislabelled: list[object]

    @property
    def repeats(self) -> int:
        """Count the messages beyond the first of each record."""
        return self.adjacent_repeats + self.distant_repeats

    def __str__(self) -> str:
        return (
            f"{self.committed} committed, {self.received} received, {len(self.lost)} lost, "
            f"{len(self.strangers)} strangers, {len(self.reversals)} reversals, "
            f"{self.adjacent_repeats} adjacent and {self.distant_repeats} distant repeats"
        )

    def assert_complete(self) -> None:
        """Assert that no record is lost or published after a rollback, and every outbox id is on one record only."""
        assert not self.lost, f"{self}; lost: {self.lost[:10]}"
        assert not self.strangers, f"{self}; strangers: {self.strangers[:10]}"
        assert not self.mislabelled, f"{self}; mislabelled: {self.mislabelled[:10]}"

    def assert_in_order(self) -> None:
        """Assert that it is complete, and of each key in order but for adjacent repeats."""
        self.assert_complete()
        assert not self.reversals, f"{self}; reversals: {self.reversals[:10]}"
        assert not self.distant_repeats, str(self)

    def assert_flawless(self) -> None:
        """Assert that it is complete, in order and without any repeat."""
        self.assert_in_order()
        assert not self.repeats, str(self)


def judge(committed: Iterable[Item], sightings: Iterable[Sighting]) -> Verdict:
    """Compare. `sightings` must keep the order within each partition, and so of each key."""
    wanted = set(committed)
    sightings = list(sightings)
    seen = Counter(sighting.item for sighting in sightings)
    by_lane = defaultdict(list)
    for item in (sighting.item for sighting in sightings):
        by_lane[item.topic, item.key].append(item)
    adjacent, reversals = 0, []
    for (_, key), items in by_lane.items():
        if key is None:
            continue
        once = [item for item, _ in groupby(items)]
        adjacent += len(items) - len(once)
        reversals += [(first, second) for first, second in pairwise(once) if second.n <= first.n]
    keyless = sum(count - 1 for item, count in seen.items() if item.key is None)
    return Verdict(
        committed=len(wanted),
        received=len(sightings),
        lost=sorted(wanted - seen.keys(), key=str),
        strangers=sorted(seen.keys() - wanted, key=str),
        reversals=reversals,
        adjacent_repeats=adjacent + keyless,
        distant_repeats=len(sightings) - len(seen) - adjacent - keyless,
        mislabelled=_mislabelled(sightings),
    )


def _mislabelled(sightings: list[Sighting]) -> list[object]:
    """Return ids on several records, which break consumers that drop repeats by id, and records with several ids."""
    pairs = {(sighting.item, sighting.identity) for sighting in sightings}
    items, identities = Counter(item for item, _ in pairs), Counter(identity for _, identity in pairs)
    return [thing for counts in (items, identities) for thing, count in counts.items() if count > 1]


def read_sightings(bootstrap: str, topics: Iterable[str]) -> list[Sighting]:
    """Read all messages of these topics, in order within each partition."""
    sightings = []
    for topic in topics:
        partition_of: dict[bytes, int] = {}
        for message in read_topic(bootstrap, topic, timeout=60):
            key = message.key.decode() if message.key is not None else None
            if key is not None:
                assert partition_of.setdefault(key, message.partition) == message.partition, (
                    f"{key} is in two partitions"
                )
            identity = dict(message.headers).get(ID_HEADER, b"").decode()
            sightings.append(Sighting(Item(topic, key, int(message.value.split()[0])), identity))
    return sightings
