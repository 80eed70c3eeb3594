"""One term of exactly-once delivery; its rules are in `outbox_core.harvest.exactly_once.terms`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, cast

from outbox_core.election.lease import now
from outbox_core.errors import must
from outbox_core.harvest.at_least_once.lanes import without
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.denied_topics import DeniedTopics
from outbox_core.harvest.failures.failed_transactions import FailedTransactions
from outbox_core.harvest.failures.policy import too_large_for
from outbox_core.harvest.failures.suspect_topics import SuspectTopics
from outbox_core.harvest.failures.transactional_dead_letters import TransactionalDeadLetters
from outbox_core.harvest.polling import PollSchedule
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.store_calls import LeadershipWait, StoreCall
from outbox_core.harvest.watermark import Evidence, ScanPlan
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.identity import Failpoint, TransactionalIdentity
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.tracking import Ledger, opening_key
from outbox_core.kafka.transactions import Aborted, Committed, Ended, Outcome
from outbox_core.stores.interface import (
    NO_HOLDS,
    HoldSet,
    OutboxStore,
    RowId,
    RowQuery,
    StoredRecord,
    bytes_of,
    lane_of,
)

_topic_of = attrgetter("topic")
# Plain tuples equal to RowIds, made several times as fast.
_row_id_of = cast("Callable[[StoredRecord], RowId]", attrgetter("id", "create_time"))
_IDLE_SECONDS = 1.0
_QUIET_SECONDS = 10.0


_Scan = tuple[Sequence[StoredRecord], Evidence | None, float, HoldSet]


class Scanned(NamedTuple):
    """The records of a scan that may be published; `is_all` if it returned no row at all, neither failed nor held."""

    records: list[StoredRecord]
    took: float = 0.0
    is_all: bool = False


class _ScanRequest(NamedTuple):
    plan: ScanPlan | None = None
    excludes: bool = False
    holds: HoldSet = NO_HOLDS


class LeadershipOfTerm(Protocol):
    """A term's view of its leadership (`outbox_core.harvest.exactly_once.terms.ExactlyOnce`)."""

    drain: bool
    drained: bool
    in_flight_records: int
    marks_are_settled: bool
    dead_letters: TransactionalDeadLetters
    suspects: SuspectTopics

    def over(self) -> bool:
        """Return True if no more may be started."""

    def leads(self) -> bool:
        """Return True if the lease is valid now."""


class Term:
    """The time of one producer, from fencing its predecessor to its own end. Used once, by the harvest thread."""

    def __init__(
        self,
        leadership: LeadershipOfTerm,
        ctx: HarvestContext,
        transactions: TransactionalIdentity,
    ) -> None:
        self.committed = False
        self._leadership = leadership
        self._ctx = ctx
        self._wait = LeadershipWait(leadership.over, ctx)
        self._transactions = transactions
        self._in_flight: set[RowId] = set()  # scanned, and their purge is not committed: scans exclude them
        self._unpurged: list[RowId] = []  # published, and their purge is not committed
        self._are_dead_letters = False  # of the unpurged rows: then their holds are deleted, too
        self._purge: StoreCall[int] = StoreCall(ctx.purger, ctx)
        self._scan: StoreCall[_Scan] = StoreCall(ctx.marker, ctx)
        self._request = _ScanRequest()
        self._schedule = PollSchedule(ctx.limits.mark_backoff, ctx.commits, now)
        self._dead_letters = leadership.dead_letters
        self._suspects = leadership.suspects
        denied = DeniedTopics(ctx, transactions.tracking_topic)
        self._failures = FailedTransactions(ctx, self._wait, denied)
        self._owes_batch = False  # the last transaction was a retry, or of dead letters
        self._server = ""  # ID of the database server
        self._ledger = Ledger()  # what the tracking topic says
        self._over_since: float | None = None

    def run(self) -> Ended | None:
        """Run until the leadership is over (None) or the producer is of no more use."""
        self._ctx.watermark.reset("a new term")
        producer = self._transactions.new_producer()
        try:
            return self._run(producer)
        finally:
            producer.discard()
            self._failures.end()

    def _run(self, producer: RecordProducer) -> Ended | None:
        over = self._leadership.over
        recovery = Recovery(self._transactions, over, self._ctx)
        ended = recovery.check_topic() or recovery.settle(producer)
        if ended is None:
            self._server, self._ledger = recovery.server_id(), recovery.ledger
            self._refuse_marks(recovery)
            self._failures.read_holds()
            self._hold_guilty()
        while ended is None and not over():
            ended = self._turn(producer)
        self._join_scan()
        self._purge_is_committed(now() + self._ctx.limits.drain_timeout)
        return None if over() else ended

    def _hold_guilty(self) -> None:
        if self._suspects.guilty is not None and self._failures.hold_topic(*self._suspects.guilty):
            self._suspects.guilty_is_held()

    def _refuse_marks(self, recovery: Recovery) -> None:
        """Hold marked rows, once in a leadership: no other marks meanwhile, and the search reads the whole table."""
        if not self._leadership.marks_are_settled:
            recovery.refuse_marks()
            self._leadership.marks_are_settled = True

    def _turn(self, producer: RecordProducer) -> Ended | None:
        """Run one transaction, if any: of the next rows, or, every other time, a retry or dead letters."""
        failures = self._failures
        failures.collect_due_probes()
        if failures.must_retry:
            return self._retry(producer)
        if not self._owes_batch:
            self._owes_batch = True
            if failures.may_retry:
                return self._retry(producer)
            letters = self._dead_letters.next(failures.holds.requests)
            if letters:
                return self._publish_dead_letters(producer, letters)
        self._owes_batch = False
        records = self._next_batch()
        return self._publish(producer, records) if records else None

    # -- scan

    def _next_batch(self) -> list[StoredRecord]:
        self._purge_is_committed(now())
        if not self._scan.is_running:
            self._wait.pause(min(_IDLE_SECONDS, self._schedule.due_in(), self._due_in()))
            self._failures.read_holds_if_stale()
            if self._schedule.due_in() or self._leadership.over():
                return []
            self._start_scan()
        scanned = self._collect_scan()
        records = scanned.records
        if records:
            self._schedule.found_rows(more=True)  # the transaction between this scan and the next is pause enough
            self._take_in_flight(records)
            self._transactions.reached(Failpoint.AFTER_SCAN)
            self._failures.scanned(found=True)
        else:
            self._failures.scanned(found=False)
            self._schedule.found_none(scanned.took)
            self._ctx.count_published(0)
            if scanned.is_all:
                self._suspects.scan_found_none()
                if not self._suspects.is_failing:
                    self._ctx.kafka.expire_after(_QUIET_SECONDS)  # nothing is there to be committed
                self._check_drained()
        return records

    def _take_in_flight(self, records: Sequence[StoredRecord]) -> None:
        expected = len(self._in_flight) + len(records)
        self._in_flight.update(map(_row_id_of, records))
        again = expected - len(self._in_flight)
        must(not again, "a scan must return no row in flight, and none twice; %d of %d were", again, len(records))

    def _due_in(self) -> float:
        failures = self._failures
        return min(failures.due_in(), self._dead_letters.due_in(failures.holds.requests))

    def _start_scan(self) -> None:
        lanes, rows, topics = self._failures.exclusion()
        # a copy: the set as it is before the statement begins
        excluded = self._in_flight.union(rows)
        topics |= self._suspects.excluded
        # Passed to the statement as they are known now: a release that becomes known later counts for the next one.
        hold_cache, holds = self._failures.hold_cache, self._failures.holds
        plan = self._ctx.watermark.plan(frozenset(lanes | rows | topics | holds.items))
        limits = self._suspects.limit, self._ctx.limits.mark_query_bytes
        query = RowQuery(*limits, plan.floor, lanes, excluded, topics, holds)
        self._request = _ScanRequest(plan, bool(lanes or rows or topics), holds)

        def scan(store: OutboxStore) -> _Scan:
            evidence = plan.gather(store)
            began = now()
            records = store.scan(query)
            took = now() - began
            self._ctx.metrics.mark_took(took)
            current = hold_cache.current_or_reread(store, records) if records or holds else holds
            return records, evidence, took, current

        self._schedule.poll_starts()
        self._scan.start(scan)

    def _collect_scan(self) -> Scanned:
        if not self._scan.is_running:
            return Scanned([])
        if not self._wait.until_done(self._scan):
            self._scan.abandon()
            return Scanned([])
        result = self._wait.result(self._scan)
        if result is None:
            return Scanned([])
        records, evidence, took, holds = result
        if self._request.plan is not None:
            self._ctx.watermark.scanned(self._request.plan, evidence, records, took)
        return Scanned(self._failures.admissible(records, holds), took, not records)

    def _join_scan(self) -> None:
        if self._scan.is_running:
            self._wait.until_done(self._scan, now() + self._ctx.limits.drain_timeout)
            self._scan.abandon()

    def _check_drained(self) -> None:
        failures, request = self._failures, self._request
        if not self._leadership.drain or request.excludes or failures.is_busy or not self._purge_is_committed(None):
            return
        if failures.holds:  # then the rest is held, unless that has changed since the scan
            self._leadership.drained = failures.read_holds() and failures.holds is request.holds
        else:
            empty = self._wait.retry_until_done(self._ctx.marker, lambda store: store.is_empty())
            self._leadership.drained = bool(empty)

    # -- publish

    def _publish(self, producer: RecordProducer, records: list[StoredRecord]) -> Ended | None:
        self._count_in_flight(len(records))
        began = now()
        is_full = len(records) == self._suspects.limit or bytes_of(records) >= self._ctx.limits.mark_query_bytes
        self._refuse_too_large(records)  # before the next scan, which brings what is left out again
        if not records:
            self._count_in_flight(0)
            return None
        if is_full:
            # There is more: read it while this batch is published. A batch that was not full is another matter: what
            # is scanned now would leave out all that is committed while this batch is, which would then have to wait
            # for the transaction after the next.
            self._start_scan()
        outcome = self._fill(producer, records, self._failures.handle_refused) or self._commit(producer, records)
        self._count_in_flight(0)
        took = now() - began
        self._failures.spent_publishing(took)
        if isinstance(outcome, Ended):
            self._blame(outcome, records)
            return outcome
        if isinstance(outcome, Aborted):
            self._discard(outcome, records)
        elif records:
            self._succeed(records, took)
        return None

    def _blame(self, ended: Ended, records: Sequence[StoredRecord]) -> None:
        self._failures.hold_denied_topics(ended.cause, records)
        if not self._leadership.over():
            self._suspects.term_ended(records, ended.reason)

    def _fit_batches(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> None:
        batches = self._ctx.batches
        batches.meet(set(map(_topic_of, records)))
        self._await_limits()
        producer.limit_batches(batches.limit)

    def _await_limits(self) -> None:
        batches = self._ctx.batches
        while batches.are_awaited and not self._leadership.over():
            self._wait.pause(batches.await_seconds)

    def _refuse_too_large(self, records: list[StoredRecord]) -> None:
        batches = self._ctx.batches
        too_large = batches.too_large(records)
        if too_large:
            batches.ask_anew(set(map(_topic_of, too_large)))
            self._await_limits()
            too_large = batches.too_large(records)
        if too_large:
            kept = without(records, too_large)
            lanes = {lane_of(record) for record in kept} - {None}
            # Only the first of its key is held: a hold keeps back records before it, if they are not committed.
            first = [record for record in too_large if lane_of(record) not in lanes]
            self._failures.handle_refused([Failure(record, too_large_for(record), alone=True) for record in first])
            self._leave_out(records, kept)

    def _fill(
        self,
        producer: RecordProducer,
        records: list[StoredRecord],
        tell_refused: Callable[[Sequence[Failure]], None],
        failures: list[Failure] | None = None,
    ) -> Aborted | Ended | None:
        self._fit_batches(producer, records)
        ended = self._begin(producer) or self._send_opening(producer, records)
        if ended is not None:
            return ended
        sent = producer.send(records, self._leadership.over, failures)
        if isinstance(sent, Ended):
            return sent
        self._transactions.reached(Failpoint.AFTER_PRODUCE)
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
            [record.id for record in records],
            [record.create_time for record in records],
            self._server,
        )
        return producer.send_manifest(self._transactions.tracking_topic, manifest.encode())

    def _is_late(self) -> bool:
        """Return True once the leadership is over for so long that Kafka's answers are left to the next term."""
        if self._leadership.over():
            self._over_since = self._over_since or now()
            return now() - self._over_since >= self._ctx.limits.drain_timeout
        return False

    def _leave_out(self, records: list[StoredRecord], sent: Sequence[StoredRecord]) -> None:
        self._ctx.watermark.reset("records were left out of a transaction")
        self._in_flight.difference_update(set(map(_row_id_of, records)).difference(map(_row_id_of, sent)))
        records[:] = sent

    def _commit(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
        """Commit, once every record is in Kafka, and the last transaction's rows are out of the table."""
        if not producer.all_arrive(self._transactions.timeout, self._is_late):
            return producer.abort(producer.failure, self._is_late)
        if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
            return producer.abort(give_up=self._is_late)
        must(records == producer.sent, "a manifest must name the rows that were produced, and no others")
        # The manifest comes last: a torn transaction then has none, and recovery knows it by its opening.
        refused = self._send_manifest(producer, records)
        if refused is not None:
            return refused
        self._transactions.reached(Failpoint.BEFORE_COMMIT)
        unpurged = len(self._unpurged)
        must(not unpurged, "a commit must come after the purge of the last transaction; %d rows wait for it", unpurged)
        self._transactions.reached(Failpoint.COMMIT_SENT)
        outcome = producer.commit(self._is_late)
        if isinstance(outcome, Committed):
            self._ledger = Ledger(offset=producer.manifest_offset)
        return outcome

    def _succeed(self, records: list[StoredRecord], took: float) -> None:
        self._publication_is_committed(records, are_dead_letters=False)
        self._ctx.metrics.published(records)
        self._ctx.metrics.publish_latency(took, len(records))
        self._failures.succeeded(records)
        self._suspects.committed(records)
        self._ctx.count_published(len(records))

    def _publication_is_committed(self, records: list[StoredRecord], *, are_dead_letters: bool) -> None:
        self._transactions.reached(Failpoint.COMMITTED)
        self._ctx.kafka.recovered()  # not before: a term that begins well may never commit anything
        self.committed = True
        self._unpurged = list(map(_row_id_of, records))
        self._are_dead_letters = are_dead_letters
        self._transactions.reached(Failpoint.BEFORE_PURGE)
        self._start_purge()

    def _discard(self, aborted: Aborted, records: list[StoredRecord]) -> None:
        if aborted.error is not None and aborted.record_at_fault and not self._sizes_explain(aborted.error, records):
            self._failures.retry_later(records)
        self._forget_scanned()
        if aborted.error is not None:
            self._ctx.metrics.publish_error()
            if not aborted.record_at_fault:
                self._ctx.kafka.failed(aborted.error.str())
                self._wait.back_off(self._ctx.limits.io_error_backoff)

    def _sizes_explain(self, error: KafkaError, records: Sequence[StoredRecord]) -> bool:
        """Return True if a batch was too large, and smaller ones, or fewer records, can help."""
        if error.code() != KafkaError.MSG_SIZE_TOO_LARGE:
            return False
        batches = self._ctx.batches
        before = batches.limit
        batches.refused(set(map(_topic_of, records)))
        return batches.limit != before or bool(batches.too_large(records))

    def _forget_scanned(self) -> None:
        self._join_scan()
        self._ctx.watermark.reset("a transaction was aborted")
        self._purge_is_committed(None)
        self._in_flight = set(self._unpurged)

    # -- retries and dead letters

    def _retry(self, producer: RecordProducer) -> Ended | None:
        group, patience = self._failures.next_group()
        records = list(group)
        began = now()
        # Exactly these: scans must find those that were released.
        self._in_flight = {*self._unpurged, *map(_row_id_of, records)}
        if records:
            self._count_in_flight(len(records))
            failures: list[Failure] = []
            unfinished = self._fill(producer, records, self._failures.handle_refused, failures)
            outcome = unfinished or self._commit_in_time(producer, records, failures, patience)
            self._count_in_flight(0)
            if isinstance(outcome, Ended):
                self._blame(outcome, records)
                return outcome
            self._conclude(outcome, records, failures, now() - began)
        self._failures.spent_retrying(now() - began)
        return None

    def _commit_in_time(
        self,
        producer: RecordProducer,
        records: list[StoredRecord],
        failures: list[Failure],
        patience: float | None,
    ) -> Outcome:
        if patience is not None and not producer.all_arrive(patience, self._is_late):
            failure = producer.failure
            aborted = producer.abort(failure, self._is_late)
            if failure is not None or isinstance(aborted, Ended):
                return aborted
            return self._failures.timed_out(records, failures)
        return self._commit(producer, records)

    def _conclude(
        self, outcome: Committed | Aborted, records: list[StoredRecord], failures: list[Failure], took: float
    ) -> None:
        if isinstance(outcome, Committed):
            self._succeed(records, took)
            return
        if records:
            self._failures.handle(outcome, records, failures)
        self._forget_scanned()

    def _publish_dead_letters(self, producer: RecordProducer, letters: Sequence[StoredRecord]) -> Ended | None:
        records: list[StoredRecord] = list(letters)
        failures: list[Failure] = []
        self._in_flight.update(map(_row_id_of, records))
        unfinished = self._fill(producer, records, failures.extend, failures)
        outcome = unfinished or self._commit_in_time(producer, records, failures, self._dead_letters.patience)
        if isinstance(outcome, Committed):
            self._publication_is_committed(records, are_dead_letters=True)
            self._ctx.metrics.dead_letters(len(records))
        elif isinstance(outcome, Aborted):
            self._forget_scanned()
        self._dead_letters.concluded(records, failures, outcome)
        return outcome if isinstance(outcome, Ended) else None

    def _count_in_flight(self, count: int) -> None:
        self._leadership.in_flight_records = count
        self._ctx.metrics.in_flight(count)

    # -- purge

    def _start_purge(self) -> None:
        ids, create_times = [row for row, _ in self._unpurged], [create_time for _, create_time in self._unpurged]
        are_dead_letters = self._are_dead_letters

        def purge(store: OutboxStore) -> int:
            began = now()
            delete = store.holds.delete_dead_lettered if are_dead_letters else store.delete_published
            count = delete(ids, create_times)
            self._ctx.metrics.purge_took(now() - began, count)
            return count

        self._purge.start(purge)

    def _purge_is_committed(self, give_up_at: float | None) -> bool:
        """Wait for the purge of the last batch, at most until a time, or for as long as the leadership lasts."""
        while self._unpurged:
            if not self._purge.is_running:
                self._start_purge()
            elif not self._wait.until_done(self._purge, give_up_at):
                return False
            elif self._wait.result(self._purge) is not None:
                self._ctx.removal.recovered()
                self._in_flight.difference_update(self._unpurged)
                self._unpurged = []
                self._transactions.reached(Failpoint.AFTER_PURGE)
            elif self._leadership.over() or (give_up_at is not None and now() >= give_up_at):
                return False
        return True
