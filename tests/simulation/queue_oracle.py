"""The truth about each message of a queue by the topics' logs, whatever consumers and trackers believe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outbox_queue.protocol import headers as message_headers
from outbox_queue.protocol import markers as wire
from tests.simulation.brokers import COMMITTED, PLAIN, Entry
from tests.simulation.queue_kafka import QueueCluster, StampedPartition

Place = tuple[int, int]
REDELIVERED = "redelivered"


class Copy(NamedTuple):
    """A record of the message topic."""

    token: str
    origin: Place
    attempt: int
    is_of_tracker: bool
    at: float


class Mark(NamedTuple):
    """A marker about a copy."""

    kind: int
    partition: int
    offset: int
    at: float  # when it was appended, in truth
    deadline: float
    reason: str


class Oracle:
    """All that a reader of committed records has been able to read so far."""

    def __init__(self, cluster: QueueCluster) -> None:
        self.copies: dict[Place, Copy] = {}
        self.marks: dict[Place, list[Mark]] = {}
        self.open: set[Place] = set()  # copies without an end
        self.dead: dict[Place, list[tuple[str, int, str]]] = {}  # by origin: token, attempts, reason
        self.dead_by_tracker = 0
        self._cluster = cluster
        self._read_to: dict[tuple[str, int], int] = {}

    def scan(self) -> None:
        """Read on."""
        for number, _, entry, at in self._new("messages"):
            self._add_copy((number, entry.offset), entry, at)
        for number, _, entry, at in self._new("markers"):
            self._add_mark(number, entry, at)
        for _, _, entry, _ in self._new("dead"):
            travelled = message_headers.read(entry.headers)
            attempts = int(dict(entry.headers or ()).get(message_headers.ATTEMPT, b"0"))
            self.dead_by_tracker += entry.state == COMMITTED
            assert travelled.origin is not None
            letter = ((entry.value or b"").decode(), attempts, travelled.reason)
            self.dead.setdefault(travelled.origin, []).append(letter)

    def is_started_again(self, place: Place) -> bool:
        """Tell whether a copy has a start marker that readers do not see yet, behind an open transaction."""
        for partition in self._cluster.stamped("markers"):
            for entry in partition.log[partition.stable_end :]:
                marker = wire.Marker.FromString(entry.value or b"")
                named = marker.message_id.partition, marker.message_id.offset
                if entry.state == PLAIN and marker.type == wire.START and named == place:
                    return True
        return False

    def _new(self, topic: str) -> Iterator[tuple[int, StampedPartition, Entry, float]]:
        for partition in self._cluster.stamped(topic):
            name = topic, partition.number
            for entry in partition.visible(self._read_to.get(name, 0)):
                self._read_to[name] = entry.offset + 1
                if entry.state in (PLAIN, COMMITTED):
                    yield partition.number, partition, entry, partition.appended[entry.offset]

    def _add_copy(self, place: Place, entry: Entry, at: float) -> None:
        travelled = message_headers.read(entry.headers)
        is_of_tracker = travelled.origin is not None
        token = (entry.value or b"").decode()
        self.copies[place] = Copy(token, travelled.origin or place, travelled.attempt, is_of_tracker, at)
        if not self.is_ended(place):
            self.open.add(place)

    def _add_mark(self, number: int, entry: Entry, at: float) -> None:
        marker = wire.Marker.FromString(entry.value or b"")
        place = marker.message_id.partition, marker.message_id.offset
        if place[0] < 0:
            return
        deadline = at + marker.redeliver_after_ms / 1000
        self.marks.setdefault(place, []).append(Mark(marker.type, number, entry.offset, at, deadline, marker.reason))
        if marker.type == wire.END:
            self.open.discard(place)
        elif marker.type == wire.START:
            self.open.add(place)

    def ends(self, place: Place) -> list[Mark]:
        """Return the end markers of a copy."""
        return [mark for mark in self.marks.get(place, ()) if mark.kind == wire.END]

    def is_ended(self, place: Place) -> bool:
        """Tell whether a copy's last start marker is followed by an end."""
        return self._is_ended(self.marks.get(place, []))

    @staticmethod
    def _is_ended(marks: list[Mark]) -> bool:
        kinds = [mark.kind for mark in marks if mark.kind != wire.KEEPALIVE]
        return bool(kinds) and kinds[-1] == wire.END

    def deadline(self, place: Place, before: int | None = None) -> float | None:
        """Return when an unfinished copy expires, by the markers before an offset; None if it is not in progress."""
        marks = [mark for mark in self.marks.get(place, ()) if before is None or mark.offset < before]
        if not marks or self._is_ended(marks):
            return None
        return next((mark.deadline for mark in reversed(marks) if mark.kind != wire.END), None)

    @property
    def waiting(self) -> list[Place]:
        """Copies that are neither ended nor set aside."""
        return sorted(filter(self._waits, self.open))

    @property
    def is_any_waiting(self) -> bool:
        """True if `waiting` would return any; asked much more often."""
        return any(map(self._waits, self.open))

    def _waits(self, place: Place) -> bool:
        return place in self.marks or self.copies[place].origin not in self.dead
