"""One term of exactly-once delivery; its rules are in `outbox_core.harvest.exactly_once.terms`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

from outbox_core.election.lease import now
from outbox_core.errors import must
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.handler import Letters, split_letters
from outbox_core.harvest.failures.holds import nothing_waits
from outbox_core.harvest.polling import PollSchedule
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.steps import BEGIN, DELETE, PUBLISH, PURGE, SCAN, WRITE
from outbox_core.harvest.store_calls import LeadershipWait, StoreCall
from outbox_core.harvest.watermark import Evidence, ScanPlan
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.kafka.identity import Failpoint, TransactionalIdentity
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import RecordProducer, Reports
from outbox_core.kafka.refusals import too_large_for
from outbox_core.kafka.tracking import Ledger, opening_key
from outbox_core.kafka.transactions import Aborted, Committed, Ended, Outcome
from outbox_core.stores.interface import (
    HoldSet,
    LaneKey,
    OutboxStore,
    RowId,
    RowQuery,
    StoredRecord,
    bytes_of,
    ids_and_times,
    lane_of,
)

if TYPE_CHECKING:
    from outbox_core.harvest.exactly_once.terms import ExactlyOnce  # which runs terms

_log = logging.getLogger(__name__)

_id_of, _topic_of = attrgetter("id"), attrgetter("topic")
# Plain tuples equal to RowIds, made several times as fast.
_row_id_of = cast("Callable[[StoredRecord], RowId]", attrgetter("id", "create_time"))
_IDLE_SECONDS = 1.0
_QUIET_SECONDS = 10.0
# Others wait while a destination is tried again: not for long, unless Kafka is slow for all, or there are no others.
_PATIENCE_SECONDS, _LONGEST_PATIENCE_SECONDS = 1.0, 4.0


class _Scan(NamedTuple):
    records: Sequence[StoredRecord]
    evidence: Evidence | None
    took: float
    holds: HoldSet
    letters: Letters


class Scanned(NamedTuple):
    """The records of a scan that may be published; `is_all` if it returned no row at all, neither failed nor held."""

    records: list[StoredRecord]
    took: float = 0.0
    is_all: bool = False


class Term:
    """The time of one producer, from fencing its predecessor to its own end. Used once, by the harvest thread."""

    def __init__(self, leadership: ExactlyOnce, ctx: HarvestContext, transactions: TransactionalIdentity) -> None:
        self.committed = False
        self._leadership = leadership
        self._ctx = ctx
        self._wait = LeadershipWait(leadership.over, ctx)
        self._transactions = transactions
        self._batch: Sequence[StoredRecord] = ()  # scanned, and not committed
        self._activity = ctx.metrics.activity
        self._activity.duty.dropped(DELETE)  # those of the last term are settled by the manifest
        self._unpurged: Sequence[StoredRecord] = ()  # published, and their purge is not committed
        self._has_told_of_missing = False  # of rows, to be purged, that were gone
        self._purge: StoreCall[int] = StoreCall(ctx.purger, ctx, PURGE)
        self._scan: StoreCall[_Scan] = StoreCall(ctx.marker, ctx, SCAN)
        self._plan: ScanPlan | None = None  # of the scan under way; None if that reads a dead letter
        self._schedule = PollSchedule(ctx.limits.mark_backoff, ctx.commits, now)
        self._failures = leadership.failures
        # The last transaction tried destinations again, had a dead letter alone, or ended the producer, perhaps by one
        # of these: others come before the next try, or would wait for as long as each try ends a term.
        self._owes_batch = self._failures.batch.ends > 0
        self._server = ""  # ID of the database server
        self._ledger = Ledger()  # what the tracking topic says
        self._was_at = -1  # the last manifest but one
        self._over_since: float | None = None
        self._patience = _PATIENCE_SECONDS  # with the next try

    def run(self) -> Ended | None:
        """Run until the leadership is over (None) or the producer is of no more use."""
        self._ctx.watermark.reset("a new term")
        self._activity.tries_to(BEGIN)
        producer = self._transactions.new_producer()
        producer.step = self._activity.step
        try:
            return self._run(producer)
        finally:
            producer.discard()

    def _run(self, producer: RecordProducer) -> Ended | None:
        over = self._leadership.over
        recovery = Recovery(self._transactions, over, self._ctx)
        ended = recovery.settle(producer)
        if ended is None:
            self._activity.duty.succeeded(BEGIN)
            self._server, self._ledger = recovery.server_id(), recovery.ledger
            if not self._leadership.marks_are_settled:  # no other marks meanwhile, and the search reads the whole table
                recovery.refuse_marks()
                self._leadership.marks_are_settled = True
            self._ctx.has_begun.set()
            self._failures.read_holds()
        while ended is None and not over():
            ended = self._turn(producer)
        self._join_scan()
        self._purge_is_committed(now() + self._ctx.limits.drain_timeout)
        return None if over() else ended

    def _turn(self, producer: RecordProducer) -> Ended | None:
        """Run one transaction, if any: of the next rows, or, every other time, of rows that are tried again."""
        if not self._owes_batch:
            rows = self._failures.rows_to_try()
            records = self._failures.read_again(rows) if rows else []
            if records:
                self._owes_batch = True
                return self._try_again(producer, records)
        records = self._next_batch()
        return self._publish(producer, records) if records else None

    # -- scan

    def _next_batch(self) -> list[StoredRecord]:
        self._purge_is_committed(now())
        if not self._scan.is_running:
            self._wait.pause(min(_IDLE_SECONDS, self._schedule.due_in(), self._failures.due_in()))
            self._failures.read_holds_if_stale()
            if self._schedule.due_in() or self._leadership.over():
                self._owes_batch = False
                return []
            self._start_scan()
        scanned = self._collect_scan()
        records = scanned.records
        if records:
            self._schedule.found_rows(more=True)  # the transaction between this scan and the next is pause enough
            self._take_in_flight(records)
            self._transactions.reached(Failpoint.AFTER_SCAN)
        else:
            self._schedule.found_none(scanned.took)
            self._ctx.count_published(0)
            if scanned.is_all:
                self._failures.found_none()
                if not self._failures.batch.ends:
                    self._ctx.kafka.expire_after(_QUIET_SECONDS)  # nothing is there to be committed
                if not self._failures.backoffs:
                    self._has_settled(Aborted(None, record_at_fault=False))
                self._check_drained()
        return records

    @property
    def _in_flight(self) -> list[StoredRecord]:
        """The records that are scanned, and whose purge is not committed: scans exclude their rows."""
        return [*self._unpurged, *self._batch]

    def _take_in_flight(self, records: Sequence[StoredRecord]) -> None:
        self._batch = records
        rows = self._in_flight
        if len(set(map(_id_of, rows))) < len(rows):  # ids come back: only with their create times they tell rows apart
            again = len(rows) - len(set(map(_row_id_of, rows)))
            must(not again, "a scan must return no row in flight, and none twice; %d of %d were", again, len(records))

    def _start_scan(self) -> None:
        failures, limit = self._failures, self._failures.batch.limit
        lanes, rows, topics = failures.exclusion()
        # a copy: as it is before the statement begins
        excluded: list[StoredRecord | RowId] = [*self._in_flight, *rows]
        letters = [] if limit == 1 and self._owes_batch else failures.letters_to_read(excluded)
        if letters and limit == 1:  # a batch of one is what finds the bad ones
            self._start_reading_letter(letters)
            return
        # Passed to the statement as they are known now: a release that becomes known later counts for the next one.
        hold_cache, holds = failures.hold_cache, failures.holds
        plan = self._ctx.watermark.plan(frozenset(lanes | rows | topics | holds.items))
        most = max(1, limit - len(letters)), self._ctx.limits.mark_query_bytes
        query = RowQuery(*most, plan.floor, lanes, excluded, topics, holds)
        self._plan = plan

        def scan(store: OutboxStore) -> _Scan:
            evidence = plan.gather(store)
            began = now()
            records = store.scan(query)
            took = now() - began
            self._ctx.metrics.mark_took(took)
            current = hold_cache.current_or_reread(store, records) if records or holds else holds
            return _Scan(records, evidence, took, current, failures.read_letters(store, letters, current))

        self._schedule.poll_starts()
        self._scan.start(scan)

    def _start_reading_letter(self, letters: list[int]) -> None:
        failures, hold_cache = self._failures, self._failures.hold_cache
        self._plan = None

        def read(store: OutboxStore) -> _Scan:
            current = hold_cache.current_or_reread(store)
            return _Scan((), None, 0.0, current, failures.read_letters(store, letters, current))

        self._schedule.poll_starts()
        self._scan.start(read)

    def _collect_scan(self) -> Scanned:
        if not self._wait.until_done(self._scan):
            self._scan.abandon()
            return Scanned([])
        result = self._wait.result(self._scan)
        if result is None:
            return Scanned([])
        records, evidence, took, holds, letters = result
        plan = self._plan
        self._owes_batch = plan is None
        if plan is not None:
            self._ctx.watermark.scanned(plan, evidence, records, took)
        admissible = self._failures.admissible(records, holds)
        if letters.records:
            admissible = sorted([*admissible, *self._failures.sendable(letters)], key=_id_of)
        return Scanned(admissible, took, is_all=not records and plan is not None)

    def _join_scan(self) -> None:
        if self._scan.is_running:
            self._wait.until_done(self._scan, now() + self._ctx.limits.drain_timeout)
            self._scan.abandon()

    def _check_drained(self) -> None:
        if self._leadership.drain and not self._failures.is_busy and self._purge_is_committed(None):
            self._leadership.drained = bool(self._wait.retry_until_done(self._ctx.marker, nothing_waits))

    # -- publish

    def _publish(self, producer: RecordProducer, records: list[StoredRecord]) -> Ended | None:
        self._count_in_flight(len(records))
        began, failures = now(), self._failures
        is_full = len(records) >= failures.batch.limit or bytes_of(records) >= self._ctx.limits.mark_query_bytes
        self._refuse_too_large(records)  # before the next scan, which brings what is left out again
        if not records:
            self._count_in_flight(0)
            return None
        if is_full:
            # There is more: read it while this batch is published. A batch that was not full is another matter: what
            # is scanned now would leave out all that is committed while this batch is, which would then have to wait
            # for the transaction after the next.
            self._start_scan()
        reports = Reports() if failures.batch.is_searching else None
        outcome = self._fill(producer, records, reports) or self._commit(producer, records)
        return self._conclude(outcome, records, reports or Reports(), now() - began)

    def _conclude(
        self, outcome: Outcome, records: list[StoredRecord], reports: Reports, took: float, *, is_retry: bool = False
    ) -> Ended | None:
        self._count_in_flight(0)
        failures = self._failures
        if isinstance(outcome, Ended):
            if not (outcome.is_expiry or self._leadership.over()):
                failures.ended(outcome, records)
            return outcome
        self._has_settled(outcome)
        if isinstance(outcome, Committed):
            self._succeed(records, took)
            return self._look_at_ledger()
        self._discard(outcome)
        if is_retry or failures.batch.is_unbatched or not self._sizes_explain(outcome.error, records):
            failures.aborted(outcome, records, reports, took, is_retry=is_retry)
        return None

    def _has_settled(self, outcome: Committed | Aborted) -> None:
        """Note for the watch that Kafka has answered for a transaction, and if it took the records."""
        duty = self._activity.duty
        if isinstance(outcome, Committed):
            duty.succeeded(PUBLISH)
            duty.succeeded(WRITE)
            return
        duty.dropped(PUBLISH)
        # A known destination that is away is told apart (`REACH`); other refusals are about records or rights.
        may_be_ours = outcome.error is not None and kind_of(outcome.error) is ErrorKind.TRANSIENT
        if not may_be_ours or self._failures.backoffs:
            duty.dropped(WRITE)

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
            refused = [Failure(record, too_large_for(record), alone=True) for record in too_large]
            self._leave_out(records, refused, _without(records, too_large))

    def _leave_out(self, records: list[StoredRecord], refused: Sequence[Failure], kept: Sequence[StoredRecord]) -> None:
        """Hold refused records that are first of their keys: a hold keeps back those before them, too."""
        self._failures.batch.left_out(len(refused))
        lanes = {lane_of(record) for record in kept} - {None}
        self._failures.refused([failure for failure in refused if lane_of(failure.record) not in lanes])
        self._ctx.watermark.went_back(records)
        self._join_scan()  # it may have found others of their keys
        records[:] = kept
        self._batch = records

    def _fill(
        self, producer: RecordProducer, records: list[StoredRecord], reports: Reports | None
    ) -> Aborted | Ended | None:
        batches = self._ctx.batches
        batches.meet(set(map(_topic_of, records)))
        self._await_limits()
        self._activity.tries_to(PUBLISH, WRITE)
        producer.limit_batches(batches.limit, unbatched=self._failures.batch.is_unbatched)
        ended = self._begin(producer) or self._send_opening(producer, records)
        if ended is not None:
            return ended
        sent = producer.send(records, self._leadership.over, reports)
        if isinstance(sent, Ended):
            return sent
        self._transactions.reached(Failpoint.AFTER_PRODUCE)
        if sent is not None and sent.refused:
            self._leave_out(records, sent.refused, sent.records)
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
        manifest = Manifest(self._transactions.outbox, *ids_and_times(records), self._server)
        return producer.send_manifest(self._transactions.tracking_topic, manifest.encode())

    def _is_late(self) -> bool:
        """Return True once the leadership is over for so long that Kafka's answers are left to the next term."""
        if self._leadership.over():
            self._over_since = self._over_since or now()
            return now() - self._over_since >= self._ctx.limits.drain_timeout
        return False

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
        return self._end(producer)

    def _end(self, producer: RecordProducer) -> Outcome:
        outcome = producer.commit(self._is_late)
        if isinstance(outcome, Committed):
            self._was_at, self._ledger = self._ledger.offset, Ledger(offset=producer.manifest_offset)
        return outcome

    def _look_at_ledger(self) -> Ended | None:
        """End the term if the tracking topic was made anew meanwhile, by a broker perhaps: the next one checks it."""
        if 0 <= self._ledger.offset <= self._was_at:
            return Ended("the tracking topic was deleted and made anew; it is checked before the next transaction")
        return None

    def _succeed(self, records: list[StoredRecord], took: float) -> None:
        self._publication_is_committed(records)
        ordinary, letters = split_letters(records)
        if letters:
            self._ctx.metrics.dead_letters(len(letters))
        self._ctx.metrics.published(ordinary)
        self._ctx.metrics.publish_latency(took, len(ordinary))
        self._patience = max(_PATIENCE_SECONDS, 2 * took)
        self._failures.committed(records, took)
        self._ctx.count_published(len(ordinary))

    def _publication_is_committed(self, records: list[StoredRecord]) -> None:
        self._transactions.reached(Failpoint.COMMITTED)
        self._ctx.kafka.recovered()  # not before: a term that begins well may never commit anything
        self.committed = True
        self._batch, self._unpurged = (), records
        self._transactions.reached(Failpoint.BEFORE_PURGE)
        self._start_purge()

    def _discard(self, aborted: Aborted) -> None:
        """Forget an aborted transaction, and what was scanned meanwhile."""
        if aborted.error is not None:  # else it was our own choice
            self._ctx.metrics.publish_error()
        self._forget_scanned()

    def _sizes_explain(self, error: KafkaError | None, records: Sequence[StoredRecord]) -> bool:
        """Return True if a batch was too large, and smaller ones, or fewer records, can help."""
        if error is None or error.code() != KafkaError.MSG_SIZE_TOO_LARGE:
            return False
        batches = self._ctx.batches
        before = batches.limit
        batches.refused(set(map(_topic_of, records)))
        return batches.limit != before or bool(batches.too_large(records))

    def _forget_scanned(self) -> None:
        self._join_scan()
        self._ctx.watermark.went_back(self._batch)
        self._purge_is_committed(None)
        self._batch = ()

    # -- what is tried again

    def _try_again(self, producer: RecordProducer, records: list[StoredRecord]) -> Ended | None:
        """Publish a row of each destination that is due, and do not wait for long: it may still be away."""
        self._count_in_flight(len(records))
        self._batch = records
        began, reports = now(), Reports()
        outcome = self._fill(producer, records, reports) or self._commit_in_time(producer, records)
        return self._conclude(outcome, records, reports, now() - began, is_retry=True)

    def _commit_in_time(self, producer: RecordProducer, records: list[StoredRecord]) -> Outcome:
        if producer.all_arrive(self._patience, self._is_late):
            return self._commit(producer, records)
        self._patience = max(self._patience, min(2 * self._patience, _LONGEST_PATIENCE_SECONDS))
        failure = producer.failure
        aborted = producer.abort(failure, self._is_late)
        if failure is not None or isinstance(aborted, Ended) or self._leadership.over():
            return aborted
        return Aborted(KafkaError(KafkaError._MSG_TIMED_OUT, "not acknowledged in time"), record_at_fault=True)  # noqa: SLF001

    def _count_in_flight(self, count: int) -> None:
        self._leadership.in_flight_records = count
        self._ctx.metrics.in_flight(count)

    # -- purge

    def _start_purge(self, *, is_retry: bool = False) -> None:
        unpurged = self._unpurged
        rows, letters = split_letters(unpurged)

        def purge(store: OutboxStore) -> int:
            began = now()
            count = store.delete_published(*ids_and_times(rows)) if rows else 0
            if letters:
                count += store.holds.delete_dead_lettered(*ids_and_times(letters))
            self._ctx.metrics.purge_took(now() - began, count)
            if count < len(unpurged) and not is_retry:  # the first try may have deleted them, and its answer was lost
                self._tell_of_missing(len(unpurged) - count, unpurged)
            return count

        self._purge.start(purge)

    def _tell_of_missing(self, number: int, published: Sequence[StoredRecord]) -> None:
        """Log, once in a term, that published rows were gone before they were purged."""
        if self._has_told_of_missing:
            return
        self._has_told_of_missing = True
        ids = sorted(map(_id_of, published))
        _log.warning(
            "%d of %d published rows of %s (ids %d to %d) were not there to be deleted: somebody has deleted them, "
            "truncated the table or detached their partition. If they come back they are published again: delete "
            "what is published from a detached partition before it is attached",
            number,
            len(ids),
            self._transactions.outbox,
            ids[0],
            ids[-1],
        )

    def _purge_is_committed(self, give_up_at: float | None) -> bool:
        """Wait for the purge of the last batch, at most until a time, or for as long as the leadership lasts."""
        while self._unpurged:
            if not self._purge.is_running:
                self._start_purge(is_retry=True)
            elif not self._wait.until_done(self._purge, give_up_at):
                return False
            elif self._wait.result(self._purge) is not None:
                self._ctx.removal.recovered()
                self._unpurged = ()
                self._transactions.reached(Failpoint.AFTER_PURGE)
            elif self._leadership.over() or (give_up_at is not None and now() >= give_up_at):
                return False
        return True


def _without(records: Iterable[StoredRecord], refused: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Return the records without the refused ones and their followers."""
    gone = set(map(_id_of, refused))
    stopped: set[LaneKey] = set()
    kept = []
    for record in records:
        lane = lane_of(record)
        if record.id in gone:
            if lane is not None:
                stopped.add(lane)
        elif lane not in stopped:
            kept.append(record)
    return kept
