"""Positions of readers of topics, compared: the later of two, the earliest of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from outbox_spark.topics.ranges import Position

Positions = Mapping[str, Mapping[str, int]]
"""A `Position` that is not changed: topic -> partition, as text -> next offset."""


def advanced(position: Positions, to: Positions) -> Position:
    """Return the later of both, for each partition."""
    result = {topic: dict(of) for topic, of in position.items()}
    for topic, partition, offset in flat(to):
        mine = result.setdefault(topic, {})
        mine[partition] = max(offset, mine.get(partition, offset))
    return result


def earliest_of(several: Iterable[Positions]) -> Position:
    """Return the earliest of all, for each partition that all have: the beginning of a reader for all."""
    first, *others = several
    result: Position = {}
    for topic, partition, offset in flat(first):
        offsets = [offset, *(other[topic][partition] for other in others if partition in other.get(topic, {}))]
        if len(offsets) == 1 + len(others):
            result.setdefault(topic, {})[partition] = min(offsets)
    return result


def flat(position: Positions) -> Iterator[tuple[str, str, int]]:
    """Yield (topic, partition, offset)."""
    return ((topic, partition, offset) for topic, of in position.items() for partition, offset in of.items())
