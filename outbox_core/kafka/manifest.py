"""The manifest: a list of the rows that a Kafka transaction publishes, written inside that transaction.

It lists (id, create_time) of every row: ids come back after TRUNCATE ... RESTART IDENTITY, a restored backup or a crash
that loses a commit, and a bare id would then delete a fresh row. It names its outbox and its database server, so that a
foreign manifest is noticed before a delete.

The manifest is the last record of its transaction. The first is its `Opening`: without a manifest behind it, the
transaction was torn, that is, ended in the middle.

Encoding, version 1: one line of JSON `{"v":1,"outbox":...,"rows":n,"server":...}`, a line feed, then n ids and n create
times (microseconds since the Unix epoch) as little-endian 64-bit integers. An opening is a line of JSON alone.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from outbox_core.errors import TrackingTopicError, must
from outbox_core.stores.interface import StoredRecord

_VERSION = 1
MOST_TOPICS = 1_000
"""Named in one opening: 250 KB at most."""
_INTEGER = 8
BYTES_PER_ROW = 2 * _INTEGER
_id_of, _topic_of = attrgetter("id"), attrgetter("topic")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The rows that one transaction published."""

    outbox: str
    ids: Sequence[int]
    create_times: Sequence[int]  # parallel to `ids`, in microseconds since the epoch
    server: str = ""  # `OutboxStore.server_id`, '' if it is not known

    def encode(self) -> bytes:
        """Return the manifest as the value of a Kafka record."""
        ids, times = len(self.ids), len(self.create_times)
        must(ids == times, "a manifest must have a create time for each id; it has %d for %d", times, ids)
        head = _line({"v": _VERSION, "outbox": self.outbox, "rows": len(self.ids), **_of_server(self.server)})
        return b"%b\n%b%b" % (head, _packed(self.ids), _packed(self.create_times))

    @classmethod
    def decode(cls, value: bytes) -> Manifest:
        """Read a manifest, or raise TrackingTopicError if it is none, or of a version unknown to this release."""
        try:
            line, body = value.split(b"\n", 1)
            head = json.loads(line)
            version, outbox, rows = head["v"], head["outbox"], head["rows"]
            server = str(head.get("server", ""))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise TrackingTopicError("the tracking topic holds a record that is no manifest") from None
        if version != _VERSION:
            raise TrackingTopicError(f"the tracking topic holds a manifest of version {version}; upgrade kafka-outbox")
        if not isinstance(outbox, str) or not isinstance(rows, int) or len(body) != rows * BYTES_PER_ROW:
            raise TrackingTopicError("the tracking topic holds a manifest that is cut off")
        middle = rows * _INTEGER
        return cls(outbox, _unpacked(body[:middle]), _unpacked(body[middle:]), server)


@dataclass(frozen=True, slots=True)
class Opening:
    """The first record of a transaction, by which recovery reads a torn batch back."""

    outbox: str
    first: int  # the batch's lowest id
    last: int
    topics: tuple[str, ...] | None  # None if there are too many to name
    server: str = ""
    written_at_ms: int = 0  # the record's timestamp, since the epoch; 0 before it is written

    @classmethod
    def of(cls, outbox: str, server: str, records: Sequence[StoredRecord]) -> Opening:
        """Return the opening of a batch."""
        ids, topics = list(map(_id_of, records)), set(map(_topic_of, records))
        named = tuple(sorted(topics)) if len(topics) <= MOST_TOPICS else None
        return cls(outbox, min(ids), max(ids), named, server)

    def encode(self) -> bytes:
        """Return the opening as the value of a Kafka record."""
        batch = {"first": self.first, "last": self.last, "topics": self.topics}
        return _line({"v": _VERSION, "outbox": self.outbox, "opens": batch, **_of_server(self.server)})

    @classmethod
    def decode(cls, value: bytes, written_at_ms: int) -> Opening:
        """Read an opening, or raise TrackingTopicError if it is none."""
        try:
            head = json.loads(value)
            outbox, batch, topics = str(head["outbox"]), head["opens"], head["opens"]["topics"]
            named = None if topics is None else tuple(map(str, topics))
            return cls(
                outbox, int(batch["first"]), int(batch["last"]), named, str(head.get("server", "")), written_at_ms
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise TrackingTopicError("the tracking topic holds an opening that cannot be read") from None


def _line(head: Mapping[str, Any]) -> bytes:
    return json.dumps(head, separators=(",", ":")).encode()


def _of_server(server: str) -> dict[str, str]:
    return {"server": server} if server else {}


def _packed(numbers: Sequence[int]) -> bytes:
    packed = array("q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(data: bytes) -> list[int]:
    numbers = array("q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
