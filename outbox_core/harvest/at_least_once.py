"""Mark-purge/reset: publish the outbox in causal order, at least once (seed 000).

One `AtLeastOnce` lives as long as one leadership. It runs on the harvest thread and owns everything in here; only the
statements run elsewhere, on the two threads that own a store each.

    outbox table --mark--> lanes --send--> Kafka --acknowledgement--> purge --> the lane moves on
                   ^                                  failure ------> reset --> force remark
                   '--------------------------------------------------------------'

- **Mark.** One statement claims the earliest rows that do not carry our leader ID, from the head of the table, and
  returns them. A later commit with a lower id is found by the next mark, because no mark begins at an offset, unless
  nothing can appear below it any more (`floor`). Rows that a dead leader marked are found like any other: there is no
  recovery branch.
  A mark that returns a row we already hold shows that another leader has marked it in between: force remark, as the
  row would otherwise be published a second time after its followers.
- **Send.** At most one record of a key is under way (`lanes`). The lease is looked at immediately before each send,
  and must have at least `delivery_timeout` left: the producer gives up on a record before the lease it was sent under
  can end, so a successor never meets the sends of its predecessor. Leases that never have that much left are seen to in
  `send_window`.
- **Purge.** Acknowledged rows are deleted where they still carry our leader ID. Fewer than asked means that another
  leader has marked them since: no lane moves, and everything is marked again.
- **Reset.** A failed delivery concerns its own key, its partition or its topic (`bad_records`): the rows of these lose
  our leader ID and are left out of the marks for a while, or held. Everything else flows.
- **Force remark**, where more is in doubt: drop all that is not yet sent, let what is in flight finish under the old
  leader ID, take a new one (`LeaderRefreshed`), and mark again from the head.
- **Unknown outcomes.** A mark that the connection did not survive may have marked rows that we were never told of:
  force remark. A purge that it did not survive is repeated; if the first one did happen, the second deletes fewer
  rows than asked, which is the case above.

A leadership that ends, in whatever way, sends nothing more, waits for what is in flight (bounded by
`delivery_timeout`; once the lease is over it is taken back), purges what was acknowledged and clears its marks from
the rest. Nothing of the next leadership starts before that, so the lanes' promise holds across leaderships of one
process too.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from concurrent.futures import Future
from operator import itemgetter
from typing import Final
from uuid import UUID, uuid4

from outbox_core.election.leadership import now
from outbox_core.errors import OutboxError, RowsHeld, StoreUnavailable
from outbox_core.events import LeaderRefreshed, MeterRead
from outbox_core.harvest.bad_records import BadRecords
from outbox_core.harvest.burials import Burials
from outbox_core.harvest.floor import Look, Reading
from outbox_core.harvest.lanes import Lanes
from outbox_core.harvest.pace import Pace
from outbox_core.harvest.publisher import Failure, ProducerLimits, Publisher
from outbox_core.harvest.recovery import Recovery, Transactions
from outbox_core.harvest.send_window import LOOK_EVERY_SECONDS
from outbox_core.harvest.surroundings import DeadLetters, Surroundings, Timing
from outbox_core.harvest.verdicts import Verdict
from outbox_core.kafka import KafkaError
from outbox_core.ports import HoldSet, MarkedBatch, OutboxStore, StoredRecord, bytes_of

_log = logging.getLogger(__name__)

_ID: Final = 0
_TOPIC: Final = 1
_topic_of = itemgetter(_TOPIC)
_NOTHING_MARKED: Final = MarkedBatch(0, ())
_SEND_CHUNK = 500
_IDLE_SECONDS = 1.0
_TICK_SECONDS = 0.001
_REPORTS_LATE_SECONDS = 2.0  # librdkafka looks for messages that are too old once a second
_FIRST_RIVALS_REST_SECONDS = 0.05
_LONGEST_RIVALS_REST_SECONDS = 5.0


class AtLeastOnce:
    """One leadership's mark-purge/reset.

    Args:
        leader_id: the ID of the leadership; marks carry it until the first remark.
        timing: limits.
        surroundings: what to work with.
        publisher: the producer and its delivery reports; it outlives the leadership.
        transactions: what exactly-once delivery of this outbox published with, if there ever was any.
        dead_letters: where bad records go.
        drain: whether to end once the table is empty.

    Attributes:
        leader_id: the ID that marks carry now.
        drained: whether it ended because the table is empty.
    """

    def __init__(
        self,
        leader_id: UUID,
        timing: Timing,
        surroundings: Surroundings,
        publisher: Publisher,
        transactions: Transactions,
        *,
        dead_letters: DeadLetters,
        drain: bool = False,
    ) -> None:
        self.leader_id = leader_id
        self.drained = False
        self._leadership_id = leader_id
        self._timing = timing
        self._with = surroundings
        self._publisher = publisher
        self._transactions = transactions
        self._drain = drain
        self._stopping = False
        self._lanes = Lanes(timing.lane_capacity)
        self._bad = BadRecords(timing, surroundings, dead_letter=dead_letters.on_poison)
        self._burials = Burials(dead_letters, timing, surroundings, publisher)
        self._remark = False
        self._marking: Future[tuple[MarkedBatch, Look | None, float, HoldSet]] | None = None
        self._mark_limit = 0
        self._reading: Reading | None = None
        self._mark_excludes = False
        self._marked_with = self._bad.holds
        self._pace = Pace(timing.mark_backoff, surroundings.news, now)
        self._rivals_rest = 0.0
        self._read_holds_not_before = 0.0
        self._settling: Future[int] | None = None
        self._settle_not_before = 0.0
        self._being_purged: list[StoredRecord] = []
        self._being_reset: list[int] = []
        self._to_purge: list[StoredRecord] = []
        self._to_reset: list[int] = []

    @property
    def in_flight_records(self) -> int:
        """Records sent and not yet acknowledged."""
        return self._publisher.in_flight

    def stop(self) -> None:
        """Ask `run` to finish what is in flight and return. From any thread."""
        self._stopping = True
        self._with.wake.set()

    def run(self) -> None:
        """Harvest until the leadership ends, `stop` is called or, when draining, the table is empty."""
        self._with.floor.reset("a new leader ID")
        Recovery(self._transactions, self._over, self._timing, self._with).settle_if_tracked()
        try:
            self._harvest()
            self._finish()
        except BaseException:
            self._publisher.settle()  # whoever leads next must not meet our sends
            raise
        finally:
            self._bad.forget()
            self._with.send_window.leadership_ends()

    def _harvest(self) -> None:
        while True:
            self._with.wake.clear()  # before anything is looked at, so that no change is missed
            if self._over():
                return
            self._collect_mark()
            self._collect_settled()
            self._give_back(self._bad.collect_written(self._lanes))
            self._burials.step(self._bad.holds)
            sent_all = True
            if self._remark:
                self._refresh_when_quiet()
            else:
                sent_all = self._send()
                self._start_mark()
            self._bad.start_writing()
            self._start_settling()
            if not self.drained:
                self._wait(self._patience() if sent_all else 0.0)
            self._collect_reports()

    def _over(self) -> bool:
        return self._stopping or self.drained or not self._leads()

    def _leads(self) -> bool:
        leadership = self._with.elector.leadership
        return leadership is not None and leadership.leader_id == self._leadership_id and now() < leadership.deadline

    # -- mark

    def _room(self) -> int:
        """How many rows to mark next; 0 while no worthwhile batch fits, as few rows cost much the same as many."""
        timing = self._timing
        if self._room_bytes() < timing.mark_query_bytes and self._lanes.held:
            return 0
        limit = min(timing.mark_query_records, timing.max_in_flight_records - self._lanes.held)
        return limit if limit >= min(timing.mark_query_records, max(1, timing.max_in_flight_records // 2)) else 0

    def _room_bytes(self) -> int:
        return self._timing.max_in_flight_bytes - self._lanes.held_bytes

    def _start_mark(self) -> None:
        """Send a mark if one is due; if not, see now and then at least what is held."""
        bad = self._bad
        is_blocked = self._pace.due_in() or not bad.book.was_read or self._with.removal.has_begun
        limit = 0 if is_blocked else self._room()
        if self._marking is not None or not (limit or self._wants_holds()):
            return
        leader_id, book, max_bytes = self.leader_id, bad.book, self._timing.mark_query_bytes
        if not limit:
            self._mark_limit = 0
            self._marking = self._with.marker.submit(lambda store: (_NOTHING_MARKED, None, 0.0, book.look_after(store)))
            return
        lanes, ids, topics = bad.exclusion()
        lanes |= self._lanes.full
        self._mark_excludes = bool(lanes or ids or topics)
        self._mark_limit = limit
        # Passed to the statement as they are known now: a release that becomes known later counts for the next one.
        holds = self._marked_with = bad.holds
        reading = self._reading = self._with.floor.begin(frozenset(lanes | ids | topics | holds.items))

        def mark(store: OutboxStore) -> tuple[MarkedBatch, Look | None, float, HoldSet]:
            look = reading.look(store)
            began = now()
            try:
                batch = store.mark(
                    leader_id, limit, lanes, ids, reading.floor, max_bytes=max_bytes, holds=holds.with_topics(topics)
                )
            except RowsHeld:
                book.forget()
                raise
            took = now() - began
            self._with.metrics.mark_took(took)
            if not batch.records and not holds:
                return batch, look, took, holds
            try:
                return batch, look, took, book.look_after(store, batch.records)
            except StoreUnavailable as error:  # and so nobody hears of what is marked
                raise StoreUnavailable(str(error), in_doubt=True) from error

        self._pace.begin()
        self._marking = self._with.marker.submit(mark)

    def _wants_holds(self) -> bool:
        """Whether the holds are to be read although no mark is due: something is held, or waits in memory."""
        book = self._bad.book
        if now() < self._read_holds_not_before:
            return False
        return not book.was_read or (book.is_old and bool(self._bad.holds or self._lanes.held))

    def _collect_mark(self) -> None:
        if self._marking is None or not self._marking.done():
            return
        marking, self._marking = self._marking, None
        try:
            batch, look, took, holds = marking.result()
        except StoreUnavailable as error:
            self._with.database.began(error)
            self._pace.failed(self._timing.io_error_backoff)
            self._read_holds_not_before = now() + self._timing.io_error_backoff
            if error.in_doubt and self._mark_limit:
                self._force_remark()
            return
        self._with.database.ended()
        if holds is not self._bad.holds:
            self._with.news.tell()  # something may have been released
        self._give_back(self._bad.learn(holds, self._lanes))
        if not self._mark_limit:
            return
        if batch.records:
            is_full = len(batch.records) == self._mark_limit or bytes_of(batch.records) >= self._timing.mark_query_bytes
            self._pace.found(more=is_full)
        else:
            self._pace.found_nothing(took)
        if self._remark or batch.selected != len(batch.records) or self._lanes.holds_any(batch.records):
            self._to_reset.extend(record[_ID] for record in batch.records)
            self._force_remark()
            self._leave_room_for_rivals()
            return
        if self._reading is not None:
            self._with.floor.ended(self._reading, look, batch.records, took)
        if batch.records:
            self._with.batches.meet(set(map(_topic_of, batch.records)))
            records, back = self._bad.sift(batch.records)
            self._give_back(back)
            self._lanes.admit(records)
        else:
            self._check_drained()

    def _check_drained(self) -> None:
        if not self._drain or self._mark_excludes or self._lanes.held or self._bad.is_writing or self._burials.is_busy:
            return
        holds, book = self._bad.holds, self._bad.book
        if holds is not self._marked_with:
            return  # something may have been released since the mark began
        try:
            if holds:  # the rest is held: unless that has changed, this is all
                self.drained = self._with.marker.submit(book.read).result() is holds and not holds.requests
            else:
                self.drained = self._with.marker.submit(lambda store: store.is_empty()).result()
        except StoreUnavailable as error:
            self._with.database.began(error)

    # -- send

    def _send(self) -> bool:
        """Send a chunk of what may be sent. False if more of it can be sent at once."""
        if not self._producer_fits():
            return True
        batch = self._lanes.take(_SEND_CHUNK)
        elector = self._with.elector
        closes_at = self._closes_at(records_wait=bool(batch) or self._bad.has_due or self._burials.has_ready)
        send = self._publisher.send
        sent_at = now()
        if not self._send_alone(closes_at):
            self._lanes.put_back(batch)
            return True
        for position, record in enumerate(batch):
            if now() >= closes_at or elector.leadership is None or not send(record, sent_at):
                self._lanes.put_back(batch[position:])
                return True
        return not self._lanes.has_ready

    def _closes_at(self, *, records_wait: bool) -> float:
        """Return until when records may be sent under the present lease, 0.0 for not at all.

        To be asked once for a chunk: a lease is only ever extended, and the lease of a later leadership does not count.
        """
        leadership, window = self._with.elector.leadership, self._with.send_window
        if leadership is None or leadership.leader_id != self._leadership_id:
            return 0.0
        timeout = window.timeout  # that of the producer; a look may change what the next one is made for
        window.look(leadership.deadline - now(), records_wait=records_wait)
        return leadership.deadline - timeout

    def _producer_fits(self) -> bool:
        """Return if the producer builds batches that all topics take, and gives records up in time.

        Else it is replaced once nothing is in flight.
        """
        batches, publisher = self._with.batches, self._publisher
        if batches.are_awaited:
            return False
        publisher.limit(self._limits())
        if not publisher.is_outdated:
            return True
        if not publisher.in_flight:
            publisher.renew()
        return not publisher.is_outdated

    def _limits(self) -> ProducerLimits:
        """Return in what the producer is to differ from its settings."""
        batch_bytes, timeout = self._with.batches.limit, self._with.send_window.timeout
        limits = {} if batch_bytes is None else {"batch.size": batch_bytes}
        if timeout != self._timing.delivery_timeout:
            limits["delivery.timeout.ms"] = max(1, int(timeout * 1000))
        return limits

    def _send_alone(self, closes_at: float) -> bool:
        """Send what must be judged by itself. False if nothing more can be sent now."""
        for source in (self._bad, self._burials):
            again = source.take()
            for position, record in enumerate(again):
                if now() >= closes_at or not self._publisher.send_alone(record, now()):
                    source.put_back(again[position:])
                    return False
        return True

    def _collect_reports(self) -> None:
        publisher, metrics = self._publisher, self._with.metrics
        if publisher.delivered:
            delivered = publisher.take_delivered()
            self._succeed(self._burials.delivered(delivered) if self._burials.is_busy else delivered)
        if publisher.failed:
            failures = publisher.take_failed()
            self._fail(self._burials.failed(failures) if self._burials.is_busy else failures)
        metrics.in_flight(publisher.in_flight)

    def _succeed(self, delivered: list[StoredRecord]) -> None:
        self._to_purge.extend(delivered)
        self._with.metrics.published(len(delivered))
        arrived = now()
        for sent_at, count in self._publisher.take_send_times().items():
            self._with.metrics.publish_latency(arrived - sent_at, count)
        self._bad.succeeded(delivered)
        self._with.kafka.worked(all_of_it=not self._bad.parking.is_unreachable)
        stats = self._with.meter.add(len(delivered))
        if stats is not None:
            self._with.emit(MeterRead(stats))

    def _fail(self, failures: list[Failure]) -> None:
        broken = [failure for failure in failures if failure.verdict is Verdict.BROKEN]
        if (
            self._over() or self._remark or broken or self._publisher.is_broken
        ):  # dropped on purpose, on the way back anyhow, or with the producer
            self._to_reset.extend(record[_ID] for record, *_ in failures)
            self._force_remark()
        else:
            self._with.batches.refused(
                {failure.record[_TOPIC] for failure in failures if _was_batch_too_large(failure)}
            )
            self._give_back(self._bad.judge(failures, self._lanes))
        if not self._over():
            self._with.metrics.publish_error(len(failures))
        if broken:
            self._with.kafka.began(f"the producer has failed: {broken[0].error.str()}")

    def _give_back(self, records: Iterable[StoredRecord]) -> None:
        """Clear the marks of records that are in no lane any more."""
        ids = [record[_ID] for record in records]
        if ids:
            self._with.floor.reset("records went back to the table")
            self._to_reset.extend(ids)

    # -- purge and reset

    def _start_settling(self) -> None:
        if self._settling is not None or not (self._to_purge or self._to_reset) or now() < self._settle_not_before:
            return
        self._being_purged, self._to_purge = self._to_purge, []
        self._being_reset, self._to_reset = self._to_reset, []
        leader_id = self.leader_id
        purge_ids = [record[_ID] for record in self._being_purged]
        reset_ids = self._being_reset

        def settle(store: OutboxStore) -> int:
            purged = 0
            if purge_ids:
                began = now()
                purged = store.purge(leader_id, purge_ids)
                self._with.metrics.purge_took(now() - began)
            if reset_ids:
                store.reset(leader_id, reset_ids)
            return purged

        self._settling = self._with.purger.submit(settle)

    def _collect_settled(self) -> None:
        if self._settling is None or not self._settling.done():
            return
        settling, self._settling = self._settling, None
        try:
            purged = settling.result()
        except StoreUnavailable as error:
            self._settle_not_before = now() + self._with.note_outage(error, self._timing.io_error_backoff)
            self._to_purge = self._being_purged + self._to_purge
            self._to_reset = self._being_reset + self._to_reset
            return
        self._with.database.ended()
        self._bad.reset_done(self._being_reset)
        if self._being_purged:
            self._with.removal.ended()
        if purged == len(self._being_purged):
            if purged:
                self._rivals_rest /= 2
            self._lanes.purged(self._being_purged)
            if self._drain and not self._lanes.held:
                self._with.news.tell()  # whether that was all is to be seen at once
        else:
            _log.info("purged %d of %d rows: the rest carry another leader's mark", purged, len(self._being_purged))
            self._force_remark()
            self._leave_room_for_rivals()

    def _leave_room_for_rivals(self) -> None:
        """Another leader, of another group perhaps, marks the same rows: at full speed both would send all of it."""
        self._rivals_rest = min(_LONGEST_RIVALS_REST_SECONDS, max(_FIRST_RIVALS_REST_SECONDS, 2 * self._rivals_rest))
        self._pace.failed(self._rivals_rest * random.uniform(0.5, 1.0))  # noqa: S311  jitter

    # -- remark

    def _force_remark(self) -> None:
        """Send nothing more under this leader ID, and give back what has not been sent."""
        self._remark = True
        self._give_back(self._lanes.abandon())
        self._give_back(self._bad.give_up())

    def _refresh_when_quiet(self) -> None:
        if self._busy():
            return
        self._publisher.renew_if_broken()
        self._lanes = Lanes(self._timing.lane_capacity)
        self._bad.refreshed()
        self._remark = False
        self.leader_id = uuid4()
        self._with.floor.reset("a new leader ID")
        self._with.emit(LeaderRefreshed(self.leader_id))

    def _busy(self) -> bool:
        return bool(self._publisher.in_flight) or self._busy_with_database() or self._bad.is_writing

    def _busy_with_database(self) -> bool:
        return bool(self._marking or self._settling or self._to_purge or self._to_reset or self._burials.is_burying)

    # -- wait and finish

    def _patience(self) -> float:
        """Seconds until something is due by the clock."""
        due = _IDLE_SECONDS
        time = now()
        if self._marking is None and not self._remark and self._room():
            due = min(due, self._pace.due_in())
        if self._settling is None and (self._to_purge or self._to_reset):
            due = min(due, self._settle_not_before - time)
        if not self._remark:
            # What is due cannot be sent before there is room in the lease: that comes with a heartbeat.
            soonest = LOOK_EVERY_SECONDS if self._with.send_window.is_waited_for else _TICK_SECONDS
            due = min(due, max(soonest, self._bad.due_in()), self._burials.due_in())
            if self._with.batches.are_awaited:
                due = min(due, self._with.batches.await_seconds)
            if self._marking is None and (self._bad.holds or self._lanes.held):
                due = min(due, max(self._bad.book.due_in(), self._read_holds_not_before - time))
            if self._with.send_window.is_waited_for:
                due = min(due, LOOK_EVERY_SECONDS)
        return max(0.0, due)

    def _wait(self, seconds: float) -> None:
        """Wait for whatever comes next: a delivery report, the end of a statement, a wake-up; or for the clock."""
        publisher, wake = self._publisher, self._with.wake
        if not publisher.in_flight:
            publisher.poll(0)
            wake.wait(seconds)
        elif seconds == 0.0 or wake.is_set():
            publisher.poll(0)
        elif publisher.lingers:
            # There is nothing to add to what lingers in the producer, so let it go: with few keys the next records
            # cannot be sent before these have arrived.
            publisher.push(_TICK_SECONDS)
        elif self._marking is None and self._settling is None:
            publisher.poll(min(seconds, _TICK_SECONDS))
        else:
            # Rows that have been marked are not to wait for the reports of those before them. Neither of the two waits
            # ends with what the other one is for, so look after the reports at short intervals.
            wake.wait(min(seconds, _TICK_SECONDS))
            publisher.poll(0)

    def _finish(self) -> None:
        """Let what is in flight end, purge what arrived, give back the rest. See the module's last paragraph.

        Raises:
            OutboxError: if the Kafka client keeps records although they were taken back.
        """
        self._force_remark()
        give_up_at = now() + self._timing.drain_timeout
        drop_at = now() + self._timing.delivery_timeout + _REPORTS_LATE_SECONDS
        while True:
            if not self._leads() or now() >= drop_at:
                # In each turn: what is on the wire comes back from a lost connection and would be sent again, for as
                # long as the client's clock says, which stands still while the machine sleeps.
                self._publisher.drop()
            self._with.wake.clear()
            self._collect_mark()
            self._collect_settled()
            self._burials.finish()
            self._start_settling()
            if self._publisher.in_flight:
                give_up_at = now() + self._timing.drain_timeout
            elif not self._busy_with_database() or now() >= give_up_at:
                break
            if now() >= drop_at + self._timing.drain_timeout and self._publisher.in_flight:
                raise OutboxError(f"the Kafka client does not give back {self._publisher.in_flight} records")
            self._wait(self._patience())
            self._collect_reports()
        self._publisher.renew_if_broken()


def _was_batch_too_large(failure: Failure) -> bool:
    return failure.error.code() == KafkaError.MSG_SIZE_TOO_LARGE and not failure.alone
