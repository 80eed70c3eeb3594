"""The messages on the leader topic, and how they are written: compact JSON, without a key.

    {"type":"claim","id":"6f0c...","name":"host-17","group":"shop.public.outbox","outbox":...,"server":...}
    {"type":"heartbeat","claim":42,"id":"6f0c...","sequence":3,"name":"host-17","group":...,"outbox":...,"server":...}
    {"type":"look", and otherwise like a heartbeat}

A claim is numbered by the offset that Kafka gives it, so it cannot contain its own number. `id` is random, made anew
for every claim: several instances may share one configuration and so one `name`, which is there for people only.

Several groups may share a topic: `group` says whose message it is, and those of other groups are ignored. Earlier
versions wrote no group, and overlook it in what they read. A message without a group counts as one of the reader's own,
so that members of both versions elect one leader between them while a group is upgraded.

A look says nothing to anybody: its writer learns from its offset how far the topic must be read to have read all that
was written before.

Anybody may write to the topic, so whatever is not exactly a claim or a heartbeat is None: noise.
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
    """What the members of a group contend for.

    Attributes:
        group: the leader group's ID; '' if a message does not say.
        outbox: identity of what the leader works on; '' if unknown.
        server: ID of the database server that has it (`OutboxStore.server_id`); '' if unknown.
    """

    group: str = ""
    outbox: str = ""
    server: str = ""

    def includes(self, other: Contest) -> bool:
        """Whether a message of the other contest concerns this one."""
        return other.group in {"", self.group}

    def agrees(self, other: Contest) -> bool:
        """Whether both are about the same thing, as far as they say. Within a group they must be."""
        outboxes, servers = {self.outbox, other.outbox} - {""}, {self.server, other.server} - {""}
        return len(outboxes) < 2 and len(servers) < 2

    def __str__(self) -> str:
        server = f" on database server {self.server}" if self.server else ""
        return f"{self.outbox or 'an unknown outbox'}{server}"


NO_CONTEST = Contest()
"""Of a message that does not say."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A process that owns the partition wants to lead from here on.

    Attributes:
        id: made for this claim alone.
        name: of the process, for people.
        contest: what it wants to lead.
    """

    id: UUID
    name: str = ""
    contest: Contest = NO_CONTEST


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A process that made a claim is alive.

    Attributes:
        claim: offset of the claim.
        id: the claim's.
        sequence: counts the heartbeats of this claim.
        name: of the process, for people.
        contest: what it wants to lead.
    """

    claim: int
    id: UUID
    sequence: int
    name: str = ""
    contest: Contest = NO_CONTEST


Signal = Claim | Heartbeat


def encode(signal: Signal) -> bytes:
    """The message's value."""
    fields: dict[str, Any] = {"type": "claim", "id": str(signal.id)}
    if isinstance(signal, Heartbeat):
        fields |= {"type": "heartbeat", "claim": signal.claim, "sequence": signal.sequence}
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
    """The signal in a message's value, or None if it holds none."""
    if value is None or len(value) > _LONGEST_BYTES:
        return None
    try:
        fields = json.loads(value)
        match fields:
            case {"type": "claim", "id": str(id_), "name": str(name)}:
                return Claim(UUID(id_), name[:_LONGEST_NAME], _contest(fields))
            case {"type": "heartbeat", "claim": int(claim), "id": str(id_), "sequence": int(number), "name": str(name)}:
                return Heartbeat(claim, UUID(id_), number, name[:_LONGEST_NAME], _contest(fields))
    except (ValueError, RecursionError):
        return None
    return None


def _contest(fields: dict[str, Any]) -> Contest:
    """Return what a message says of it. Raises ValueError if that is no text, or too long for any log."""
    said = [fields.get(name, "") for name in ("group", "outbox", "server")]
    if not all(isinstance(value, str) and len(value) <= LONGEST_GROUP for value in said):
        raise ValueError
    return Contest(*said)
