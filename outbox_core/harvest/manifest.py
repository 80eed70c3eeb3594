"""The manifest: which rows a Kafka transaction has published, written inside that very transaction.

It lists (id, create_time) of every row. Both are needed to recognise a row: ids come back after TRUNCATE ... RESTART
IDENTITY, after a restored backup, or when a crash swallowed a commit, and a bare id would then delete a fresh row. It
also names its outbox, so that a tracking topic shared by mistake is noticed before anything is deleted, and its
database server, so that two servers with databases of the same name do not take each other's manifests for their own.

The manifest is the last record of its transaction. The first is its `Opening`, written before any of the batch: it is
seen alone only if something ended the transaction in the middle (it was torn).

Encoding, version 1: one line of JSON `{"v":1,"outbox":...,"rows":n,"server":...}`, a line feed, then n ids and n create
times as little-endian 64-bit integers. Create times are microseconds since the Unix epoch, as `PostgresStore.scan`
returns them. An opening is a line of JSON alone.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox_core.errors import TrackingTopicError
from outbox_core.ports import StoredRecord

_ID: Final = 0
_TOPIC: Final = 1
_VERSION = 1
MOST_TOPICS = 1_000
"""Named in one opening: 250 KB at most."""
_INTEGER = 8
BYTES_PER_ROW = 2 * _INTEGER


@dataclass(frozen=True, slots=True)
class Manifest:
    """Rows that one transaction published.

    Attributes:
        outbox: identity of the outbox, `<database>.<schema>.<table>`.
        ids: ids of the rows.
        create_times: their create times, parallel to `ids`, in microseconds since the epoch.
        server: ID of the database server (`OutboxStore.server_id`), '' if it is not known.
    """

    outbox: str
    ids: Sequence[int]
    create_times: Sequence[int]
    server: str = ""

    def encode(self) -> bytes:
        """The manifest as the value of a Kafka record."""
        head = _line({"v": _VERSION, "outbox": self.outbox, "rows": len(self.ids), **_of_server(self.server)})
        return b"%b\n%b%b" % (head, _packed(self.ids), _packed(self.create_times))

    @classmethod
    def decode(cls, value: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            TrackingTopicError: if it is none, or of a version that this release does not know.
        """
        try:
            line, body = value.split(b"\n", 1)
            head = json.loads(line)
            version, outbox, rows = head["v"], head["outbox"], head["rows"]
            server = str(head.get("server", ""))
        except (ValueError, KeyError, TypeError):
            raise TrackingTopicError("the tracking topic holds a record that is no manifest") from None
        if version != _VERSION:
            raise TrackingTopicError(f"the tracking topic holds a manifest of version {version}; upgrade kafka-outbox")
        if not isinstance(outbox, str) or not isinstance(rows, int) or len(body) != rows * BYTES_PER_ROW:
            raise TrackingTopicError("the tracking topic holds a manifest that is cut off")
        middle = rows * _INTEGER
        return cls(outbox, _unpacked(body[:middle]), _unpacked(body[middle:]), server)


@dataclass(frozen=True, slots=True)
class Opening:
    """The first record of a transaction: what recovery needs to read a torn batch back.

    Attributes:
        outbox: identity of the outbox.
        first: the lowest id of the batch.
        last: the highest.
        topics: where its records go; None if there are too many to name.
        server: ID of the database server, '' if it is not known.
        written_at_ms: the record's timestamp, in milliseconds since the epoch; 0 for one that is still to be written.
    """

    outbox: str
    first: int
    last: int
    topics: tuple[str, ...] | None
    server: str = ""
    written_at_ms: int = 0

    @classmethod
    def of(cls, outbox: str, server: str, records: Sequence[StoredRecord]) -> Opening:
        """The opening of a batch."""
        ids, topics = [record[_ID] for record in records], {record[_TOPIC] for record in records}
        named = tuple(sorted(topics)) if len(topics) <= MOST_TOPICS else None
        return cls(outbox, min(ids), max(ids), named, server)

    def encode(self) -> bytes:
        """The opening as the value of a Kafka record."""
        batch = {"first": self.first, "last": self.last, "topics": self.topics}
        return _line({"v": _VERSION, "outbox": self.outbox, "opens": batch, **_of_server(self.server)})

    @classmethod
    def decode(cls, value: bytes, written_at_ms: int) -> Opening:
        """Read an opening.

        Raises:
            TrackingTopicError: if it is none.
        """
        try:
            head = json.loads(value)
            outbox, batch, topics = str(head["outbox"]), head["opens"], head["opens"]["topics"]
            named = None if topics is None else tuple(map(str, topics))
            return cls(
                outbox, int(batch["first"]), int(batch["last"]), named, str(head.get("server", "")), written_at_ms
            )
        except (ValueError, KeyError, TypeError):
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
