"""Positions of readers of topics: the later of two, and in JSON."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_core.kafka.reader import Place

Positions = Mapping[Place, int]
"""The next offset of each partition."""


def advanced(position: Positions, to: Positions) -> Positions:
    """Return the later of both, for each partition."""
    return {**position, **{place: max(offset, position.get(place, offset)) for place, offset in to.items()}}


def to_json(position: Positions) -> dict[str, dict[str, int]]:
    """Return topic -> partition, as text -> offset: keys in JSON are no pairs and no numbers."""
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in position.items():
        result.setdefault(topic, {})[str(partition)] = offset
    return result


def from_json(content: Mapping[str, Mapping[str, int]]) -> dict[Place, int]:
    """Return the position of `to_json`. Raises ValueError, AttributeError and TypeError for anything else."""
    return {(topic, int(partition)): int(offset) for topic, of in content.items() for partition, offset in of.items()}
