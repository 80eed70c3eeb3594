"""The two messages on the leader topic, and how they are written: compact JSON, without a key.

    {"type":"claim","id":"6f0c...","name":"host-17"}
    {"type":"heartbeat","claim":42,"id":"6f0c...","sequence":3,"name":"host-17"}

A claim is numbered by the offset that Kafka gives it, so it cannot contain its own number. `id` is random, made anew
for every claim: several instances may share one configuration and so one `name`, which is there for people only.

Anybody may write to the topic, so whatever is not exactly one of these is None: noise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

_LONGEST_BYTES = 2048
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Claim:
    """A process that owns the partition wants to lead from here on.

    Attributes:
        id: made for this claim alone.
        name: of the process, for people.
    """

    id: UUID
    name: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A process that made a claim is alive.

    Attributes:
        claim: offset of the claim.
        id: the claim's.
        sequence: counts the heartbeats of this claim.
        name: of the process, for people.
    """

    claim: int
    id: UUID
    sequence: int
    name: str = ""


Signal = Claim | Heartbeat


def encode(signal: Signal) -> bytes:
    """The message's value."""
    fields: dict[str, Any] = {"type": "claim", "id": str(signal.id)}
    if isinstance(signal, Heartbeat):
        fields |= {"type": "heartbeat", "claim": signal.claim, "sequence": signal.sequence}
    return json.dumps(fields | {"name": signal.name[:_LONGEST_NAME]}, separators=(",", ":")).encode()


def decode(value: bytes | None) -> Signal | None:
    """The signal in a message's value, or None if it holds none."""
    if value is None or len(value) > _LONGEST_BYTES:
        return None
    try:
        match json.loads(value):
            case {"type": "claim", "id": str(id_), "name": str(name)}:
                return Claim(UUID(id_), name)
            case {"type": "heartbeat", "claim": int(claim), "id": str(id_), "sequence": int(number), "name": str(name)}:
                return Heartbeat(claim, UUID(id_), number, name)
    except (ValueError, RecursionError):
        return None
    return None
