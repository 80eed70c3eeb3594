"""Mark-purge/reset: publish the outbox in causal order, at least once (seed 000).

An `AtLeastOnce` lives as long as one leadership, on the harvest thread; only its statements run elsewhere, on the two
threads that own a store each.

    outbox table --mark--> lanes --send--> Kafka --acknowledgement--> purge --> the lane moves on
                   ^                                  failure ------> reset --> force remark
                   '--------------------------------------------------------------'

- **Mark.** One statement claims and returns the earliest rows without our leader ID, from the head of the table (or
  from an id below which no row can appear, `watermark`). So the next mark finds a later commit with a lower id, and
  a dead leader's rows, without a recovery branch. If it returns a row of our lanes, or one that was purged since it
  began, another leader marked it in between: force remark, or it would be published again after its followers.
- **Send.** At most one record of a key is under way (`lanes`). The lease is checked before each 50 sends, and must
  have at least `delivery_timeout` left (`send_window`): the producer gives up a record before the lease it was
  sent under can end, so a successor never meets the sends of its predecessor.
- **Purge.** Acknowledged rows are deleted where they still carry our leader ID. Fewer than asked means that another
  leader has marked them since: no lane moves, and everything is marked again.
- **Reset.** A failed delivery concerns its own key, its partition or its topic (`failures`): their rows lose our leader
  ID and are left out of the marks for a while, or held. All others flow. What is tried again is marked by its rows
  alone, and sent in batches of one record; so are dead letters, which are not marked.
- **Force remark**, where more is in doubt: release all records that are not yet sent, let those in flight finish under
  the old leader ID, take a new one (`LeaderRefreshed`), and mark again from the head.
- **Unknown outcomes.** A mark that the connection did not survive may have marked rows unknown to us, and after a
  failover rows that were purged may be back with our mark: force remark when the marker's connection is lost. A purge
  that it did not survive is repeated; if the first one did happen, the second deletes fewer rows than asked.

A leadership that ends sends no more, waits for the records in flight (bounded by `delivery_timeout`; once the lease is
over they are cancelled), purges the acknowledged ones and clears its marks from the others. The next leadership starts
only then, so the lanes' promise holds across leaderships of one process too.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from operator import add, attrgetter
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from outbox_core.election.lease import now
from outbox_core.errors import OutboxError, RowsHeld, StoreUnavailable
from outbox_core.events import LeaderRefreshed
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.at_least_once.publisher import ProducerLimits, Publisher
from outbox_core.harvest.at_least_once.send_window import CHECK_EVERY_SECONDS
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.failed_deliveries import FailedDeliveries
from outbox_core.harvest.failures.handler import NO_LETTERS, Letters
from outbox_core.harvest.failures.holds import nothing_waits
from outbox_core.harvest.failures.policy import Decision, decide
from outbox_core.harvest.polling import PollSchedule
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.steps import LOOK, MARK, PURGE
from outbox_core.harvest.store_calls import LeadershipWait, StoreCall
from outbox_core.harvest.watermark import Evidence, ScanPlan
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.messages import Failure
from outbox_core.printable import plural
from outbox_core.stores.interface import (
    NO_FLOOR,
    HoldSet,
    MarkedBatch,
    MarkedRows,
    OutboxStore,
    RowId,
    RowQuery,
    StoredRecord,
    bytes_of,
    ids_and_times,
    row_id,
)

_log = logging.getLogger(__name__)

_id_of, _topic_of = attrgetter("id"), attrgetter("topic")
_NOTHING_MARKED: Final = MarkedBatch(0, ())
_SEND_CHUNK = 500
_SENT_AT_ONCE = 50  # between two looks at the lease: less than a millisecond
_IDLE_SECONDS = 1.0
_TICK_SECONDS = 0.001
_REPORTS_LATE_SECONDS = 2.0  # librdkafka looks for messages that are too old once a second
_FIRST_RIVALS_BACKOFF_SECONDS = 0.05
_LONGEST_RIVALS_BACKOFF_SECONDS = 5.0
_LOOK_FOR_LOST_EVERY_SECONDS = 60.0
_NEVER = float("inf")


class _MarkRequest(NamedTuple):
    """The mark under way: of the head of the table, or of `rows` to try (and `letters`)."""

    limit: int = 0
    plan: ScanPlan | None = None
    rows: Sequence[RowId] = ()
    letters: Sequence[int] = ()


class _Marked(NamedTuple):
    batch: MarkedBatch
    holds: HoldSet
    evidence: Evidence | None = None
    took: float = 0.0
    letters: Letters = NO_LETTERS
    lost: MarkedRows | None = None


class _Rows(NamedTuple):
    """Rows to delete, and rows whose marks must be cleared."""

    purge: list[StoredRecord]
    reset: list[RowId]


class AtLeastOnce:
    """The mark-purge/reset of one leadership. Marks carry `leader_id`, which a remark replaces."""

    def __init__(
        self,
        leader_id: UUID,
        ctx: HarvestContext,
        publisher: Publisher,
        transactions: TransactionalIdentity,
        *,
        drain: bool = False,
    ) -> None:
        self.leader_id = leader_id
        self.drained = False
        self._leadership_id = leader_id
        self._ctx = ctx
        self._publisher = publisher
        self._transactions = transactions
        self._drain = drain
        self._stopping = False
        self._lanes = Lanes(ctx.limits.lane_capacity)
        self._failures = FailedDeliveries(ctx)
        self._remark = False
        self._mark: StoreCall[_Marked] = StoreCall(ctx.marker, ctx, MARK)
        self._request = _MarkRequest()
        self._schedule = PollSchedule(ctx.limits.mark_backoff, ctx.commits, now)
        self._rivals_backoff = 0.0
        self._look_for_lost_at = _NEVER  # until a mark from the head has succeeded
        self._looked_for_lost_at = now()  # or when this loop was made
        self._settle: StoreCall[bool] = StoreCall(ctx.purger, ctx, PURGE)
        self._being_settled = _Rows([], [])
        self._to_settle = _Rows([], [])

    @property
    def in_flight_records(self) -> int:
        """Records sent and not yet acknowledged."""
        return self._publisher.in_flight

    def stop(self) -> None:
        """Ask `run` to finish the records in flight and return. From any thread."""
        self._stopping = True
        self._ctx.wake.set()

    def run(self) -> None:
        """Harvest until the leadership ends, `stop` is called or, when draining, the table is empty."""
        self._ctx.watermark.reset("a new leader ID")
        Recovery(self._transactions, self._over, self._ctx).settle_if_tracked()
        try:
            self._harvest()
            self._finish()
        except BaseException:
            self._publisher.cancel_all()  # the next leader must not meet our sends
            raise
        finally:
            self._failures.end()
            self._ctx.send_window.leadership_ends()

    def _harvest(self) -> None:
        while True:
            self._ctx.wake.clear()  # before anything is looked at, so that no change is missed
            if self._over():
                return
            self._collect_mark()
            self._collect_settled()
            self._failures.update()
            sent_all = True
            if self._remark:
                self._refresh_when_quiet()
            else:
                sent_all = self._send()
                self._start_mark()
            self._start_settling()
            if not self.drained:
                self._wait(self._patience() if sent_all else 0.0)
            self._collect_reports()

    def _over(self) -> bool:
        return self._stopping or self.drained or not self._leads()

    def _leads(self) -> bool:
        leadership = self._ctx.elector.leadership
        return leadership is not None and leadership.leader_id == self._leadership_id and now() < leadership.deadline

    # -- mark

    def _room(self) -> int:
        """Return the limit of the next mark; 0 while only a small batch fits: it costs much the same as a large one."""
        limits = self._ctx.limits
        if limits.max_in_flight_bytes - self._lanes.held_bytes < limits.mark_query_bytes and self._lanes.held:
            return 0
        limit = min(limits.mark_query_records, limits.max_in_flight_records - self._lanes.held)
        return limit if limit >= min(limits.mark_query_records, max(1, limits.max_in_flight_records // 2)) else 0

    def _start_mark(self) -> None:
        failures = self._failures
        if self._over() or self._mark.is_running or failures.is_holding:
            return  # rows that are marked after the lease are taken from the successor
        failures.start_holding(self._lanes)
        if not failures.may_mark or not self._mark.can_start or self._is_blocked():
            return
        rows, letters = failures.rows_to_try(self._lanes)
        limit = 0 if self._schedule.due_in() else self._room()
        was_tried = self._request.rows or self._request.letters
        if (rows or letters) and not (limit and was_tried):  # in turns
            self._start_trying(rows, letters)
        elif limit:
            self._start_marking(limit)

    def _is_blocked(self) -> bool:
        """Return True while what is published cannot be deleted: marks would only publish more of the same."""
        return self._ctx.removal.is_ongoing and (bool(self._to_settle.purge) or self._settle.is_running)

    def _start_trying(self, rows: list[RowId], letters: list[int]) -> None:
        failures, holds, leader_id = self._failures, self._failures.holds, self.leader_id
        ids = [*letters, *(row.id for row in rows if row.id in holds.requests)]
        self._request = _MarkRequest(len(rows), rows=rows, letters=letters)
        query = RowQuery(len(rows), self._ctx.limits.mark_query_bytes, holds=holds, only_rows=rows)
        self._lanes.mark_starts()

        def mark(store: OutboxStore) -> _Marked:
            found = failures.read_letters(store, ids, holds)
            batch = self._marked_by(store, leader_id, query) if rows else _NOTHING_MARKED
            return _Marked(batch, self._holds_after(store, batch), letters=found)

        self._mark.start(mark)

    def _start_marking(self, limit: int) -> None:
        lanes, rows, topics = self._failures.exclusion(self._lanes)
        # Passed to the statement as they are known now: a release that becomes known later counts for the next one.
        holds = self._failures.holds
        plan = self._ctx.watermark.plan(frozenset(lanes | rows | topics | holds.items))
        self._request = _MarkRequest(limit, plan)
        query = RowQuery(limit, self._ctx.limits.mark_query_bytes, plan.floor, lanes, rows, topics, holds)
        leader_id = self.leader_id
        self._lanes.mark_starts()
        if plan.floor is NO_FLOOR and now() >= self._look_for_lost_at:
            self._start_looking_for_lost(query)
            return

        def mark(store: OutboxStore) -> _Marked:
            evidence = plan.gather(store)
            began = now()
            batch = self._marked_by(store, leader_id, query)
            took = now() - began
            self._ctx.metrics.mark_took(took)
            after = self._holds_after(store, batch) if batch.records or holds else holds
            return _Marked(batch, after, evidence, took)

        self._schedule.poll_starts()
        self._mark.start(mark)

    def _start_looking_for_lost(self, query: RowQuery) -> None:
        """Look for rows that carry our mark and are not in our hands, in place of a mark, which never returns them."""
        leader_id, known, holds = self.leader_id, self._lanes.marked_ids, query.holds
        self._request = _MarkRequest()
        self._look_for_lost_at = _NEVER
        self._looked_for_lost_at = now()

        def look(store: OutboxStore) -> _Marked:
            return _Marked(_NOTHING_MARKED, holds, lost=store.find_lost(leader_id, known, query))

        self._mark.start(look)

    def _see_lost(self, lost: MarkedRows) -> None:
        if lost.number and not self._remark:
            _log.warning(
                "%s of the outbox (ids %d to %d) carry the mark of this leadership, which does not know them: they "
                "were put back into the table with it, or a writer has set leader_id. All rows are marked anew",
                plural(lost.number, "row"),
                lost.first,
                lost.last,
            )
            self._force_remark()

    def _marked_by(self, store: OutboxStore, leader_id: UUID, query: RowQuery) -> MarkedBatch:
        try:
            return store.mark(leader_id, query)
        except RowsHeld:
            self._failures.hold_cache.invalidate()
            raise

    def _holds_after(self, store: OutboxStore, batch: MarkedBatch) -> HoldSet:
        try:
            return self._failures.hold_cache.current_or_reread(store, batch.records)
        except StoreUnavailable as error:  # rows may be marked, and the harvest thread does not know them
            raise StoreUnavailable(str(error), in_doubt=True) from error

    def _collect_mark(self) -> None:
        try:
            self._release(self._failures.collect_holds(self._lanes))
        except StoreUnavailable as error:
            self._remark_if_in_doubt(error)
        if not self._mark.is_done:
            return
        request, failures = self._request, self._failures
        try:
            marked = self._mark.result()
        except StoreUnavailable as error:
            self._schedule.retry_in(self._ctx.limits.io_error_backoff)
            self._remark_if_in_doubt(error)
            return
        if marked.lost is not None:
            self._see_lost(marked.lost)
            return
        self._release(failures.apply_holds(marked.holds, self._lanes))
        batch = marked.batch
        if request.plan is not None:
            self._see(request.plan, batch.records, request.limit, marked.took)
        is_ours_alone = batch.selected == len(batch.records) and not self._lanes.knows_any(batch.records)
        if request.limit and (self._remark or not is_ours_alone):
            self._to_settle.reset.extend(map(row_id, batch.records))
            self._force_remark()
            self._leave_room_for_rivals()
        elif request.plan is not None:
            self._ctx.watermark.scanned(request.plan, marked.evidence, batch.records, marked.took)
            self._admit(batch.records)
            if not batch.records:
                self._check_drained()
        elif (request.rows or request.letters) and not self._remark:
            rows, letters = failures.take_in_tried(request.rows, request.letters, batch.records, marked.letters)
            others = [record for record in batch.records if row_id(record) not in failures.tried]
            self._release(self._lanes.turn_away(others))
            self._admit(rows)
            self._ctx.batches.meet(set(map(_topic_of, letters)))
            self._release(self._lanes.admit(letters))

    def _see(self, plan: ScanPlan, records: Sequence[StoredRecord], limit: int, took: float) -> None:
        """Schedule the next mark by what the last one found, and the next look for lost rows."""
        if plan.floor is NO_FLOOR and self._look_for_lost_at == _NEVER:
            self._look_for_lost_at = self._looked_for_lost_at + _LOOK_FOR_LOST_EVERY_SECONDS
        if records:
            is_full = len(records) == limit or bytes_of(records) >= self._ctx.limits.mark_query_bytes
            self._schedule.found_rows(more=is_full)
        else:
            self._schedule.found_none(took)
            self._ctx.count_published(0)

    def _admit(self, records: Sequence[StoredRecord]) -> None:
        if records:
            self._ctx.batches.meet(set(map(_topic_of, records)))
            holds = self._failures.holds
            self._release(self._lanes.admit(records, holds.covers if holds else None))

    def _check_drained(self) -> None:
        if not self._drain or self._lanes.held or self._failures.backoffs:
            return
        check: StoreCall[bool] = StoreCall(self._ctx.marker, self._ctx, LOOK)
        check.start(nothing_waits)
        if not LeadershipWait(self._over, self._ctx).until_done(check):
            return
        try:
            self.drained = check.result()
        except StoreUnavailable as error:
            self._remark_if_in_doubt(error)

    # -- send

    def _send(self) -> bool:
        """Send some of the ready records; return False if more can be sent at once."""
        if self._ctx.batches.are_awaited:
            return True
        if not self._publisher.fit(self._limits()):
            self._note_unmade()
            return True
        limit = self._publisher.flight_limit
        room = limit.room(self._publisher.queued, self._lanes.mean_bytes)
        batch = self._lanes.take(min(_SEND_CHUNK, room))
        limit.is_reached = limit.is_reached or (len(batch) == room and self._lanes.has_ready)
        closes_at = self._closes_at(records_wait=bool(batch))
        sent = 0
        while sent < len(batch) and now() < closes_at and self._ctx.elector.leadership is not None:
            chunk = batch[sent : sent + _SENT_AT_ONCE]
            taken = self._hand_over(chunk)
            sent += taken
            if taken < len(chunk):
                self._note_unmade()
                break
        self._lanes.put_back(batch[sent:])
        return sent < len(batch) or sent == room or not self._lanes.has_ready

    def _note_unmade(self) -> None:
        if self._publisher.unmade:
            self._ctx.kafka.failed(f"no producer can be made: {self._publisher.unmade}")

    def _hand_over(self, records: list[StoredRecord]) -> int:
        """Hand records to the producer, those that are tried each alone; return how many it took."""
        tried, send, time = self._failures.tried, self._publisher.send, now()
        if not tried:
            return send(records, time)
        for taken, record in enumerate(records):
            if not send([record], time, alone=row_id(record) in tried):
                return taken
        return len(records)

    def _closes_at(self, *, records_wait: bool) -> float:
        """Return the time until which records may be sent under the present lease, 0.0 for not at all."""
        leadership, window = self._ctx.elector.leadership, self._ctx.send_window
        if leadership is None or leadership.leader_id != self._leadership_id:
            return 0.0
        # Asked once for a chunk: a lease is only ever extended, and the lease of a later leadership does not count.
        timeout = window.timeout  # that of the producer; an update may change the one of the next
        window.update(leadership.deadline - now(), records_wait=records_wait)
        return leadership.deadline - timeout

    def _limits(self) -> ProducerLimits:
        """Return the limits with which a producer fits all topics' batch sizes and the lease."""
        batch_bytes, timeout = self._ctx.batches.limit, self._ctx.send_window.timeout
        limits = {} if batch_bytes is None else {"batch.size": batch_bytes}
        if timeout != self._ctx.limits.delivery_timeout:
            limits["delivery.timeout.ms"] = max(1, int(timeout * 1000))
        return limits

    def _collect_reports(self) -> None:
        if self._publisher.delivered:
            self._succeed(self._publisher.take_delivered())
        if self._publisher.failed:
            self._fail(self._publisher.take_failed())
        self._ctx.metrics.in_flight(self._publisher.in_flight)

    def _succeed(self, delivered: list[StoredRecord]) -> None:
        ordinary = self._failures.succeeded(delivered)
        self._to_settle.purge.extend(ordinary)
        self._ctx.metrics.published(ordinary)
        arrived, sent = now(), self._publisher.take_send_times()
        for sent_at, count in sent:
            self._ctx.metrics.publish_latency(arrived - sent_at, count)
        publisher, timeout = self._publisher, self._ctx.send_window.timeout
        publisher.flight_limit.acknowledged(sent, arrived, publisher.queued, timeout)
        self._ctx.kafka.succeeded(all_of_it=not self._failures.backoffs.is_unreachable)
        self._ctx.count_published(len(ordinary))

    def _fail(self, failures: list[Failure]) -> None:
        if any(failure.error.code() == KafkaError._MSG_TIMED_OUT for failure in failures):  # noqa: SLF001  its public name
            number, timeout = len(failures) + self._publisher.in_flight, self._ctx.send_window.timeout
            self._publisher.flight_limit.timed_out(number, now(), timeout)
        broken = [each for each in failures if decide(each, alone=each.alone, can_hold=True) is Decision.REMARK]
        if self._over() or self._remark or broken or self._publisher.is_broken:
            # They were cancelled, are released anyhow, or failed with the producer.
            self._to_settle.reset.extend(row_id(record) for record, *_ in failures)
            self._force_remark()
        else:
            too_large = KafkaError.MSG_SIZE_TOO_LARGE  # of a batch, unless it was of one record
            self._ctx.batches.refused({f.record.topic for f in failures if f.error.code() == too_large and not f.alone})
            self._release(self._failures.handle(failures, self._lanes))
        if not self._over():
            self._ctx.metrics.publish_error(len(failures))
        if broken:
            self._ctx.kafka.failed(f"the producer has failed: {broken[0].error.str()}")

    def _release(self, records: Iterable[StoredRecord]) -> None:
        """Clear the marks of records that are in no lane any more."""
        released = list(records)
        if released:
            self._ctx.watermark.went_back(released)
            self._to_settle.reset.extend(map(row_id, released))
            self._failures.forget_tried(released)

    # -- purge and reset

    def _start_settling(self) -> None:
        self._failures.start_deleting()
        rows = self._to_settle
        if not any(rows) or not self._settle.can_start:
            return
        self._being_settled, self._to_settle = rows, _Rows([], [])
        leader_id, reset_ids = self.leader_id, list(map(_id_of, rows.reset))
        ids, create_times = ids_and_times(rows.purge)

        def settle(store: OutboxStore) -> bool:
            purged = 0
            if ids:
                began = now()
                purged = store.purge(leader_id, ids, create_times)
                self._ctx.metrics.purge_took(now() - began, purged)
            if reset_ids:
                store.reset(leader_id, reset_ids)
            return purged == len(ids)

        self._settle.start(settle)

    def _collect_settled(self) -> None:
        self._purged(self._failures.collect_deleted())
        if not self._settle.is_done:
            return
        settled, self._being_settled = self._being_settled, _Rows([], [])
        try:
            is_whole = self._settle.result()
        except StoreUnavailable:
            self._to_settle = _Rows(*map(add, settled, self._to_settle))
            return
        self._lanes.reset_done(settled.reset)
        if settled.purge:
            self._ctx.removal.recovered()
        if is_whole:
            if settled.purge:
                self._rivals_backoff /= 2
            self._purged(settled.purge)
        else:
            _log.info("not all of %s were purged: some carry another leader's mark", plural(len(settled.purge), "row"))
            self._force_remark()
            self._leave_room_for_rivals()

    def _purged(self, records: list[StoredRecord]) -> None:
        if records:
            self._lanes.purged(records)
            if self._drain and not self._lanes.held:
                self._ctx.commits.notify()  # the next mark tells if that was all

    def _leave_room_for_rivals(self) -> None:
        """Back off, as another leader (of another group perhaps) marks the same rows: both would send all of them."""
        longer = max(_FIRST_RIVALS_BACKOFF_SECONDS, 2 * self._rivals_backoff)
        self._rivals_backoff = min(_LONGEST_RIVALS_BACKOFF_SECONDS, longer)
        self._schedule.retry_in(self._rivals_backoff * random.uniform(0.5, 1.0))  # noqa: S311  jitter

    # -- remark

    def _force_remark(self) -> None:
        """Release all records that have not been sent, and send no more under this leader ID."""
        self._remark = True
        self._release(self._lanes.release_all())

    def _remark_if_in_doubt(self, error: StoreUnavailable) -> None:
        # Whatever the statement was: the next connection may lead to a standby that was promoted without our last
        # purges, and what they deleted is there again, with our mark.
        if error.in_doubt:
            self._force_remark()

    def _refresh_when_quiet(self) -> None:
        if self._publisher.in_flight or self._busy_with_database():
            return
        if not self._publisher.renew_if_broken():
            self._note_unmade()
            return
        self._lanes = Lanes(self._ctx.limits.lane_capacity)
        self._failures.leader_id_renewed()
        self._remark = False
        self.leader_id = uuid4()
        self._ctx.watermark.reset("a new leader ID")
        self._ctx.emit(LeaderRefreshed(self.leader_id))

    def _busy_with_database(self) -> bool:
        is_settling = self._settle.is_running or any(self._to_settle) or self._failures.is_deleting
        return self._mark.is_running or self._failures.is_holding or is_settling

    # -- wait and finish

    def _patience(self) -> float:
        due = _IDLE_SECONDS
        if any(self._to_settle) and not self._settle.is_running:
            due = min(due, self._settle.retry_at - now())
        if not self._remark:
            due = min(due, self._mark_due_in())
            if self._ctx.batches.are_awaited:
                due = min(due, self._ctx.batches.await_seconds)
            if self._ctx.send_window.has_waiting:
                due = min(due, CHECK_EVERY_SECONDS)
        return max(0.0, due)

    def _mark_due_in(self) -> float:
        """Return the seconds until a mark, or reading the holds, can start; the end of either wakes this thread."""
        failures = self._failures
        if self._mark.is_running or failures.is_holding:
            return _IDLE_SECONDS
        due = failures.hold_due_in(self._lanes)
        if failures.may_mark and not self._is_blocked():
            mark_due = max(_TICK_SECONDS, failures.due_in(self._lanes))
            if self._room():
                mark_due = min(mark_due, self._schedule.due_in())
            due = min(due, max(mark_due, self._mark.retry_at - now()))
        return due

    def _wait(self, seconds: float) -> None:
        publisher, wake = self._publisher, self._ctx.wake
        if not publisher.in_flight:
            publisher.poll(0)
            wake.wait(seconds)
        elif seconds == 0.0 or wake.is_set():
            publisher.poll(0)
        elif publisher.lingers:
            # There is nothing to add to what lingers in the producer, so let it go: with few keys the next records
            # cannot be sent before these have arrived.
            publisher.push(_TICK_SECONDS)
        elif not self._mark.is_running and not self._settle.is_running:
            publisher.poll(min(seconds, _TICK_SECONDS))
        else:
            # Rows that have been marked are not to wait for the reports of those before them. Neither of the two waits
            # ends with what the other one is for, so look after the reports at short intervals.
            wake.wait(min(seconds, _TICK_SECONDS))
            publisher.poll(0)

    def _finish(self) -> None:
        """Await the records in flight, purge those that arrived, release the rest: the module's last paragraph."""
        self._force_remark()
        drain_timeout = self._ctx.limits.drain_timeout
        give_up_at = now() + drain_timeout
        drop_at = now() + self._ctx.limits.delivery_timeout + _REPORTS_LATE_SECONDS
        dropped_at = float("inf")
        while True:
            if not self._leads() or now() >= drop_at:
                # In each turn: what is on the wire comes back from a lost connection and would be sent again, for as
                # long as the client's clock says, which stands still while the machine sleeps.
                self._publisher.cancel()
                dropped_at = min(dropped_at, now())  # not when it was due: the machine may have slept since
            self._ctx.wake.clear()
            self._collect_mark()
            self._collect_settled()
            self._start_settling()
            if self._publisher.in_flight:
                give_up_at = now() + drain_timeout
            elif not self._busy_with_database() or now() >= give_up_at:
                break
            if self._publisher.in_flight and now() >= dropped_at + max(drain_timeout, _REPORTS_LATE_SECONDS):
                raise OutboxError(f"the Kafka client does not give back {plural(self._publisher.in_flight, 'record')}")
            self._wait(self._patience())
            self._collect_reports()
        self._publisher.renew_if_broken()
