"""Doubles of exactly-once delivery's code that break its rules (docs/explanation-exactly-once.md) on purpose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from outbox_core.election.lease import now
from outbox_core.harvest.exactly_once.term import Scanned, Term
from outbox_core.harvest.exactly_once.terms import ExactlyOnce
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.kafka import identity
from outbox_core.kafka.clients import KafkaException, TopicPartition, make_consumer, make_producer
from outbox_core.kafka.identity import Failpoint, TransactionalIdentity
from outbox_core.kafka.reader import reader_settings
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.tracking import Ledger, ManifestNotRead
from outbox_core.kafka.transactions import Aborted, Committed, Ended, Outcome, TransactionalProducer, never
from outbox_core.stores.interface import RowQuery, StoredRecord, row_id
from tests.simulation.postgres import Row, Store
from tests.simulation.scheduling import current
from tests.simulation.simulation import Simulation

_ANSWER_SECONDS = 10.0
_READING_SECONDS = 1.0
_REPLICA_IS_BEHIND_SECONDS = 0.3
_UNWRITTEN_SECONDS = 0.6  # three times PostgreSQL's wal_writer_delay

_original_commit = TransactionalProducer.commit
_original_abort = TransactionalProducer.abort
_original_end = TransactionalProducer._end
_original_torn = TransactionalProducer._torn
_original_ledger = TransactionalIdentity.ledger
_original_start_scan = Term._start_scan
_original_collect_scan = Term._collect_scan
_original_discard = Term._discard
_original_conclude = Term._publication_is_committed
_original_delete = Store._delete
_original_select = Store._select
_original_database_fault = Simulation._fault_database


# -- who publishes: the fence, and the last transaction


def use_an_id_of_its_own(self: TransactionalProducer) -> object:
    """Make a producer that fences no other."""
    number = current().process.scheduler.random.getrandbits(64)
    settings = {**self._settings, "transactional.id": f"{self._transactional_id}-{number:x}"}
    return make_producer(settings)


def read_before_the_fence(
    self: Recovery, transactions: TransactionalIdentity, producer: RecordProducer
) -> Ended | None:
    """Settle the last term by the manifest that was the last one before `init_transactions`."""
    names = transactions.tracking_topic, transactions.tracking_partition
    try:
        consumer = make_consumer(reader_settings(transactions.kafka, transactions.group))
        _, end = consumer.get_watermark_offsets(TopicPartition(*names), timeout=_ANSWER_SECONDS, cached=False)
        consumer.close()
        who = transactions.transactional_id
        patience = self._patience(transactions)
        ledger = identity.read_ledger(transactions.kafka, transactions.group, *names, who, end=end, give_up=patience)
    except (KafkaException, ManifestNotRead) as error:
        return Ended(str(error))
    current().wait(_READING_SECONDS)
    ended = producer.init(self._patience(transactions))
    manifest = ledger.manifest
    if ended is None and manifest is not None and not self._delete(manifest.ids, manifest.create_times):
        return Ended("too late")
    self.ledger = ledger
    return ended


def read_no_ledger(self: TransactionalIdentity, producer: Any, give_up: Any) -> object:
    """Write the barrier, and believe that there was no manifest before it."""
    ledger = _original_ledger(self, producer, give_up)
    return ledger if isinstance(ledger, Ended) else Ledger(offset=ledger.offset)


def read_to_the_stable_end(
    self: TransactionalIdentity, producer: RecordProducer, give_up: Callable[[], bool]
) -> Ledger | Ended:
    """Read the last manifest before the first open transaction, without a barrier."""
    del producer
    names = self.tracking_topic, self.tracking_partition
    consumer = make_consumer(reader_settings(self.kafka, self.group))
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(*names), timeout=_ANSWER_SECONDS, cached=False)
        return identity.read_ledger(self.kafka, self.group, *names, self.transactional_id, end=end, give_up=give_up)
    except (KafkaException, ManifestNotRead) as error:
        return Ended(str(error))
    finally:
        consumer.close()


def begin_unchecked(
    self: TransactionalIdentity, producer: RecordProducer, known: Ledger, give_up: Callable[[], bool]
) -> Ended | None:
    """Replace a producer without a look at what others may have published since."""
    del self, known
    return (producer.replace(give_up) if producer.must_replace else None) or producer.begin()


def delete_by_id(self: Store, ids: Any, times: Any, is_wanted: Any) -> int:
    """Delete whatever rows have these ids."""
    del times
    rows = self._database.rows
    return _original_delete(
        self, ids, [rows[each].record.create_time if each in rows else 0 for each in ids], is_wanted
    )


def end_the_leadership(self: ExactlyOnce) -> None:
    """Harvest for one term, and then no more in this leadership."""
    ended = Term(self, self._ctx, self._transactions).run()
    while ended is not None and not self.over():
        self._ctx.wake.wait(1.0)
        self._ctx.wake.clear()


# -- commits, aborts, and their epochs


def believe_the_commit(self: TransactionalProducer, give_up: Callable[[], bool] = never) -> Outcome:
    """Take a commit whose outcome is unknown for done."""
    outcome = _original_commit(self, give_up)
    return Committed() if isinstance(outcome, Ended) else outcome


def doubt_the_commit(self: TransactionalProducer, give_up: Callable[[], bool] = never) -> Outcome:
    """Take a commit whose outcome is unknown for failed, and go on with a new producer."""
    outcome = _original_commit(self, give_up)
    if isinstance(outcome, Ended):
        self._must_replace = True
        return Aborted(None, record_at_fault=False)
    return outcome


def end_untimed(self: TransactionalProducer, call: Any, give_up: Any) -> object:
    """Commit or abort, and stay in the epoch however long that took."""
    before = self._must_replace
    try:
        return _original_end(self, call, give_up)
    finally:
        self._must_replace = before


def abort_in_its_epoch(
    self: TransactionalProducer, cause: Any = None, give_up: Callable[[], bool] = never
) -> Aborted | Ended:
    """Abort, and stay in the epoch unless that took long: also after an abort of unacknowledged records."""
    before, began = self._must_replace, current().process.monotonic()
    outcome = _original_abort(self, cause, give_up)
    if current().process.monotonic() - began < self._earliest_repeat:
        self._must_replace = before
    return outcome


# -- a torn transaction


def write_the_manifest_at_once(self: Term, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
    """Commit with a manifest that does not wait for the acknowledgements of the records."""
    refused = self._send_manifest(producer, records)
    if refused is not None:
        return refused
    if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
        return producer.abort(give_up=self._is_late)
    return _and_note(self, producer, producer.commit(self._is_late))


def commit_the_manifest_apart(self: Term, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
    """Commit the records, and their manifest in a transaction of its own after that."""
    if not producer.all_arrive(self._transactions.timeout, self._is_late):
        return producer.abort(producer.failure, self._is_late)
    if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
        return producer.abort(give_up=self._is_late)
    outcome = producer.commit(self._is_late)
    if not isinstance(outcome, Committed):
        return outcome
    self._transactions.reached(Failpoint.BEFORE_COMMIT)
    ended = self._begin(producer) or self._send_manifest(producer, records)
    return ended or _and_note(self, producer, producer.commit(self._is_late))


def write_no_opening(self: Term, producer: RecordProducer, records: Sequence[StoredRecord]) -> None:
    """Begin with the records, so that the tracking partition comes into the transaction with the manifest."""


def _and_note(term: Term, producer: RecordProducer, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Committed):
        term._ledger = Ledger(offset=producer.manifest_offset)
    return outcome


# -- scans and purges


def commit_before_the_purge(self: Term, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
    """Commit without waiting for the purge of the last batch."""
    if not producer.all_arrive(self._transactions.timeout, self._is_late):
        return producer.abort(producer.failure, self._is_late)
    return self._send_manifest(producer, records) or _and_note(self, producer, producer.commit(self._is_late))


def purge_with_the_last(self: Term, records: list[StoredRecord]) -> None:
    """Purge a batch together with the last one, where that is not purged yet."""
    before = self._unpurged
    _original_conclude(self, records)
    if before:
        self._unpurged = [*before, *self._unpurged]
        self._purge.abandon()
        self._start_purge()


def exclude_nothing(limit: int, most: int, floor: Any, lanes: Any, _: Any, topics: Any, holds: Any) -> RowQuery:
    """Ask for the rows in flight, too."""
    return RowQuery(limit, most, floor, lanes, (), topics, holds)


def scan_excluding_nothing(self: Term) -> None:
    """Send a scan that excludes no row in flight..."""
    batch, unpurged, self._batch, self._unpurged = self._batch, self._unpurged, (), ()
    _original_start_scan(self)
    self._batch, self._unpurged = batch, unpurged


def collect_and_exclude(self: Term) -> Scanned:
    """...and leave out the rows that are in flight when it has ended."""
    scanned = _original_collect_scan(self)
    in_flight = set(map(row_id, self._in_flight))
    return scanned._replace(records=[each for each in scanned.records if row_id(each) not in in_flight])


def scan_what_awaits_its_purge(self: Term) -> None:
    """Exclude the batch under way from a scan, and not the one before it."""
    unpurged, self._unpurged = self._unpurged, ()
    _original_start_scan(self)
    self._unpurged = unpurged


def forget_what_awaits_its_purge(self: Term) -> None:
    """Exclude nothing from the scan that follows an abort."""
    self._join_scan()
    self._ctx.watermark.went_back(self._batch)
    self._batch = ()
    broken: Any = self

    def start_once() -> None:
        del broken._start_scan
        scan_what_awaits_its_purge(self)

    broken._start_scan = start_once


def select_behind_the_last(self: Store, query: RowQuery, is_wanted: Any) -> Any:
    """Select rows with higher ids than any that was in flight."""
    store: Any = self
    last = store.last_in_flight = max([getattr(store, "last_in_flight", 0), *(row.id for row in query.without_rows)])
    return _original_select(self, query, lambda row: row.record.id > last and is_wanted(row))


def select_on_a_replica(self: Store, query: RowQuery, is_wanted: Any) -> Any:
    """Select rows as they were at a scan up to 0.3 s before, as on a replica, or by a cursor that is kept open."""
    database: Any = self._database
    earlier: deque[tuple[float, dict[int, Row]]] = vars(database).setdefault("earlier", deque())
    earlier.append((self._scheduler.now, dict(database.rows)))
    while earlier[0][0] < self._scheduler.now - _REPLICA_IS_BEHIND_SECONDS:
        earlier.popleft()
    present, database.rows = database.rows, earlier[0][1]
    is_hidden, database.on_hidden = database.on_hidden, lambda _: None  # rows that are gone are not hidden
    try:
        return _original_select(self, query, is_wanted)
    finally:
        database.rows, database.on_hidden = present, is_hidden


def delete_in_memory(self: Store, ids: Any, times: Any, is_wanted: Any) -> int:
    """Report a delete as committed before it is on disk."""
    database: Any = self._database
    before = dict(database.rows)
    count = _original_delete(self, ids, times, is_wanted)
    gone = [before[each] for each in ids if each in before and each not in database.rows]
    vars(database).setdefault("unwritten", []).extend((self._scheduler.now, row) for row in gone)
    return count


def restart_without_the_unwritten(self: Simulation, random: Random) -> None:
    """Restart the database; what it had deleted just before is back."""
    _original_database_fault(self, random)
    for time, row in vars(self.database).pop("unwritten", ()):
        if time > self.scheduler.now - _UNWRITTEN_SECONDS:
            self.database.rows[row.record.id] = Row(row.record, row.leader, row.version, was_taken=True)


def take_expiry_for_unknown(self: TransactionalProducer, cause: Any) -> Ended:
    """Take the transaction of an expired transactional.id for one whose outcome is unknown."""
    return replace(_original_torn(self, cause), is_expiry=False)


def keep_the_scan(self: Term, aborted: Aborted) -> None:
    """Publish next what was scanned meanwhile, although the batch before it was aborted."""
    scan, self._scan = self._scan, StoreCall(self._ctx.marker, self._ctx)
    _original_discard(self, aborted)
    self._scan = scan


def exclude_by_id(self: Store, query: RowQuery, is_wanted: Any) -> Any:
    """Exclude whatever rows have the ids of those in flight."""
    rows = self._database.rows
    without = [row_id(rows[row.id].record) for row in query.without_rows if row.id in rows]
    return _original_select(self, query._replace(without_rows=without), is_wanted)
