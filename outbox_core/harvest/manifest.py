"""The manifest: which rows a Kafka transaction has published, written inside that very transaction.

It lists (id, create_time) of every row. Both are needed to recognise a row: ids come back after TRUNCATE ... RESTART
IDENTITY, after a restored backup, or when a crash swallowed a commit, and a bare id would then delete a fresh row. It
also names its outbox, so that a tracking topic shared by mistake is noticed before anything is deleted.

Encoding, version 1: one line of JSON `{"v":1,"outbox":...,"rows":n}`, a line feed, then n ids and n create times as
little-endian 64-bit integers. Create times are microseconds since the Unix epoch, as `PostgresStore.scan` returns them.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from outbox_core.errors import TrackingTopicError

_VERSION = 1
_INTEGER = 8
BYTES_PER_ROW = 2 * _INTEGER


@dataclass(frozen=True, slots=True)
class Manifest:
    """Rows that one transaction published.

    Attributes:
        outbox: identity of the outbox, `<database>.<schema>.<table>`.
        ids: ids of the rows.
        create_times: their create times, parallel to `ids`, in microseconds since the epoch.
    """

    outbox: str
    ids: Sequence[int]
    create_times: Sequence[int]

    def encode(self) -> bytes:
        """The manifest as the value of a Kafka record."""
        head = json.dumps({"v": _VERSION, "outbox": self.outbox, "rows": len(self.ids)}, separators=(",", ":"))
        return b"%b\n%b%b" % (head.encode(), _packed(self.ids), _packed(self.create_times))

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
        except (ValueError, KeyError, TypeError):
            raise TrackingTopicError("the tracking topic holds a record that is no manifest") from None
        if version != _VERSION:
            raise TrackingTopicError(f"the tracking topic holds a manifest of version {version}; upgrade kafka-outbox")
        if not isinstance(outbox, str) or not isinstance(rows, int) or len(body) != rows * BYTES_PER_ROW:
            raise TrackingTopicError("the tracking topic holds a manifest that is cut off")
        middle = rows * _INTEGER
        return cls(outbox, _unpacked(body[:middle]), _unpacked(body[middle:]))


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
