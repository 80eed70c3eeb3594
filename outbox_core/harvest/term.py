"""One term of exactly-once delivery; its rules are in `outbox_core.harvest.exactly_once`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import itemgetter
from typing import Final, NamedTuple, Protocol

from outbox_core.election.leadership import now
from outbox_core.events import MeterRead
from outbox_core.harvest.culprits import Culprits, too_large_for
from outbox_core.harvest.floor import Look, Reading
from outbox_core.harvest.lanes import lane_of, without
from outbox_core.harvest.letters import Letters
from outbox_core.harvest.manifest import Manifest, Opening
from outbox_core.harvest.pace import Pace
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.record_producer import RecordProducer
from outbox_core.harvest.recovery import Recovery, Step, Transactions
from outbox_core.harvest.rights import Rights
from outbox_core.harvest.surroundings import DeadLetters, Surroundings, Timing
from outbox_core.harvest.suspicion import Suspicion
from outbox_core.harvest.tracking import Ledger, opening_key
from outbox_core.harvest.transaction import Aborted, Committed, Ended, Outcome
from outbox_core.harvest.waiting import Waiting
from outbox_core.kafka import KafkaError
from outbox_core.ports import NO_HOLDS, HoldSet, OutboxStore, StoredRecord, bytes_of

_ID: Final = 0
_CREATE_TIME: Final = 7
_topic_of = itemgetter(1)
_IDLE_SECONDS = 1.0
_QUIET_SECONDS = 10.0


class Scanned(NamedTuple):
    """What came of a scan.

    Attributes:
        records: those that may be published.
        took: how long the statement took, in seconds.
        is_all: whether the statement brought no row at all; false if it failed, or if all that it brought is held.
        holds: the holds that it was sent with.
    """

    records: list[StoredRecord]
    took: float = 0.0
    is_all: bool = False
    holds: HoldSet = NO_HOLDS


class LeadershipOfTerm(Protocol):
    """What a term knows of its leadership (`outbox_core.harvest.exactly_once.ExactlyOnce`)."""

    drain: bool
    drained: bool
    in_flight_records: int
    marks_are_settled: bool
    letters: Letters
    suspicion: Suspicion

    def over(self) -> bool:
        """Whether nothing more is to be begun."""

    def leads(self) -> bool:
        """Whether the lease is valid now."""


class Term:
    """One producer's time, from fencing its predecessor to its own end. Used once, by the harvest thread.

    Args:
        leadership: whose term it is.
        timing: limits.
        surroundings: what to work with.
        transactions: what to publish with.
        dead_letters: where bad records go.

    Attributes:
        committed: whether any of its transactions was committed.
    """

    def __init__(
        self,
        leadership: LeadershipOfTerm,
        timing: Timing,
        surroundings: Surroundings,
        transactions: Transactions,
        dead_letters: DeadLetters,
    ) -> None:
        self.committed = False
        self._leadership = leadership
        self._timing = timing
        self._with = surroundings
        self._waiting = Waiting(leadership.over, timing, surroundings)
        self._transactions = transactions
        self._in_flight: set[int] = set()  # scanned, and their purge is not committed: what a scan must exclude
        self._unpurged: list[tuple[int, int]] = []  # (id, create time): published, and their purge is not committed
        self._are_buried = False  # those were dead letters: their holds go with them
        self._purging: Future[int] | None = None
        self._scanning: Future[tuple[Sequence[StoredRecord], Look | None, float, HoldSet]] | None = None
        self._reading: Reading | None = None
        self._scan_excludes = False
        self._scan_holds: HoldSet = NO_HOLDS
        self._pace = Pace(timing.mark_backoff, surroundings.news, now)
        self._letters = leadership.letters
        self._suspicion = leadership.suspicion
        rights = Rights(dead_letters, transactions.tracking_topic, surroundings.grant_write)
        self._culprits = Culprits(timing, surroundings, self._waiting, rights, dead_letter=dead_letters.on_poison)
        self._owes_batch = False  # the last transaction was a trial, or of dead letters
        self._server = ""  # ID of the database server
        self._ledger = Ledger()  # what the tracking topic says
        self._over_since: float | None = None

    def run(self) -> Ended | None:
        """Run until the leadership is over (None) or the producer is of no more use.

        Raises:
            OutboxError: if going on could repeat or lose a record.
        """
        self._with.floor.reset("a new term")
        producer = self._transactions.new_producer()
        try:
            return self._run(producer)
        finally:
            producer.discard()
            self._culprits.forget()

    def _run(self, producer: RecordProducer) -> Ended | None:
        over = self._leadership.over
        recovery = Recovery(self._transactions, over, self._timing, self._with)
        ended = recovery.check_topic() or recovery.settle(producer)
        if ended is None:
            self._server, self._ledger = recovery.server_id(), recovery.ledger
            self._refuse_marks(recovery)
            self._culprits.read_holds()
            self._hold_guilty()
        while ended is None and not over():
            ended = self._turn(producer)
        self._join_scan()
        self._purge_is_committed(now() + self._timing.drain_timeout)
        return None if over() else ended

    def _hold_guilty(self) -> None:
        if self._suspicion.guilty is not None and self._culprits.hold_topic(*self._suspicion.guilty):
            self._suspicion.held()

    def _refuse_marks(self, recovery: Recovery) -> None:
        """Once in a leadership: while it lasts nobody else marks, and to look for marks is to read the whole table."""
        if not self._leadership.marks_are_settled:
            recovery.refuse_marks()
            self._leadership.marks_are_settled = True

    def _turn(self, producer: RecordProducer) -> Ended | None:
        """One transaction, if there is anything to publish: the next rows; every other time a trial or dead letters."""
        culprits = self._culprits
        culprits.call_probes()
        if culprits.is_trial_urgent:
            return self._try(producer)
        if not self._owes_batch:
            self._owes_batch = True
            if culprits.is_trial_due:
                return self._try(producer)
            letters = self._letters.next(culprits.holds.requests)
            if letters:
                return self._bury(producer, letters)
        self._owes_batch = False
        records = self._next_batch()
        return self._publish(producer, records) if records else None

    # -- scan

    def _next_batch(self) -> list[StoredRecord]:
        """The next rows to publish, or none if there were none just now."""
        self._purge_is_committed(now())
        if self._scanning is None:
            self._waiting.pause(min(_IDLE_SECONDS, self._pace.due_in(), self._due_in()))
            self._culprits.look_at_holds()
            if self._pace.due_in() or self._leadership.over():
                return []
            self._start_scan()
        scanned = self._collect_scan()
        records = scanned.records
        if records:
            self._pace.found(more=True)  # a transaction lies between this scan and the next: that is pause enough
            self._in_flight.update(record[_ID] for record in records)
            self._transactions.reached(Step.AFTER_SCAN)
            self._culprits.found(anything=True)
        else:
            self._culprits.found(anything=False)
            self._pace.found_nothing(scanned.took)
            if scanned.is_all:
                self._suspicion.found_nothing()
                if not self._suspicion.is_failing:
                    self._with.kafka.faded(_QUIET_SECONDS)  # nothing is there to be committed
                self._look_whether_drained(scanned.holds)
        return records

    def _due_in(self) -> float:
        """Seconds until there is something to do beside the next rows."""
        culprits = self._culprits
        return min(culprits.due_in(), self._letters.due_in(culprits.holds.requests))

    def _start_scan(self) -> None:
        """Send a scan that excludes what is in flight now: the set is copied before the statement begins."""
        lanes, identities, topics = self._culprits.exclusion()
        excluded = self._in_flight.union(identities)
        topics |= self._suspicion.left_out
        limit, max_bytes = self._suspicion.limit, self._timing.mark_query_bytes
        self._scan_excludes = bool(lanes or identities or topics)
        # Passed to the statement as they are known now: a release that becomes known later counts for the next one.
        book, holds = self._culprits.book, self._culprits.holds
        self._scan_holds = holds
        reading = self._reading = self._with.floor.begin(frozenset(lanes | identities | topics | holds.items))

        def scan(store: OutboxStore) -> tuple[Sequence[StoredRecord], Look | None, float, HoldSet]:
            look = reading.look(store)
            began = now()
            records = store.scan(
                limit, excluded, lanes, reading.floor, max_bytes=max_bytes, holds=holds.with_topics(topics)
            )
            took = now() - began
            self._with.metrics.mark_took(took)
            return records, look, took, book.look_after(store, records) if records or holds else holds

        self._pace.begin()
        self._scanning = self._with.marker.submit(scan)

    def _collect_scan(self) -> Scanned:
        scanning, self._scanning = self._scanning, None
        if scanning is None or not self._waiting.until_done(scanning):
            return Scanned([])
        result = self._waiting.result(scanning)
        if result is None:
            return Scanned([])
        records, look, took, holds = result
        if self._reading is not None:
            self._with.floor.ended(self._reading, look, records, took)
        return Scanned(self._culprits.sift(records, holds), took, not records, self._scan_holds)

    def _join_scan(self) -> None:
        """Wait for the scan under way and throw its rows away."""
        scanning, self._scanning = self._scanning, None
        if scanning is not None:
            self._waiting.until_done(scanning, now() + self._timing.drain_timeout)

    def _look_whether_drained(self, scanned_with: HoldSet) -> None:
        """After a scan that brought nothing: whether nothing is left but what is held."""
        culprits = self._culprits
        if not self._leadership.drain or self._scan_excludes or culprits.is_busy or not self._purge_is_committed(None):
            return
        if culprits.holds:
            self._leadership.drained = culprits.is_still_held(scanned_with)
            return
        self._leadership.drained = bool(self._waiting.insist(self._with.marker, lambda store: store.is_empty()))

    # -- publish

    def _publish(self, producer: RecordProducer, records: list[StoredRecord]) -> Ended | None:
        """One transaction. Returns `Ended` if the producer is of no more use."""
        self._count_in_flight(len(records))
        began = now()
        is_full = len(records) == self._suspicion.limit or bytes_of(records) >= self._timing.mark_query_bytes
        self._refuse_too_large(records)  # before the next scan, which brings what is left out again
        if not records:
            self._count_in_flight(0)
            return None
        if is_full:
            # There is more: read it while this batch is published. A batch that was not full is another matter: what
            # is scanned now would leave out all that is committed while this batch is, which would then have to wait
            # for the transaction after the next.
            self._start_scan()
        outcome = self._fill(producer, records, self._culprits.refused) or self._commit(producer, records)
        self._count_in_flight(0)
        took = now() - began
        self._culprits.published(took)
        if isinstance(outcome, Ended):
            self._blame(outcome, records)
            return outcome
        if isinstance(outcome, Aborted):
            self._discard(outcome, records)
        elif records:
            self._succeed(records, took)
        return None

    def _blame(self, ended: Ended, records: Sequence[StoredRecord]) -> None:
        """The term ended in the middle of a transaction of these records: that may be what they are to blame for."""
        self._culprits.blame_topics(ended.cause, records)
        if not self._leadership.over():
            self._suspicion.ended(records, ended.reason)

    def _fit_batches(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> None:
        """Have the next transaction's batches be such as all topics in use take."""
        batches = self._with.batches
        batches.meet(set(map(_topic_of, records)))
        self._await_limits()
        producer.limit_batches(batches.limit)

    def _await_limits(self) -> None:
        batches = self._with.batches
        while batches.are_awaited and not self._leadership.over():
            self._waiting.pause(batches.await_seconds)

    def _refuse_too_large(self, records: list[StoredRecord]) -> None:
        """Leave out what is known to be too large for its topic, so that it does not cost a transaction.

        It is held once it is the first of its key: a hold keeps back what comes before it, if that is not committed.
        """
        batches = self._with.batches
        too_large = batches.too_large(records)
        if too_large:
            batches.ask_anew(set(map(_topic_of, too_large)))
            self._await_limits()
            too_large = batches.too_large(records)
        if too_large:
            kept = without(records, too_large)
            lanes = {lane_of(record) for record in kept} - {None}
            first = [record for record in too_large if lane_of(record) not in lanes]
            self._culprits.refused([Failure(record, too_large_for(record), alone=True) for record in first])
            self._leave_out(records, kept)

    def _fill(
        self,
        producer: RecordProducer,
        records: list[StoredRecord],
        tell_refused: Callable[[Sequence[Failure]], None],
        failures: list[Failure] | None = None,
    ) -> Aborted | Ended | None:
        """Open a transaction and put the records into it.

        Args:
            producer: of the term.
            records: is left with those that are in the transaction.
            tell_refused: called with those that the client refused: alone, by nature; the transaction goes on.
            failures: where to note what delivery reports say; without it there are none.
        """
        self._fit_batches(producer, records)
        ended = self._begin(producer) or self._send_opening(producer, records)
        if ended is not None:
            return ended
        sent = producer.send(records, self._leadership.over, failures)
        if isinstance(sent, Ended):
            return sent
        self._transactions.reached(Step.AFTER_PRODUCE)
        if sent is not None and sent.refused:
            tell_refused(sent.refused)
            self._leave_out(records, sent.records)
        if sent is None or not records or not self._leadership.leads():
            return producer.abort(give_up=self._is_late)
        return None

    def _begin(self, producer: RecordProducer) -> Ended | None:
        """Open a transaction, in an epoch in which no request can be late (R13 of docs/explanation-exactly-once.md)."""
        give_up_at = now() + self._transactions.timeout
        return self._transactions.begin(producer, self._ledger, lambda: self._leadership.over() or now() > give_up_at)

    def _send_opening(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Ended | None:
        """Put the tracking partition into the transaction with its first record (R14)."""
        transactions = self._transactions
        opening = Opening.of(transactions.outbox, self._server, records)
        key = opening_key(transactions.transactional_id)
        return producer.send_manifest(transactions.tracking_topic, opening.encode(), key=key)

    def _send_manifest(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Ended | None:
        manifest = Manifest(
            self._transactions.outbox,
            [record[_ID] for record in records],
            [record[_CREATE_TIME] for record in records],
            self._server,
        )
        return producer.send_manifest(self._transactions.tracking_topic, manifest.encode())

    def _is_late(self) -> bool:
        """Whether the leadership is over for so long that Kafka's answers are left to the next term."""
        if self._leadership.over():
            self._over_since = self._over_since or now()
            return now() - self._over_since >= self._timing.drain_timeout
        return False

    def _leave_out(self, records: list[StoredRecord], sent: Sequence[StoredRecord]) -> None:
        self._with.floor.reset("records were left out of a transaction")
        kept = {record[_ID] for record in sent}
        self._in_flight.difference_update(record[_ID] for record in records if record[_ID] not in kept)
        records[:] = sent

    def _commit(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
        """Commit, once every record is in Kafka, and what the last transaction published is out of the table.

        The manifest comes last: a torn transaction then has none, and recovery knows it by its opening.
        """
        if not producer.all_arrive(self._transactions.timeout, self._is_late):
            return producer.abort(producer.failure, self._is_late)
        if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
            return producer.abort(give_up=self._is_late)
        refused = self._send_manifest(producer, records)
        if refused is not None:
            return refused
        self._transactions.reached(Step.BEFORE_COMMIT)
        self._transactions.reached(Step.COMMIT_SENT)
        outcome = producer.commit(self._is_late)
        if isinstance(outcome, Committed):
            self._ledger = Ledger(offset=producer.manifest_offset)
        return outcome

    def _succeed(self, records: list[StoredRecord], took: float) -> None:
        self._publication_is_committed(records, are_buried=False)
        self._with.metrics.published(len(records))
        self._with.metrics.publish_latency(took, len(records))
        self._culprits.succeeded(records)
        self._suspicion.committed(records)
        stats = self._with.meter.add(len(records))
        if stats is not None:
            self._with.emit(MeterRead(stats))

    def _publication_is_committed(self, records: list[StoredRecord], *, are_buried: bool) -> None:
        self._transactions.reached(Step.COMMITTED)
        self._with.kafka.ended()  # not before: a term that begins well may never commit anything
        self.committed = True
        self._unpurged = [(record[_ID], record[_CREATE_TIME]) for record in records]
        self._are_buried = are_buried
        self._transactions.reached(Step.BEFORE_PURGE)
        self._start_purge()

    def _discard(self, aborted: Aborted, records: list[StoredRecord]) -> None:
        """After an abort: forget what was scanned and not published, and look for the record that is to blame."""
        if aborted.error is not None and aborted.record_at_fault and not self._sizes_explain(aborted.error, records):
            self._culprits.set_aside(records)
        self._forget_scanned()
        if aborted.error is not None:
            self._with.metrics.publish_error()
            if not aborted.record_at_fault:
                self._with.kafka.began(aborted.error.str())
                self._waiting.rest(self._timing.io_error_backoff)

    def _sizes_explain(self, error: KafkaError, records: Sequence[StoredRecord]) -> bool:
        """Whether a batch was too large, and it is known how to go on: with smaller ones, or without some records."""
        if error.code() != KafkaError.MSG_SIZE_TOO_LARGE:
            return False
        batches = self._with.batches
        before = batches.limit
        batches.refused(set(map(_topic_of, records)))
        return batches.limit != before or bool(batches.too_large(records))

    def _forget_scanned(self) -> None:
        self._join_scan()
        self._with.floor.reset("a transaction was aborted")
        self._purge_is_committed(None)
        self._in_flight = self._not_purged()

    def _not_purged(self) -> set[int]:
        """Rows that are published and may still be in the table. What is set aside for trials every scan leaves out."""
        return {identity for identity, _ in self._unpurged}

    # -- trials and dead letters

    def _try(self, producer: RecordProducer) -> Ended | None:
        """A transaction of records one of which may be to blame for the failure of another transaction."""
        group, patience = self._culprits.next_group()
        records = list(group)
        began = now()
        # Exactly: those that were let go of are to be found again.
        self._in_flight = self._not_purged() | {record[_ID] for record in records}
        if records:
            self._count_in_flight(len(records))
            failures: list[Failure] = []
            unfinished = self._fill(producer, records, self._culprits.refused, failures)
            outcome = unfinished or self._commit_in_time(producer, records, failures, patience)
            self._count_in_flight(0)
            if isinstance(outcome, Ended):
                self._blame(outcome, records)
                return outcome
            self._conclude(outcome, records, failures, now() - began)
        self._culprits.tried(now() - began)
        return None

    def _commit_in_time(
        self,
        producer: RecordProducer,
        records: list[StoredRecord],
        failures: list[Failure],
        patience: float | None,
    ) -> Outcome:
        """Commit, but for what has not arrived within so many seconds; None to wait as for any transaction."""
        if patience is not None and not producer.all_arrive(patience, self._is_late):
            failure = producer.failure
            aborted = producer.abort(failure, self._is_late)
            if failure is not None or isinstance(aborted, Ended):
                return aborted
            return self._culprits.was_too_slow(records, failures)
        return self._commit(producer, records)

    def _conclude(
        self, outcome: Committed | Aborted, records: list[StoredRecord], failures: list[Failure], took: float
    ) -> None:
        if isinstance(outcome, Committed):
            self._succeed(records, took)
            return
        if records:
            self._culprits.judge(outcome, records, failures)
        self._forget_scanned()

    def _bury(self, producer: RecordProducer, letters: Sequence[StoredRecord]) -> Ended | None:
        """A transaction of dead letters."""
        records: list[StoredRecord] = list(letters)
        failures: list[Failure] = []
        self._in_flight.update(record[_ID] for record in records)
        unfinished = self._fill(producer, records, failures.extend, failures)
        outcome = unfinished or self._commit_in_time(producer, records, failures, self._letters.patience)
        if isinstance(outcome, Committed):
            self._publication_is_committed(records, are_buried=True)
            self._with.metrics.dead_letters(len(records))
        elif isinstance(outcome, Aborted):
            self._forget_scanned()
        self._letters.concluded(records, failures, outcome)
        return outcome if isinstance(outcome, Ended) else None

    def _count_in_flight(self, count: int) -> None:
        self._leadership.in_flight_records = count
        self._with.metrics.in_flight(count)

    # -- purge

    def _start_purge(self) -> None:
        ids = [identity for identity, _ in self._unpurged]
        create_times = [create_time for _, create_time in self._unpurged]

        are_buried = self._are_buried

        def purge(store: OutboxStore) -> int:
            began = now()
            count = (store.bury if are_buried else store.settle)(ids, create_times)
            self._with.metrics.purge_took(now() - began)
            return count

        self._purging = self._with.purger.submit(purge)

    def _purge_is_committed(self, give_up_at: float | None) -> bool:
        """Wait for the purge of the last published batch; repeat it for as long as the database is away.

        Args:
            give_up_at: when to return False; None for as long as the leadership lasts.
        """
        while self._unpurged:
            if self._purging is None:
                self._start_purge()
            elif not self._waiting.until_done(self._purging, give_up_at):
                return False
            else:
                purging, self._purging = self._purging, None
                if self._waiting.result(purging) is None:
                    if self._leadership.over() or (give_up_at is not None and now() >= give_up_at):
                        return False
                    continue
                self._with.removal.ended()
                self._in_flight.difference_update(identity for identity, _ in self._unpurged)
                self._unpurged = []
                self._transactions.reached(Step.AFTER_PURGE)
        return True
