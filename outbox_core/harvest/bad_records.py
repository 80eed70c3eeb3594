"""What at-least-once delivery does about deliveries that fail, and about what is held.

A failure concerns no more than it must (`verdicts` sorts the codes):

    failed in a batch, with a code that a record may be to blame for --> sent again, alone --> arrives, or
    failed alone, with such a code -----> held (a hold is written, the record and its key go back to the table)
    the topic may not be written to ----> the topic is held
    the topic is not there -------------> the topic is parked
    anything else ----------------------> the partition is parked (`parking`): its keys go back to the table
    the producer is broken -------------> everything is marked again, with a new producer

Nobody else is marked again for any of the first five. What keeps the order while some keys go back and others flow is
in `withdrawals`. A record on its second try is still under way in its lane, so nothing of its key overtakes it.

Without a table of holds, what would be held is tried again and again, with rests in between.

Belongs to the harvest thread, as the lanes that are passed in do.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

from outbox_core.election.leadership import now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.holding import HoldBook
from outbox_core.harvest.lanes import Lanes
from outbox_core.harvest.parking import LONGEST_REST_SECONDS, Parking, Place
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.surroundings import Surroundings, Timing
from outbox_core.harvest.trials import TOO_LARGE, sizes_of
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.harvest.waits import Waits
from outbox_core.harvest.withdrawals import Who, Withdrawals, who_is
from outbox_core.kafka import KafkaError
from outbox_core.ports import NO_HOLDS, HoldSet, LaneKey, NewHold, OutboxStore, StoredRecord

_log = logging.getLogger(__name__)

_ID: Final = 0
_TOPIC: Final = 1
_KEY: Final = 2
_VALUE: Final = 3
_HEADER_VALUES: Final = 5
_PARTITION: Final = 6
_LARGEST_PARTITION: Final = 2**31 - 1
_LONGEST_REST_FACTOR = 20


class Exclusion(NamedTuple):
    """What a mark must leave out beside what is held: keys, records without one, topics."""

    lanes: set[LaneKey]
    ids: set[int]
    topics: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.lanes or self.ids or self.topics)


def new_hold(failure: Failure, grant_write: str, *, dead_letter: bool) -> NewHold:
    """The hold of a record that failed alone, or of its topic if that may not be written to."""
    record, error = failure.record, failure.error
    if verdict_on(error) is Verdict.FORBIDDEN:
        return NewHold(record[_TOPIC], None, None, "not authorized", f"{error.str()}; {grant_write}")
    return NewHold(record[_TOPIC], record[_KEY], record[_ID], "refused", _told_of(failure), dead_letter)


def longest_rest_of(timing: Timing) -> float:
    """How long the rests of a destination may grow, in seconds: but for users who want long ones from the start."""
    return max(timing.io_error_backoff, min(timing.io_error_backoff * _LONGEST_REST_FACTOR, LONGEST_REST_SECONDS))


def _told_of(failure: Failure) -> str:
    """What a record was refused for, with the column at fault if the error does not name it."""
    record, text, code = failure.record, failure.error.str(), failure.error.code()
    if code in TOO_LARGE:
        sizes = sizes_of(record)
        largest = max(sizes, key=lambda column: sizes[column])
        return f"{largest}: {text} ({sizes[largest]} of its {sum(sizes.values())} bytes)"
    if code == KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  its public name
        return f"kafka_partition: {text}: {record[_PARTITION]}"
    if code == KafkaError.TOPIC_EXCEPTION:
        return f"kafka_topic: {text}"
    if code == KafkaError._INVALID_ARG and not text.startswith("kafka_"):  # noqa: SLF001
        return f"{_odd_column(record)}: {text}"
    return text


def _odd_column(record: StoredRecord) -> str:
    """The column of a row of a hand-made table that the client cannot make a message of."""
    if not isinstance(record[_TOPIC], str):
        return "kafka_topic"
    if not isinstance(record[_KEY], str | None):
        return "kafka_key"
    if not isinstance(record[_VALUE], str | bytes | None):
        return "kafka_value"
    if not all(isinstance(value, str | bytes | None) for value in record[_HEADER_VALUES] or ()):
        return "kafka_header_values"
    return "kafka_partition" if record[_PARTITION] > _LARGEST_PARTITION else "the row is no message"


class BadRecords:
    """Failed deliveries, and holds, of one leadership.

    Args:
        timing: limits.
        surroundings: what to work with.
        dead_letter: whether bad records go to the dead-letter topic; they are held until then.

    Attributes:
        book: the holds; used on the marker's thread.
        holds: what is held, as far as the harvest thread has heard.
        parking: what cannot be delivered now.
    """

    def __init__(self, timing: Timing, surroundings: Surroundings, *, dead_letter: bool) -> None:
        self.book = HoldBook(surroundings.metrics)
        self.holds: HoldSet = NO_HOLDS
        longest_rest = longest_rest_of(timing)
        self.parking = Parking(
            timing.io_error_backoff / 10,
            longest_rest,
            now,
            # They stay in their lanes: what they take is not there for the others.
            most_probes=max(1, timing.max_in_flight_records // 4),
            most_probe_bytes=timing.max_in_flight_bytes // 4,
        )
        self._waits = Waits(surroundings.metrics, self.parking, longest_rest)
        self._outage_fades_after = timing.delivery_timeout + longest_rest
        self._backoff = timing.io_error_backoff
        self._with = surroundings
        self._dead_letter = dead_letter
        self._withdrawals = Withdrawals()
        self._suspects: deque[StoredRecord] = deque()
        self._told = -1
        self._condemned: list[tuple[NewHold, Who | None]] = []
        self._writing: Future[HoldSet] | None = None
        self._being_written: list[tuple[NewHold, Who | None]] = []
        self._write_not_before = 0.0

    # -- failures

    def judge(self, failures: Iterable[Failure], lanes: Lanes) -> list[StoredRecord]:
        """Take in failed deliveries; return the records that go back to the table."""
        dropped: list[StoredRecord] = []
        for failure in failures:
            record, verdict = failure.record, failure.verdict
            if verdict is Verdict.RECORD and not failure.alone:
                self._suspects.append(record)
            elif verdict in (Verdict.RECORD, Verdict.FORBIDDEN) and self.book.is_kept:
                self._condemn(failure)
                dropped += self._withdraw(record, lanes)
            elif verdict is Verdict.RECORD:
                self._say_once(failure)
                self.parking.rest(record, failure.error.str())
                dropped += self._withdraw(record, lanes)
            else:
                dropped += self._park(failure, verdict, lanes)
        return dropped

    def _say_once(self, failure: Failure) -> None:
        if failure.record[_ID] != self._told:
            self._told = failure.record[_ID]
            _log.warning(
                "record %d for topic %s: %s; it is tried again, with rests in between",
                failure.record[_ID],
                failure.record[_TOPIC],
                failure.error.str(),
            )

    def _condemn(self, failure: Failure) -> None:
        hold = new_hold(failure, self._with.grant_write, dead_letter=self._dead_letter)
        who = None if hold.record_id is None else who_is(failure.record)
        if who is not None:
            self._withdrawals.hold(who)
        elif any(hold.topic == other.topic and other.record_id is None for other, _ in self._condemned):
            return
        self._condemned.append((hold, who))

    def _withdraw(self, record: StoredRecord, lanes: Lanes) -> list[StoredRecord]:
        self.parking.give_up_probe(record)
        dropped = lanes.withdraw(record)
        self._withdrawals.reset(dropped)
        return dropped

    def _withdraw_followers(self, record: StoredRecord, lanes: Lanes) -> list[StoredRecord]:
        """What waits behind a probe waits in the table: its key is parked, and its lane is kept by the probe alone."""
        dropped = lanes.withdraw_followers(record)
        self._withdrawals.reset(dropped)
        return dropped

    def _park(self, failure: Failure, verdict: Verdict, lanes: Lanes) -> list[StoredRecord]:
        record, topic = failure.record, failure.record[_TOPIC]
        place = place_of(failure, verdict)
        is_new = place not in self.parking
        is_probe = self.parking.failed(record, place, unreachable=verdict is Verdict.RETRY, why=failure.error.str())
        if verdict is Verdict.RETRY:
            self._with.kafka.began(f"record {record[_ID]} for topic {topic}: {failure.error.str()}")
        elif is_new:
            what = f"topic {topic}" if place[1] is None else f"record {record[_ID]} for topic {topic}"
            _log.warning("%s: %s; it is tried again, with rests in between", what, failure.error.str())
        dropped = self._withdraw_followers(record, lanes) if is_probe else self._withdraw(record, lanes)
        if place[1] is None and is_new:
            unsent = lanes.withdraw_unsent(lambda other: other[_TOPIC] == topic)
            self._withdrawals.reset(unsent)
            dropped += unsent
        return dropped

    def succeeded(self, delivered: Sequence[StoredRecord]) -> None:
        """These records arrived."""
        if self.parking:
            for topic, part in self.parking.succeeded(delivered):
                _log.info("records for %s arrive again", topic if part is None else f"{topic}, {part}")

    # -- sending again

    def due_in(self) -> float:
        """Seconds until something is to be sent again, or a hold to be written."""
        due = float("inf") if self.parking.next_due is None else self.parking.next_due - now()
        if self._condemned and self._writing is None:
            due = min(due, self._write_not_before - now())
        return 0.0 if self._suspects else max(0.0, due)

    @property
    def has_due(self) -> bool:
        """True if something must be sent again now."""
        return bool(self._suspects) or self.parking.has_due_probe

    def take(self) -> list[StoredRecord]:
        """Records to send again now, alone."""
        self._waits.look()
        if not self.parking.is_unreachable:
            self._with.kafka.faded(self._outage_fades_after)  # what failed is held or gone, or fails of something else
        if not self._suspects and not self.parking:
            return []
        suspects = list(self._suspects)
        self._suspects.clear()
        return [*suspects, *self.parking.due()]

    def forget(self) -> None:
        """The leadership is over: what waits in memory goes back to the table."""
        self._waits.over()

    def put_back(self, records: Iterable[StoredRecord]) -> None:
        """Records of `take` that could not be sent."""
        for record in records:
            if not self.parking.not_sent(record):
                self._suspects.append(record)

    def give_up(self) -> list[StoredRecord]:
        """Before everything is marked again: the records that are under way in their lanes and not in flight."""
        waiting = [*self._suspects, *self.parking.take_probes()]
        self._suspects.clear()
        return waiting

    def refreshed(self) -> None:
        """Nothing carries the old leader ID any more: nothing is on its way back."""
        self._withdrawals = Withdrawals()

    # -- marks

    def exclusion(self) -> Exclusion:
        """What the next mark must leave out; it is sent now."""
        self._withdrawals.mark_begins()
        withdrawn, parking = self._withdrawals, self.parking
        return Exclusion(withdrawn.lanes | parking.lanes, withdrawn.ids | parking.ids, parking.topics)

    def learn(self, holds: HoldSet, lanes: Lanes) -> list[StoredRecord]:
        """Hear what is held now; return what has to go back to the table."""
        if holds is self.holds:
            return []
        self.holds = holds
        if not holds:
            return []
        dropped = lanes.withdraw_unsent(holds.covers)
        self._withdrawals.reset(dropped)
        for record in [*self._suspects, *self.parking.waiting_probes()]:
            if holds.covers(record):
                dropped += self._withdraw(record, lanes)
        self._suspects = deque(record for record in self._suspects if not holds.covers(record))
        return dropped

    def sift(self, records: Sequence[StoredRecord]) -> tuple[Sequence[StoredRecord], list[StoredRecord]]:
        """What of a mark's records may be sent, and what has to go back to the table."""
        if not self.holds and not self._withdrawals and not self.parking:
            return records, []
        covers, is_caught, parking = self.holds.covers, self._withdrawals.is_caught, self.parking
        back = [record for record in records if covers(record) or is_caught(record) or who_is(record) in parking]
        if not back:
            return records, []
        self._withdrawals.reset(back)
        ids = {record[_ID] for record in back}
        return [record for record in records if record[_ID] not in ids], back

    def reset_done(self, ids: Iterable[int]) -> None:
        """The marks of these rows are cleared."""
        if self._withdrawals:
            self._withdrawals.reset_done(ids)

    # -- writing holds

    @property
    def is_writing(self) -> bool:
        """Whether holds are still to be written."""
        return bool(self._condemned or self._writing)

    def start_writing(self) -> None:
        """Begin to write the holds that are due."""
        if self._writing is not None or not self._condemned or now() < self._write_not_before:
            return
        self._being_written, self._condemned = self._condemned, []
        holds = [hold for hold, _ in self._being_written]
        book = self.book

        def write(store: OutboxStore) -> HoldSet:
            return book.write(store, holds)

        self._writing = self._with.marker.submit(write)

    def collect_written(self, lanes: Lanes) -> list[StoredRecord]:
        """See whether holds have been written; return what has to go back to the table because of them."""
        if self._writing is None or not self._writing.done():
            return []
        writing, self._writing = self._writing, None
        written, self._being_written = self._being_written, []
        try:
            holds = writing.result()
        except StoreUnavailable as error:
            self._with.database.began(error)
            self._write_not_before = now() + self._backoff
            self._condemned = written + self._condemned
            return []
        for _, who in written:
            if who is not None:
                self._withdrawals.hold_done(who)
        return self.learn(holds, lanes)


def place_of(failure: Failure, verdict: Verdict) -> Place:
    """What is closed by a failure that may pass."""
    topic, partition = failure.record[_TOPIC], failure.partition
    if verdict in (Verdict.AWAY, Verdict.FORBIDDEN):
        return topic, None
    if partition is None:
        return topic, (topic, str(failure.record[_KEY] or failure.record[_ID]))  # nobody else is concerned
    return topic, partition if partition >= 0 else None
