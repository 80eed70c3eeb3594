"""Positions of readers of topics: the later of two, and in JSON.

The JSON of a stream has the topics' IDs, too: a topic that is deleted and made anew has another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outbox_core.kafka.reader import Place

Positions = Mapping[Place, int]
"""The next offset of each partition."""

TopicIds = Mapping[str, str]
_ID = "id"


def advanced(position: Positions, to: Positions) -> Positions:
    """Return the later of both, for each partition."""
    return {**position, **{place: max(offset, position.get(place, offset)) for place, offset in to.items()}}


def to_json(position: Positions, ids: TopicIds = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """Return topic -> partition, as text -> offset: keys in JSON are no pairs and no numbers; beside them the ID."""
    result: dict[str, dict[str, Any]] = {}
    for (topic, partition), offset in position.items():
        result.setdefault(topic, {})[str(partition)] = offset
    for topic in result.keys() & ids.keys():
        result[topic][_ID] = ids[topic]
    return result


def from_json(content: Mapping[str, Mapping[str, Any]]) -> dict[Place, int]:
    """Return the position of `to_json`. Raises ValueError, AttributeError and TypeError for anything else."""
    pairs = ((topic, each) for topic, of in content.items() for each in of.items() if each[0] != _ID)
    return {(topic, int(partition)): int(offset) for topic, (partition, offset) in pairs}


def ids_in(content: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the topics' IDs in the JSON of a position, as far as it has them."""
    return {topic: str(of[_ID]) for topic, of in content.items() if _ID in of}


def made_anew(before: TopicIds, now: TopicIds) -> list[str]:
    """Return the topics that were deleted and made anew since."""
    return sorted(topic for topic, found in now.items() if before.get(topic, found) != found)
