"""What cannot be delivered now, parked by the place that it would go to, so that the rest flows.

A **place** is a partition of a topic, or a topic as a whole (one that is not there). When a delivery to it fails for a
reason that may pass, the place is closed:

- the record that found it closed stays in memory as its **probe**, and is sent again after a rest, which doubles each
  time. Nothing else is sent there that is known to go there;
- its key, and that of every other record that fails there, is parked: left out of the marks. The others go back to the
  table, those behind the probe in its lane too. So they take no room among the records in flight, however many there
  are.

Once the probe arrives, the place is open and everything parked there may come again. A place whose probe was given up
(a remark, a hold) opens by itself after its rest, and whoever fails there next is the probe. So does one that never had
a probe, because those of other places take all the room that probes may take; its rests double all the same. Of these
only a few are open at a time before it is known what became of their records, or they would fill all the room among the
records in flight; and only so many as the owner says (`may_open`), where each of them holds up everybody.

Where a key goes is known only once one of its records has failed there, so each key fails once. If a place collects
`_MOST` of them and nothing at all has arrived in its topic for a while, the topic is closed instead: with the whole
cluster away, the list of keys does not grow with the table.

The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outbox_core.harvest.withdrawals import Who, who_is
from outbox_core.ports import LaneKey, StoredRecord, size_of

Place = tuple[str, int | LaneKey | None]
"""(topic, partition); (topic, None) for all of a topic; (topic, key) for a key alone."""

_MOST = 1_000
_QUIET_SECONDS = 5.0
_MOST_RESTED = 10_000
_ANY_NUMBER = 2**62
_MOST_OPENED = 8
_NEVER = float("inf")
LONGEST_REST_SECONDS = 10.0
"""However long a destination was away, it is tried again so soon after it is back."""
_FORGOTTEN_AFTER_RESTS = 5  # of the longest
_TOPIC: Final = 1


class Wait(NamedTuple):
    """A closed place, for those who ask what waits.

    Attributes:
        place: topic and partition, or topic and key, or topic.
        since: when it was closed, on the parking's clock.
        why: what the last delivery to it failed of.
    """

    place: Place
    since: float
    why: str


@dataclass(slots=True)
class _Closed:
    """A closed place."""

    since: float
    rest: float
    until: float
    is_unreachable: bool
    why: str
    probe: StoredRecord | None = None
    is_sent: bool = False
    parked: set[Who] = field(default_factory=set)


class _Rested(NamedTuple):
    """What is remembered of a place that had no probe: it opens by itself, and may be closed again at once."""

    rest: float
    since: float
    known_until: float


class Parking:
    """Closed places, their probes, and who is parked there.

    Args:
        first: length of the first rest, in seconds.
        longest: length that rests do not exceed, in seconds.
        clock: a monotonic clock, in seconds.
        most_probes: how many probes there may be.
        most_probe_bytes: how many bytes their values may take together.

    Attributes:
        may_open: how many places without a probe may still open by themselves.
    """

    def __init__(
        self,
        first: float,
        longest: float,
        clock: Callable[[], float],
        *,
        most_probes: int = 1_000,
        most_probe_bytes: int = 8 * 2**20,
    ) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._most_probes = most_probes
        self._most_probe_bytes = most_probe_bytes
        self.may_open = _ANY_NUMBER
        self._places: dict[Place, _Closed] = {}
        self._probes: dict[int, Place] = {}
        self._probe_bytes = 0
        self._where: dict[Who, Place] = {}
        self._rested: dict[Place, _Rested] = {}
        self._look_at_rested_at = 0.0
        self._arrived: dict[str, float] = {}  # of the topics with closed places, when a record last arrived
        # Places that opened by themselves, until a record fails or arrives there; or none came by then: they are gone.
        self._opened: dict[Place, float] = {}

    def __bool__(self) -> bool:
        """Whether any place is closed."""
        return bool(self._places)

    def __contains__(self, what: object) -> bool:
        """Whether this place is closed, or a key or record without one parked."""
        return what in self._places or what in self._where

    def __len__(self) -> int:
        """How many places are closed."""
        return len(self._places)

    @property
    def parked(self) -> int:
        """How many keys, and records without one, are parked."""
        return len(self._where)

    @property
    def waits(self) -> list[Wait]:
        """The closed places, the one that was closed first at the head."""
        waits = [Wait(place, closed.since, closed.why) for place, closed in self._places.items()]
        return sorted(waits, key=lambda wait: wait.since)

    @property
    def is_unreachable(self) -> bool:
        """Whether any place is closed because Kafka could not be reached there, as far as its probe has told."""
        return any(closed.is_unreachable for closed in self._places.values())

    @property
    def probes(self) -> list[StoredRecord]:
        """All probes, resting or under way."""
        return [closed.probe for closed in self._places.values() if closed.probe is not None]

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that no mark may bring."""
        return {who for who in self._where if not isinstance(who, int)}

    @property
    def ids(self) -> set[int]:
        """Records without a key that no mark may bring."""
        return {who for who in self._where if isinstance(who, int)}

    @property
    def topics(self) -> frozenset[str]:
        """Topics that no mark may bring."""
        return frozenset(topic for topic, part in self._places if part is None)

    @property
    def has_due_probe(self) -> bool:
        """True if a probe is due."""
        time = self._clock() if self._probes else 0.0
        return any(
            closed.until <= time and not closed.is_sent and closed.probe is not None for closed in self._places.values()
        )

    @property
    def next_due(self) -> float | None:
        """When the next probe is to be sent or the next place opens by itself."""
        soonest = _NEVER if self.may_open <= 0 else 0.0
        if len(self._opened) >= _MOST_OPENED:
            soonest = max(soonest, min(self._opened.values()))
        due = [
            max(closed.until, soonest) if closed.probe is None else closed.until
            for closed in self._places.values()
            if not closed.is_sent
        ]
        next_due = min(due, default=_NEVER)
        return None if next_due == _NEVER else next_due

    def failed(self, record: StoredRecord, place: Place, *, unreachable: bool = True, why: str = "") -> bool:
        """A record could not be delivered to a place now. Returns whether it stays in memory, as the probe.

        Args:
            record: the record.
            place: where it was to go.
            unreachable: whether Kafka could not be reached there; else it answered, and the place is not there, say.
            why: the error.
        """
        mine = self._probes.get(record[0])
        if mine is not None and mine in self._places:
            self._places[mine].is_unreachable = unreachable
            self._places[mine].why = why
            self._rest_again(self._places[mine])
            return True
        self._opened.pop(place, None)
        self._opened.pop((place[0], None), None)
        if (place[0], None) in self._places:
            place = (place[0], None)
        closed = self._places.get(place)
        if closed is None:
            closed = self._close(place, unreachable=unreachable, why=why)
            is_probe = self._keep(record, place, closed)
            if not is_probe:
                self._remember(place, closed)
        else:
            is_probe = closed.probe is None and self._keep(record, place, closed)
            if is_probe:
                self._rest_again(closed)
        if is_probe or place[1] is not None:
            self._park(record, place, closed)
        if not is_probe and place[1] is not None:
            quiet_since = max(closed.since, self._arrived[place[0]])
            if len(closed.parked) > _MOST and self._clock() - quiet_since > _QUIET_SECONDS:
                self._close_topic(place)
        return is_probe

    def rest(self, record: StoredRecord, why: str = "") -> None:
        """A record failed alone, and cannot be held: it rests with its key, without a probe in memory.

        So a row that is corrected or deleted meanwhile is read anew.
        """
        place = _place_of_its_own(record)
        self._opened.pop(place, None)
        self.give_up_probe(record)
        closed = self._close(place, unreachable=False, why=why)
        self._remember(place, closed)
        self._park(record, place, closed)

    def due(self) -> Iterator[StoredRecord]:
        """Probes to send now."""
        if not self._places:
            return
        time = self._clock()
        for place, closed in list(self._places.items()):
            if time < closed.until or closed.is_sent:
                continue
            if closed.probe is None:
                if self._has_room_to_open(time):
                    self.may_open -= 1
                    self._opened[place] = time + 2 * self._longest
                    self._open(place)  # whoever fails there next is the probe
            else:
                closed.is_sent = True
                yield closed.probe

    def _has_room_to_open(self, time: float) -> bool:
        if self.may_open > 0 and len(self._opened) >= _MOST_OPENED:
            self._opened = {place: until for place, until in self._opened.items() if time < until}
        return self.may_open > 0 and len(self._opened) < _MOST_OPENED

    def not_sent(self, record: StoredRecord) -> bool:
        """A record could not be sent after all. Returns whether it is a probe, which stays due."""
        place = self._probes.get(record[0])
        if place is None:
            return False
        self._places[place].is_sent = False
        return True

    def succeeded(self, records: Iterable[StoredRecord]) -> list[Place]:
        """These records arrived; return the places that are open because their probes are among them."""
        opened: list[Place] = []
        time = self._clock()
        for record in records:
            topic = record[_TOPIC]
            if topic in self._arrived:
                self._arrived[topic] = time
                self._call_at_once((topic, None), time)
            if self._rested:
                self._rested.pop(_place_of_its_own(record), None)
            if self._opened:
                self._opened = {place: until for place, until in self._opened.items() if place[0] != topic}
            place = self._probes.get(record[0])
            if place is not None:
                self.give_up_probe(record)
                self._open(place)
                opened.append(place)
        return opened

    def _call_at_once(self, place: Place, time: float) -> None:
        """Something arrived in a topic that is closed as a whole: its probe need not rest any longer."""
        closed = self._places.get(place)
        if closed is not None and not closed.is_sent:
            closed.until = min(closed.until, time)

    def give_up_probe(self, record: StoredRecord) -> None:
        """The record is no probe any more: it was judged, or is held."""
        place = self._probes.pop(record[0], None)
        if place is not None:
            closed = self._places[place]
            self._probe_bytes -= size_of(record)
            closed.probe, closed.is_sent = None, False

    def take_probes(self) -> list[StoredRecord]:
        """Give up all probes that rest, and return them; the places stay closed until their rests are over."""
        probes = [closed.probe for closed in self._places.values() if closed.probe is not None and not closed.is_sent]
        for closed in self._places.values():
            closed.probe, closed.is_sent = None, False
        self._probes.clear()
        self._probe_bytes = 0
        return probes

    def waiting_probes(self) -> list[StoredRecord]:
        """The probes that rest."""
        return [closed.probe for closed in self._places.values() if closed.probe is not None and not closed.is_sent]

    def _close(self, place: Place, *, unreachable: bool, why: str) -> _Closed:
        """Close a place; if it rested without a probe lately, for twice as long."""
        since = time = self._clock()
        rest, rested = self._first, self._rested.get(place)
        if rested is not None and time < rested.known_until:
            rest, since = min(self._longest, rested.rest * 2), rested.since
        closed = self._places[place] = _Closed(since, rest, time + rest, unreachable, why)
        self._arrived.setdefault(place[0], 0.0)
        return closed

    def _keep(self, record: StoredRecord, place: Place, closed: _Closed) -> bool:
        """Make a record the probe of a place, if there is room for it. Returns whether it is."""
        size = size_of(record)
        if len(self._probes) >= self._most_probes or self._probe_bytes + size > self._most_probe_bytes:
            return False
        closed.probe = record
        self._probes[record[0]] = place
        self._probe_bytes += size
        return True

    def _remember(self, place: Place, closed: _Closed) -> None:
        """How long a place rests without a probe; forgotten when it was not closed again for some time."""
        time = self._clock()
        if time >= self._look_at_rested_at:
            self._look_at_rested_at = time + self._longest
            self._rested = {place: rested for place, rested in self._rested.items() if time < rested.known_until}
        if len(self._rested) >= _MOST_RESTED:
            self._rested.clear()
        known_until = closed.until + _FORGOTTEN_AFTER_RESTS * self._longest
        self._rested[place] = _Rested(closed.rest, closed.since, known_until)

    def _park(self, record: StoredRecord, place: Place, closed: _Closed) -> None:
        who = who_is(record)
        if self._where.setdefault(who, place) == place:
            closed.parked.add(who)

    def _rest_again(self, closed: _Closed) -> None:
        closed.rest = min(self._longest, closed.rest * 2)
        closed.until = self._clock() + closed.rest
        closed.is_sent = False

    def _open(self, place: Place) -> None:
        closed = self._places.pop(place)
        for who in closed.parked:
            self._where.pop(who, None)
        if all(topic != place[0] for topic, _ in self._places):
            self._arrived.pop(place[0], None)

    def _close_topic(self, place: Place) -> None:
        """Close the topic in the place's stead; its probe stays on."""
        closed = self._places[place]
        for who in closed.parked:
            self._where.pop(who, None)
        closed.parked.clear()
        whole: Place = (place[0], None)
        if whole not in self._places:
            del self._places[place]
            self._places[whole] = closed
            if closed.probe is not None:
                self._probes[closed.probe[0]] = whole


def _place_of_its_own(record: StoredRecord) -> Place:
    """The place of a record that nobody else is concerned with, but for its key."""
    who = who_is(record)
    return record[_TOPIC], who if not isinstance(who, int) else ("", str(who))
