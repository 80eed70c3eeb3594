"""What exactly-once delivery does about records that make a transaction fail, and about what is held.

`trials` finds the record, `verdicts` sorts what its failure means:

    failed alone, with a code that a record may be to blame for --> held, or a dead letter (`letters`)
    the topic may not be written to, and Kafka confirms it ------> the topic is held
    the topic is not there --------------------------------------> the topic is parked (`parking`)
    a time-out --------------------------------------------------> what goes to that partition is parked

Holds are written before anything else is scanned for their keys: between the failure and the hold, the key is among
those that scans leave out, and what a scan under way brings of it is thrown away.

Trials and probes take a bounded share of the time while there is ordinary work, and all of it while there is none. Only
when too much is set aside, in records or in bytes, do trials go before everything else: it is in memory.

Belongs to the harvest thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from outbox_core.election.leadership import now
from outbox_core.harvest.bad_records import Exclusion, longest_rest_of, new_hold, place_of
from outbox_core.harvest.holding import HoldBook
from outbox_core.harvest.parking import Parking
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.rights import Rights
from outbox_core.harvest.surroundings import Surroundings, Timing
from outbox_core.harvest.transaction import Aborted
from outbox_core.harvest.trials import Group, Trials
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.harvest.waiting import Waiting
from outbox_core.harvest.waits import Waits
from outbox_core.harvest.withdrawals import Who, who_is
from outbox_core.kafka import KafkaError
from outbox_core.ports import NO_HOLDS, HoldSet, NewHold, StoredRecord

_log = logging.getLogger(__name__)

_ID: Final = 0
_TOPIC: Final = 1
# A probe holds up everything else for as long as it is waited for: not long, and not often.
_PROBE_PATIENCE_SECONDS = 1.0


class Culprits:
    """Suspects, bad records, and what is parked, of one term.

    Args:
        timing: limits.
        surroundings: what to work with.
        waiting: waits for statements.
        rights: tells where we may not write.
        dead_letter: whether bad records are to go to the dead-letter topic.

    Attributes:
        book: the holds; used on the marker's thread.
        holds: what is held, as far as the harvest thread has heard.
        is_idle: whether the last scan found nothing: then there is time for trials.
    """

    def __init__(
        self, timing: Timing, surroundings: Surroundings, waiting: Waiting, rights: Rights, *, dead_letter: bool
    ) -> None:
        self.book = HoldBook(surroundings.metrics)
        self.holds: HoldSet = NO_HOLDS
        self.is_idle = False
        self._with = surroundings
        self._waiting = waiting
        self._rights = rights
        self._dead_letter = dead_letter
        self._backoff = timing.io_error_backoff
        self._trials = Trials(4 * timing.mark_query_records, timing.mark_query_bytes)
        self._parking = Parking(timing.io_error_backoff / 10, longest_rest_of(timing), now)
        self._parking.may_open = 1  # what goes to it fails with its whole transaction
        self._waits = Waits(surroundings.metrics, self._parking, longest_rest_of(timing))
        self._probes: deque[StoredRecord] = deque()
        self._has_probed = False  # the last trial was of a probe
        self._since_scan: set[Who] = set()  # held or parked since the scan under way was sent
        self._told = -1

    # -- scans

    def exclusion(self) -> Exclusion:
        """What the next scan must leave out; it is sent now."""
        self._since_scan.clear()
        parking = self._parking
        return Exclusion(self._trials.lanes | parking.lanes, self.ids | parking.ids, parking.topics)

    @property
    def ids(self) -> set[int]:
        """Records that are in memory for a trial, or as probes."""
        return self._trials.ids | {probe[_ID] for probe in [*self._parking.probes, *self._probes]}

    def due_in(self) -> float:
        """Seconds until there is something to do here: read the holds, send a probe, go on with trials."""
        if self._trials or self._probes:
            return 0.0
        due = self.book.due_in() if self.holds else float("inf")
        probe_due = self._parking.next_due
        return max(0.0, due if probe_due is None else min(due, probe_due - now()))

    def read_holds(self) -> bool:
        """See what is held; return whether the leadership lasted for it."""
        read = self._waiting.insist(self._with.marker, self.book.read)
        self.holds = self.book.current
        return read is not None

    def is_still_held(self, before: HoldSet) -> bool:
        """Whether what is held now is what a scan was sent with: what that left out is held, and nothing else."""
        return self.read_holds() and self.holds is before

    def look_at_holds(self) -> None:
        """While the table brings nothing new, see whether something that is held is released."""
        if not self.holds or not self.book.is_old:
            return
        before = self.holds
        self.read_holds()
        if self.holds is not before:
            self._with.news.tell()

    def sift(self, records: Sequence[StoredRecord], holds: HoldSet) -> list[StoredRecord]:
        """What of a scan's records may be published."""
        self.holds = holds
        if not holds and not self._since_scan:
            return list(records)
        since = self._since_scan
        kept = [record for record in records if not holds.covers(record) and who_is(record) not in since]
        if len(kept) < len(records):
            self._with.floor.reset("records that were read are held")
        return kept

    # -- trials

    @property
    def is_busy(self) -> bool:
        """Whether anything is still to be tried or buried."""
        return bool(self._trials or self._parking or self._probes or self.holds.requests)

    @property
    def is_trial_urgent(self) -> bool:
        """Whether so much is set aside that groups are to be tried before anything else is read."""
        return self._trials.are_too_many

    @property
    def is_trial_due(self) -> bool:
        """Whether a group, or a probe, may be tried now."""
        return bool(self._probes or self._trials) and (self.is_idle or self._trials.have_time)

    def call_probes(self) -> None:
        """See which probes are due."""
        if self._parking:
            self._probes.extend(self._parking.due())
        self._waits.look(self._trials.records)

    def forget(self) -> None:
        """The term is over: what waits in memory is read from the table again."""
        self._waits.over()

    def next_group(self) -> tuple[Group, float | None]:
        """What to try now, and how many seconds to wait for it; None to wait as for any transaction."""
        self._has_probed = bool(self._probes) and not (self._trials and (self._has_probed or self.is_trial_urgent))
        if self._has_probed:
            probe = self._probes.popleft()
            if self.holds.covers(probe):
                self._parking.give_up_probe(probe)
                self._with.floor.reset("a record that was tried again and again is held")
                return (), None
            return [probe], _PROBE_PATIENCE_SECONDS
        group = self._trials.next(self._is_kept_back)
        if self._trials.let_go:
            self._with.floor.reset("records of a failed transaction are held or parked meanwhile")
        return group, None

    def _is_kept_back(self, record: StoredRecord) -> bool:
        who = who_is(record)
        return self.holds.covers(record) or who in self._parking or record[_TOPIC] in self._parking.topics

    def set_aside(self, records: Sequence[StoredRecord]) -> None:
        """A transaction of these failed: they are tried again, by themselves."""
        self._trials.set_aside(list(records))

    def published(self, seconds: float) -> None:
        """So much time went into ordinary work."""
        self._trials.published(seconds)

    def tried(self, seconds: float) -> None:
        """So much time went into a trial."""
        self._trials.tried(seconds)

    def found(self, *, anything: bool) -> None:
        """Take note of whether a scan has brought anything."""
        self.is_idle = not anything
        if self.is_idle:
            self._parking.may_open = 1

    def succeeded(self, records: Sequence[StoredRecord]) -> None:
        """These records are published."""
        self._parking.may_open = 1
        for topic, part in self._parking.succeeded(records) if self._parking else ():
            _log.info("records for %s arrive again", topic if part is None else f"{topic}, {part}")
        self._with.kafka.worked(all_of_it=not self._parking.is_unreachable)

    def was_too_slow(self, records: Sequence[StoredRecord], failures: list[Failure]) -> Aborted:
        """A probe did not arrive in time, which says as much as a time-out."""
        error = KafkaError(KafkaError._MSG_TIMED_OUT, "not acknowledged in time")  # noqa: SLF001
        if not failures:
            failures += [Failure(record, error, partition=-1) for record in records]
        return Aborted(failures[0].error, record_at_fault=True)

    def judge(self, aborted: Aborted, group: Sequence[StoredRecord], failures: list[Failure]) -> None:
        """A trial failed.

        Args:
            aborted: how the transaction ended.
            group: the records that were in it.
            failures: what delivery reports said.
        """
        if aborted.error is None:  # our own choice
            self._put_back(group)
            return
        self._with.metrics.publish_error()
        if not failures and not aborted.record_at_fault:  # it is about the cluster, and not about the group
            self._with.kafka.began(aborted.error.str())
            self._put_back(group)
            self._waiting.rest(self._backoff)
            return
        if not failures and len(group) == 1:
            failures = [Failure(group[0], aborted.error, partition=-1)]
        about_record = [failure for failure in failures if failure.verdict is Verdict.RECORD]
        others = [failure for failure in failures if failure.verdict is not Verdict.RECORD]
        self._condemn_topics(failure for failure in others if failure.verdict is Verdict.FORBIDDEN)
        for failure in others:
            if failure.verdict is not Verdict.FORBIDDEN:
                self._park(failure)
        if len(group) == 1:
            self.condemn(about_record)
            return
        gone = {record[_ID]: record for record in group if self._is_kept_back(record)}
        self._trials.drop(gone.values())
        rest = [record for record in group if record[_ID] not in gone]
        if gone and not about_record:
            self._trials.put_back(rest)
        elif rest:
            code = about_record[0].error.code() if about_record else aborted.error.code()
            named = {failure.record[_ID] for failure in about_record}
            if len(rest) == 1:
                self._trials.put_back(rest)
            else:
                self._trials.failed(rest, named, code)

    def _put_back(self, group: Sequence[StoredRecord]) -> None:
        """A trial said nothing about these: they are tried again.

        A probe stays one. As a group it would be left out of the trials, because its key is parked, and its place would
        wait for it for ever.
        """
        self._trials.put_back([record for record in group if not self._parking.not_sent(record)])

    def _park(self, failure: Failure) -> None:
        record, verdict = failure.record, failure.verdict
        place = place_of(failure, verdict)
        is_new = place not in self._parking
        is_probe = self._parking.failed(record, place, unreachable=verdict is Verdict.RETRY, why=failure.error.str())
        if not is_probe:
            self._trials.drop([record])
        self._since_scan.add(who_is(record))
        if verdict is Verdict.RETRY:
            self._with.kafka.began(f"record {record[_ID]} for topic {record[_TOPIC]}: {failure.error.str()}")
        elif is_new:
            what = f"topic {record[_TOPIC]}" if place[1] is None else f"record {record[_ID]} for topic {record[_TOPIC]}"
            _log.warning("%s: %s; it is tried again, with rests in between", what, failure.error.str())

    # -- holds

    def refused(self, failures: Sequence[Failure]) -> None:
        """The client refused these: no other record is to blame for that."""
        about_record = [failure for failure in failures if failure.verdict is Verdict.RECORD]
        self.condemn(about_record)
        for failure in failures:
            if failure.verdict is not Verdict.RECORD:
                self._park(failure)

    def blame_topics(self, cause: KafkaError | None, records: Sequence[StoredRecord]) -> None:
        """A transaction ended its producer because we may not write to a topic: see which one, and hold it.

        Raises:
            TrackingTopicError: if it is the tracking topic.
        """
        if cause is not None and verdict_on(cause) is Verdict.FORBIDDEN:
            self._hold_topics({record[_TOPIC]: Failure(record, cause, alone=True) for record in reversed(records)})

    def condemn(self, failures: Sequence[Failure]) -> None:
        """These records failed alone: hold them, and know it before anything else is scanned."""
        if not failures:
            return
        self._with.metrics.publish_error(len(failures))
        for failure in failures:
            self._trials.refused(failure.record, failure.error.code())
        self._trials.drop(failure.record for failure in failures)
        if not self.book.is_kept:
            for failure in failures:
                self._rest(failure)
            return
        for failure in failures:
            self._parking.give_up_probe(failure.record)
        self._since_scan.update(who_is(failure.record) for failure in failures)
        self._write([new_hold(failure, self._with.grant_write, dead_letter=self._dead_letter) for failure in failures])

    def _rest(self, failure: Failure) -> None:
        """Without a table of holds: the record is tried again and again."""
        record = failure.record
        if record[_ID] != self._told:
            self._told = record[_ID]
            what = f"record {record[_ID]} for topic {record[_TOPIC]}"
            _log.warning("%s: %s; it is tried again, with rests in between", what, failure.error.str())
        self._parking.rest(record, failure.error.str())
        self._since_scan.add(who_is(record))

    def _condemn_topics(self, failures: Iterable[Failure]) -> None:
        """We may not write to one of these records' topics: hold it if Kafka says so, let it rest if it does not."""
        refused = list(failures)
        by_topic = {failure.record[_TOPIC]: failure for failure in refused}
        if by_topic:
            held = self._hold_topics(by_topic)
            for topic in by_topic.keys() - held:
                self._park(by_topic[topic])
            for failure in refused:
                if failure.record[_TOPIC] in held:  # else the place would wait for its probe, long after the release
                    self._parking.give_up_probe(failure.record)

    def _hold_topics(self, by_topic: Mapping[str, Failure]) -> set[str]:
        """Hold those of the topics to which we may not write; return which ones are held."""
        missing = self._rights.missing_for(set(by_topic))
        if not missing or not self.book.is_kept:
            return set()
        self._write([new_hold(by_topic[topic], self._with.grant_write, dead_letter=False) for topic in sorted(missing)])
        return missing

    def hold_topic(self, topic: str, why: str) -> bool:
        """Hold a topic whose records end the producer; return whether that is done."""
        if not self.book.is_kept:
            _log.error(
                "records for topic %s end every term (%s); without a table of holds it cannot be held", topic, why
            )
            return False
        _log.error("topic %s is held: records for it, and for no other topic, end every term: %s", topic, why)
        self._write([NewHold(topic, None, None, "ends the producer", why)])
        return True

    def _write(self, holds: Sequence[NewHold]) -> None:
        book = self.book
        written = self._waiting.insist(self._with.marker, lambda store: book.write(store, holds))
        if written is not None:
            self.holds = written


def too_large_for(record: StoredRecord) -> KafkaError:
    """The error of a record that its topic is known not to take."""
    return KafkaError(
        KafkaError.MSG_SIZE_TOO_LARGE, f"too large for the max.message.bytes of topic {record[_TOPIC]}: it was not sent"
    )
