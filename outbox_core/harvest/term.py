"""One term of exactly-once delivery; its rules are in `outbox_core.harvest.exactly_once`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Protocol

from outbox_core.election.leadership import now
from outbox_core.events import MeterRead
from outbox_core.harvest.cooling import Cooling
from outbox_core.harvest.floor import Look, Reading
from outbox_core.harvest.manifest import Manifest
from outbox_core.harvest.pace import Pace
from outbox_core.harvest.recovery import Recovery, Step, Transactions
from outbox_core.harvest.surroundings import Surroundings, Timing
from outbox_core.harvest.transaction import Aborted, Ended, Outcome, TransactionalProducer
from outbox_core.harvest.waiting import Waiting
from outbox_core.ports import OutboxStore, StoredRecord, bytes_of

_ID: Final = 0
_TOPIC: Final = 1
_CREATE_TIME: Final = 7
_IDLE_SECONDS = 1.0


class LeadershipOfTerm(Protocol):
    """What a term knows of its leadership (`outbox_core.harvest.exactly_once.ExactlyOnce`)."""

    drain: bool
    drained: bool
    in_flight_records: int

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

    Attributes:
        committed: whether any of its transactions was committed.
    """

    def __init__(
        self, leadership: LeadershipOfTerm, timing: Timing, surroundings: Surroundings, transactions: Transactions
    ) -> None:
        self.committed = False
        self._leadership = leadership
        self._timing = timing
        self._with = surroundings
        self._waiting = Waiting(leadership.over, timing, surroundings)
        self._transactions = transactions
        self._in_flight: set[int] = set()  # scanned, and their purge is not committed: what a scan must exclude
        self._unpurged: list[tuple[int, int]] = []  # (id, create time): published, and their purge is not committed
        self._purging: Future[int] | None = None
        self._scanning: Future[tuple[Sequence[StoredRecord], Look | None, float]] | None = None
        self._reading: Reading | None = None
        self._scan_limit = timing.mark_query_records
        self._scan_excludes = False
        self._pace = Pace(timing.mark_backoff, surroundings.news, now)
        self._suspects = 0  # of this many rows at the head one made a transaction fail
        self._cooling = Cooling(timing.io_error_backoff / 10, timing.io_error_backoff * 10, now)

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

    def _run(self, producer: TransactionalProducer) -> Ended | None:
        over = self._leadership.over
        recovery = Recovery(self._transactions, over, self._timing, self._with)
        ended = recovery.check_topic() or recovery.settle(producer)
        if ended is None:
            recovery.refuse_marks()
            self._with.kafka.ended()
        while ended is None and not over():
            records = self._next_batch()
            if records:
                ended = self._publish(producer, records)
        self._join_scan()
        self._purge_is_committed(now() + self._timing.drain_timeout)
        return None if over() else ended

    # -- scan

    def _next_batch(self) -> list[StoredRecord]:
        """The next rows to publish, or none if there were none just now."""
        self._purge_is_committed(now())
        if self._scanning is None:
            self._waiting.pause(min(_IDLE_SECONDS, self._pace.due_in()))
            if self._pace.due_in() or self._leadership.over():
                return []
            self._start_scan()
        records, took = self._collect_scan()
        if records:
            self._pace.found(more=True)  # a transaction lies between this scan and the next: that is pause enough
            self._in_flight.update(record[_ID] for record in records)
            self._transactions.reached(Step.AFTER_SCAN)
        else:
            self._pace.found_nothing(took)
            self._look_whether_drained()
        return records

    def _start_scan(self) -> None:
        """Send a scan that excludes what is in flight now: the set is copied before the statement begins."""
        lanes, identities = self._cooling.resting()
        excluded = self._in_flight.union(identities)
        limit, max_bytes = self._scan_limit, self._timing.mark_query_bytes
        reading = self._reading = self._with.floor.begin(lanes | identities)
        self._scan_excludes = bool(lanes or identities)

        def scan(store: OutboxStore) -> tuple[Sequence[StoredRecord], Look | None, float]:
            look = reading.look(store)
            began = now()
            records = store.scan(limit, excluded, lanes, reading.floor, max_bytes=max_bytes)
            took = now() - began
            self._with.metrics.mark_took(took)
            return records, look, took

        self._pace.begin()
        self._scanning = self._with.marker.submit(scan)

    def _collect_scan(self) -> tuple[list[StoredRecord], float]:
        scanning, self._scanning = self._scanning, None
        if scanning is None or not self._waiting.until_done(scanning):
            return [], 0.0
        result = self._waiting.result(scanning)
        if result is None:
            return [], 0.0
        records, look, took = result
        if self._reading is not None:
            self._with.floor.ended(self._reading, look, records, took)
        return list(records), took

    def _join_scan(self) -> None:
        """Wait for the scan under way and throw its rows away."""
        scanning, self._scanning = self._scanning, None
        if scanning is not None:
            self._waiting.until_done(scanning, now() + self._timing.drain_timeout)

    def _look_whether_drained(self) -> None:
        if self._leadership.drain and not self._scan_excludes and self._purge_is_committed(None):
            self._leadership.drained = bool(self._waiting.insist(self._with.marker, lambda store: store.is_empty()))

    # -- publish

    def _publish(self, producer: TransactionalProducer, records: list[StoredRecord]) -> Ended | None:
        """One transaction. Returns `Ended` if the producer is of no more use."""
        self._count_in_flight(len(records))
        began = now()
        is_full = len(records) == self._scan_limit or bytes_of(records) >= self._timing.mark_query_bytes
        if is_full and not self._suspects:
            # There is more: read it while this batch is published. A batch that was not full is another matter: what
            # is scanned now would leave out all that is committed while this batch is, which would then have to wait
            # for the transaction after the next.
            self._start_scan()
        outcome = producer.begin() or self._fill(producer, records) or self._commit(producer)
        self._count_in_flight(0)
        if isinstance(outcome, Ended):
            return outcome
        if isinstance(outcome, Aborted):
            self._discard(outcome, records)
        else:
            self._succeed(records, now() - began)
        return None

    def _fill(self, producer: TransactionalProducer, records: list[StoredRecord]) -> Aborted | Ended | None:
        """Put the records and their manifest into the open transaction."""
        refused = producer.send(records, self._leadership.over)
        if isinstance(refused, Ended):
            return refused
        self._transactions.reached(Step.AFTER_PRODUCE)
        if refused:
            self._with.metrics.publish_error(len(refused))
        for failure in refused or ():
            self._blame(failure.record, failure.error.str())
        if refused is None or refused or not self._leadership.leads():
            return producer.abort()
        manifest = Manifest(
            self._transactions.outbox, [record[_ID] for record in records], [record[_CREATE_TIME] for record in records]
        )
        return producer.send_manifest(self._transactions.tracking_topic, manifest.encode())

    def _commit(self, producer: TransactionalProducer) -> Outcome:
        """Commit, once what the last transaction published is out of the table: the one ordering rule."""
        if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
            return producer.abort()
        self._transactions.reached(Step.BEFORE_COMMIT)
        self._transactions.reached(Step.COMMIT_SENT)
        return producer.commit()

    def _succeed(self, records: list[StoredRecord], took: float) -> None:
        self._transactions.reached(Step.COMMITTED)
        self.committed = True
        self._unpurged = [(record[_ID], record[_CREATE_TIME]) for record in records]
        self._transactions.reached(Step.BEFORE_PURGE)
        self._start_purge()
        self._with.metrics.published(len(records))
        self._with.metrics.publish_latency(took, len(records))
        self._cooling.succeeded(records)
        self._with.kafka.worked(all_of_it=not self._cooling)
        self._narrow_down(self._suspects - len(records))
        stats = self._with.meter.add(len(records))
        if stats is not None:
            self._with.emit(MeterRead(stats))

    def _discard(self, aborted: Aborted, records: list[StoredRecord]) -> None:
        """After an abort: forget what was scanned and not published, and look for the record that is to blame."""
        self._join_scan()
        self._with.floor.reset("a transaction was aborted")
        self._purge_is_committed(None)
        self._in_flight = {identity for identity, _ in self._unpurged}
        if aborted.error is None:
            return
        self._with.metrics.publish_error()
        if not aborted.record_at_fault:
            self._with.kafka.began(aborted.error.str())
            self._waiting.rest(self._timing.io_error_backoff)
        elif len(records) == 1:
            self._blame(records[0], aborted.error.str())
            self._narrow_down(0)
        else:
            self._narrow_down(len(records))

    def _narrow_down(self, suspects: int) -> None:
        """Publish half of the suspects next, or full batches if there are none."""
        self._suspects = max(0, suspects)
        self._scan_limit = max(1, self._suspects // 2) if self._suspects else self._timing.mark_query_records

    def _blame(self, record: StoredRecord, error: str) -> None:
        self._with.kafka.began(f"record {record[_ID]} for topic {record[_TOPIC]}: {error}")
        self._cooling.failed(record)

    def _count_in_flight(self, count: int) -> None:
        self._leadership.in_flight_records = count
        self._with.metrics.in_flight(count)

    # -- purge

    def _start_purge(self) -> None:
        ids = [identity for identity, _ in self._unpurged]
        create_times = [create_time for _, create_time in self._unpurged]

        def purge(store: OutboxStore) -> int:
            began = now()
            count = store.settle(ids, create_times)
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
                self._in_flight.difference_update(identity for identity, _ in self._unpurged)
                self._unpurged = []
                self._transactions.reached(Step.AFTER_PURGE)
        return True
