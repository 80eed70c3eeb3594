"""The messages on the leader topic: compact JSON, without a key.

    {"type":"claim","id":"6f0c...","name":"host-17","group":"shop.public.outbox","outbox":...,"server":...}
    {"type":"heartbeat","claim":42,"id":"6f0c...","sequence":3,"name":"host-17","group":...,"outbox":...,"server":...}
    {"type":"resignation","claim":42,"id":"6f0c...","name":"host-17","group":...,"outbox":...,"server":...}
    {"type":"look", and otherwise like a heartbeat}

The offset that Kafka gives a claim is its number. `id` is made anew for every claim: instances may share one `name`,
which is for people only. A look changes nothing: its offset tells its writer how far to read.

Several groups may share a topic, and each ignores the others' messages. Earlier versions wrote no group: a message
without one counts as the reader's own group's, so that members of both versions elect one leader.

Any client may write to the topic, so a message that is none of the first three is noise: None.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

LONGEST_GROUP = 1000
LONGEST_OUTBOX = 200
"""Characters of a group's ID and of an outbox's identity, so that every message fits into what readers take."""

_LONGEST_BYTES = 32 * 1024
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Contest:
    """The outbox that the members of a group contend for, with '' for what is unknown."""

    group: str = ""
    outbox: str = ""
    server: str = ""

    def includes(self, other: Contest) -> bool:
        """Tell whether a message of the other contest concerns this one."""
        return other.group in {"", self.group}

    def agrees(self, other: Contest) -> bool:
        """Tell whether both name the same outbox and server, where they name one. Within a group they must."""
        outboxes, servers = {self.outbox, other.outbox} - {""}, {self.server, other.server} - {""}
        return len(outboxes) < 2 and len(servers) < 2

    def __str__(self) -> str:
        server = f" on database server {self.server}" if self.server else ""
        return f"{self.outbox or 'an unknown outbox'}{server}"


NO_CONTEST = Contest()
"""The contest of a message that names none."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The message, with an `id` of its own, of a partition's owner that wants to lead from here on."""

    id: UUID
    name: str = ""
    contest: Contest = NO_CONTEST


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life of the process that made the claim at offset `claim` with this `id`."""

    claim: int
    id: UUID
    sequence: int
    name: str = ""
    contest: Contest = NO_CONTEST


@dataclass(frozen=True, slots=True)
class Resignation:
    """The last message of the claim at offset `claim`: no lease runs any more that rests on it or on an earlier one."""

    claim: int
    id: UUID
    name: str = ""
    contest: Contest = NO_CONTEST


Signal = Claim | Heartbeat | Resignation


def encode(signal: Signal) -> bytes:
    """Return the message's value."""
    fields: dict[str, Any] = {"type": "claim", "id": str(signal.id)}
    if isinstance(signal, Heartbeat):
        fields |= {"type": "heartbeat", "claim": signal.claim, "sequence": signal.sequence}
    elif isinstance(signal, Resignation):
        fields |= {"type": "resignation", "claim": signal.claim}
    fields["name"] = signal.name[:_LONGEST_NAME]
    contest = signal.contest
    said = {"group": contest.group, "outbox": contest.outbox, "server": contest.server}
    fields |= {name: value for name, value in said.items() if value}
    return json.dumps(fields, separators=(",", ":")).encode()


def encode_look(name: str = "", contest: Contest = NO_CONTEST) -> bytes:
    """Return the value of a look, no smaller than any heartbeat of this name and contest: where it passes, they do."""
    largest = encode(Heartbeat(2**63 - 1, uuid4(), 2**63 - 1, name, contest))
    return largest.replace(b'"heartbeat"', b'"look"', 1)


def decode(value: bytes | None) -> Signal | None:
    """Return the signal in a message's value, None for noise."""
    if value is None or len(value) > _LONGEST_BYTES:
        return None
    try:
        fields = json.loads(value)
        match fields:
            case {"type": "claim", "id": str(id_), "name": str(name)}:
                return Claim(UUID(id_), name[:_LONGEST_NAME], _contest(fields))
            case {"type": "heartbeat", "claim": int(claim), "id": str(id_), "sequence": int(number), "name": str(name)}:
                return Heartbeat(claim, UUID(id_), number, name[:_LONGEST_NAME], _contest(fields))
            case {"type": "resignation", "claim": int(claim), "id": str(id_), "name": str(name)}:
                return Resignation(claim, UUID(id_), name[:_LONGEST_NAME], _contest(fields))
    except (ValueError, RecursionError):
        return None
    return None


def _contest(fields: dict[str, Any]) -> Contest:
    """Return the contest of a message, or raise ValueError if it is no text, or too long for a log."""
    said = [fields.get(name, "") for name in ("group", "outbox", "server")]
    if not all(isinstance(value, str) and len(value) <= LONGEST_GROUP for value in said):
        raise ValueError
    return Contest(*said)
