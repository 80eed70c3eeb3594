"""Backoff by destination of at-least-once delivery: records that Kafka cannot take now wait, and all others flow.

Exactly once has a smaller one (`backoffs`), which keeps no record in memory.

A **destination** is a partition of a topic, a topic as a whole (one that does not exist), or a single key. When a
delivery fails for a reason that may pass, its destination is backed off:

- the failed record stays in memory as the **probe**. It is sent again after the backoff, which doubles each time. Other
  records that are known to go there are not sent;
- the keys of all records that failed there are left out of the marks. Their rows are released to the table, those
  behind the probe in its lane too, so they take no room among the records in flight.

The probe's arrival ends the backoff. A backoff without a probe (released, held, or without room for it) expires by
itself, and the next record that fails there becomes the probe. Only a few backoffs may be expired before the fate of
their records is known, or these would fill all the room among the records in flight; and only `may_expire` of them
where each holds up everything else.

Each key fails once, before its destination is known. If a destination collects `_MOST_KEYS` of them and no record has
arrived in its topic for a while, the whole topic is backed off instead: with the cluster away, the list of keys does
not grow with the table. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_core.harvest.failures.backoffs import BackoffInfo, Destination, destination_of_its_own
from outbox_core.harvest.failures.released_keys import LaneOrRow, lane_or_row, lanes_among, rows_among
from outbox_core.stores.interface import LaneKey, RowId, StoredRecord, row_id, size_of

_MOST_KEYS = 1_000
_QUIET_SECONDS = 5.0
_MOST_PAST = 10_000
_ANY_NUMBER = 2**62
_MOST_EXPIRED = 8
_NEVER = float("inf")
_FORGOTTEN_AFTER_BACKOFFS = 5  # of the longest


class _Limits(NamedTuple):
    first: float
    longest: float
    most_probes: int
    most_probe_bytes: int


@dataclass(slots=True)
class _Backoff:
    since: float
    seconds: float
    until: float
    # False if Kafka answered: that a topic does not exist, for example
    is_unreachable: bool
    why: str
    probe: StoredRecord | None = None
    is_sent: bool = False
    keys: set[LaneOrRow] = field(default_factory=set)

    def double(self, longest: float, time: float) -> None:
        self.seconds = min(longest, self.seconds * 2)
        self.until = time + self.seconds
        self.is_sent = False


class _PastBackoff(NamedTuple):
    """The memory of a backoff without a probe: it expires by itself, and its destination may fail again at once."""

    seconds: float
    since: float
    known_until: float


class DeliveryBackoffs:
    """Destinations that are backed off, their probes, and the keys that wait for them; durations in seconds."""

    def __init__(
        self,
        first: float,
        longest: float,
        clock: Callable[[], float],
        *,
        most_probes: int = 1_000,
        most_probe_bytes: int = 8 * 2**20,
    ) -> None:
        self._limits = _Limits(first, longest, most_probes, most_probe_bytes)
        self._clock = clock
        self.may_expire = _ANY_NUMBER
        self._active: dict[Destination, _Backoff] = {}
        self._probes: dict[RowId, Destination] = {}
        self._probe_bytes = 0
        self._keys: dict[LaneOrRow, Destination] = {}
        self._past: dict[Destination, _PastBackoff] = {}
        self._prune_past_at = 0.0
        self._arrived: dict[str, float] = {}  # time of the last arrival in each topic with a backoff
        # Expired backoffs, until a record fails or arrives there; at the latest until the time given.
        self._expired: dict[Destination, float] = {}

    def __bool__(self) -> bool:
        return bool(self._active)

    def __contains__(self, item: object) -> bool:
        return item in self._active or item in self._keys

    def __len__(self) -> int:
        return len(self._active)

    @property
    def waiting_keys(self) -> int:
        """Number of keys, and of records without one, that wait."""
        return len(self._keys)

    @property
    def infos(self) -> list[BackoffInfo]:
        """The destinations that are backed off, by their first failure."""
        infos = [BackoffInfo(destination, each.since, each.why) for destination, each in self._active.items()]
        return sorted(infos, key=lambda info: info.since)

    @property
    def is_unreachable(self) -> bool:
        """True if Kafka could not be reached for any destination, as far as its probe has told."""
        return any(each.is_unreachable for each in self._active.values())

    @property
    def probes(self) -> list[StoredRecord]:
        """All probes, waiting or sent."""
        return [each.probe for each in self._active.values() if each.probe is not None]

    @property
    def waiting_probes(self) -> list[StoredRecord]:
        """Probes that are not sent."""
        return [each.probe for each in self._active.values() if each.probe is not None and not each.is_sent]

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that marks leave out."""
        return lanes_among(self._keys)

    @property
    def rows(self) -> set[RowId]:
        """Records without a key that marks leave out."""
        return rows_among(self._keys)

    @property
    def topics(self) -> frozenset[str]:
        """Topics that marks leave out."""
        return frozenset(topic for topic, part in self._active if part is None)

    @property
    def has_due_probe(self) -> bool:
        """True if a probe is due."""
        time = self._clock() if self._probes else 0.0
        return any(each.until <= time and not each.is_sent and each.probe is not None for each in self._active.values())

    @property
    def next_due(self) -> float | None:
        """The time at which the next probe is due or the next backoff expires."""
        soonest = _NEVER if self.may_expire <= 0 else 0.0
        if len(self._expired) >= _MOST_EXPIRED:
            soonest = max(soonest, min(self._expired.values()))
        due = [
            max(each.until, soonest) if each.probe is None else each.until
            for each in self._active.values()
            if not each.is_sent
        ]
        next_due = min(due, default=_NEVER)
        return None if next_due == _NEVER else next_due

    def failed(
        self, record: StoredRecord, destination: Destination, *, unreachable: bool = True, why: str = ""
    ) -> bool:
        """Back off a destination after a failed delivery; return True if the record stays in memory, as the probe."""
        mine = self._probes.get(row_id(record))
        if mine is not None and mine in self._active:
            backoff = self._active[mine]
            backoff.is_unreachable, backoff.why = unreachable, why
            backoff.double(self._limits.longest, self._clock())
            return True
        topic, whole = destination[0], (destination[0], None)
        self._expired.pop(destination, None)
        self._expired.pop(whole, None)
        if whole in self._active:
            destination = whole
        known = self._active.get(destination)
        if known is None:
            backoff = self._start(destination, unreachable=unreachable, why=why)
            is_probe = self._keep(record, destination, backoff)
            if not is_probe:
                self._remember(destination, backoff)
        else:
            backoff = known
            is_probe = backoff.probe is None and self._keep(record, destination, backoff)
            if is_probe:
                backoff.double(self._limits.longest, self._clock())
        if is_probe or destination[1] is not None:
            self._add_key(record, destination, backoff)
        if not is_probe and destination[1] is not None:
            quiet_since = max(backoff.since, self._arrived[topic])
            if len(backoff.keys) > _MOST_KEYS and self._clock() - quiet_since > _QUIET_SECONDS:
                self._widen(destination)
        return is_probe

    def failed_alone(self, record: StoredRecord, why: str = "") -> None:
        """Back off a record that failed alone and cannot be held, with its key."""
        destination = destination_of_its_own(record)
        self._expired.pop(destination, None)
        self.end_probe(record)
        # Without a probe in memory, a row that is corrected or deleted meanwhile is read anew.
        backoff = self._start(destination, unreachable=False, why=why)
        self._remember(destination, backoff)
        self._add_key(record, destination, backoff)

    def due_probes(self) -> Iterator[StoredRecord]:
        """Yield the probes to send now, and let backoffs without a probe expire."""
        if not self._active:
            return
        time = self._clock()
        for destination, backoff in list(self._active.items()):
            if time < backoff.until or backoff.is_sent:
                continue
            if backoff.probe is not None:
                backoff.is_sent = True
                yield backoff.probe
            elif self._one_more_may_expire(time):
                self.may_expire -= 1
                self._expired[destination] = time + 2 * self._limits.longest
                self._end(destination)

    def _one_more_may_expire(self, time: float) -> bool:
        if self.may_expire > 0 and len(self._expired) >= _MOST_EXPIRED:
            self._expired = {destination: until for destination, until in self._expired.items() if time < until}
        return self.may_expire > 0 and len(self._expired) < _MOST_EXPIRED

    def not_sent(self, record: StoredRecord) -> bool:
        """Note that a record could not be sent after all; return True if it is a probe, which stays due."""
        destination = self._probes.get(row_id(record))
        if destination is None:
            return False
        self._active[destination].is_sent = False
        return True

    def succeeded(self, records: Iterable[StoredRecord]) -> list[Destination]:
        """Note the arrival of records; return the destinations whose probes are among them."""
        ended: list[Destination] = []
        time = self._clock()
        for record in records:
            topic = record.topic
            if topic in self._arrived:
                self._arrived[topic] = time
                whole = self._active.get((topic, None))
                if whole is not None and not whole.is_sent:
                    whole.until = min(whole.until, time)  # something arrived in the topic: its probe is due
            if self._past:
                self._past.pop(destination_of_its_own(record), None)
            if self._expired:
                self._expired = {other: until for other, until in self._expired.items() if other[0] != topic}
            destination = self._probes.get(row_id(record))
            if destination is not None:
                self.end_probe(record)
                self._end(destination)
                ended.append(destination)
        return ended

    def end_probe(self, record: StoredRecord) -> None:
        """Note that a record is no probe any more: its fate is known, or it is held."""
        destination = self._probes.pop(row_id(record), None)
        if destination is not None:
            backoff = self._active[destination]
            self._probe_bytes -= size_of(record)
            backoff.probe, backoff.is_sent = None, False

    def release_probes(self) -> list[StoredRecord]:
        """Forget all probes; return those that are not sent. Their destinations stay backed off."""
        probes = self.waiting_probes
        for backoff in self._active.values():
            backoff.probe, backoff.is_sent = None, False
        self._probes.clear()
        self._probe_bytes = 0
        return probes

    def _start(self, destination: Destination, *, unreachable: bool, why: str) -> _Backoff:
        """Start a backoff; if one without a probe was there lately, for twice as long."""
        since = time = self._clock()
        seconds, past = self._limits.first, self._past.get(destination)
        if past is not None and time < past.known_until:
            seconds, since = min(self._limits.longest, past.seconds * 2), past.since
        backoff = self._active[destination] = _Backoff(since, seconds, time + seconds, unreachable, why)
        self._arrived.setdefault(destination[0], 0.0)
        return backoff

    def _keep(self, record: StoredRecord, destination: Destination, backoff: _Backoff) -> bool:
        size = size_of(record)
        if len(self._probes) >= self._limits.most_probes or self._probe_bytes + size > self._limits.most_probe_bytes:
            return False
        backoff.probe = record
        self._probes[row_id(record)] = destination
        self._probe_bytes += size
        return True

    def _remember(self, destination: Destination, backoff: _Backoff) -> None:
        time = self._clock()
        if time >= self._prune_past_at:
            self._prune_past_at = time + self._limits.longest
            self._past = {other: past for other, past in self._past.items() if time < past.known_until}
        if len(self._past) >= _MOST_PAST:
            self._past.clear()
        known_until = backoff.until + _FORGOTTEN_AFTER_BACKOFFS * self._limits.longest
        self._past[destination] = _PastBackoff(backoff.seconds, backoff.since, known_until)

    def _add_key(self, record: StoredRecord, destination: Destination, backoff: _Backoff) -> None:
        item = lane_or_row(record)
        if self._keys.setdefault(item, destination) == destination:
            backoff.keys.add(item)

    def _end(self, destination: Destination) -> None:
        self._free_keys(self._active.pop(destination))
        if all(topic != destination[0] for topic, _ in self._active):
            self._arrived.pop(destination[0], None)

    def _free_keys(self, backoff: _Backoff) -> None:
        for item in backoff.keys:
            self._keys.pop(item, None)
        backoff.keys.clear()

    def _widen(self, destination: Destination) -> None:
        """Back off the whole topic in the destination's stead; its probe stays."""
        backoff = self._active[destination]
        self._free_keys(backoff)
        whole: Destination = (destination[0], None)
        if whole not in self._active:
            del self._active[destination]
            self._active[whole] = backoff
            if backoff.probe is not None:
                self._probes[row_id(backoff.probe)] = whole
