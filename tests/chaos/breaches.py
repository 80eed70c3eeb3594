"""The rules of exactly-once delivery, each broken by a class that `test_rules` puts in the place of the product.

Every class here changes as little as possible of the class it derives from. `Forced...` classes break nothing: they
only bring about, every time, the moment at which the rule matters, for the right product and the broken one alike.
"""

import threading
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from outbox_core.election.lease import now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.exactly_once.term import Term
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.kafka import identity
from outbox_core.kafka.clients import TopicPartition, make_consumer
from outbox_core.kafka.reader import reader_settings
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.tracking import LedgerReader
from outbox_core.kafka.transactions import Aborted, Committed, Ended
from outbox_core.stores.interface import row_id
from outbox_core.stores.postgres.store import PostgresStore

# -- 1. The set of ids in flight is copied before the scan is sent, and that copy applies


class ForcedOverlap(Term):
    """A term that scans the next batch before it commits this one, and uses that scan once this one is purged.

    It scans from the head, as without a settled floor, which would hide that the set is wrong.
    """

    def _start_scan(self):
        self._ctx.watermark.reset("the set of ids alone must do")
        super()._start_scan()
        if self._scan.is_running:
            self._wait.until_done(self._scan)

    def _collect_scan(self):
        self._purge_is_committed(None)
        return super()._collect_scan()


class ScansWhatIsInFlight(ForcedOverlap):
    """A term whose scan excludes records that await their purge, but not the batch that is being published."""

    def _start_scan(self):
        batch, self._batch = self._batch, ()
        super()._start_scan()
        self._batch = batch


class ExcludesAfterTheScan(ForcedOverlap):
    """A term that excludes the ids in flight at the end of the scan, not at its beginning."""

    def _start_scan(self):
        batch, unpurged, self._batch, self._unpurged = self._batch, self._unpurged, (), ()
        super()._start_scan()
        self._batch, self._unpurged = batch, unpurged

    def _collect_scan(self):
        scanned = super()._collect_scan()
        in_flight = set(map(row_id, self._in_flight))
        return scanned._replace(records=[each for each in scanned.records if row_id(each) not in in_flight])


# -- 2. An abort throws away scanned rows that are not published


class KeepsScannedRows(Term):
    """A term that publishes the batch scanned meanwhile although the one before it was aborted."""

    def _discard(self, aborted):
        scan, self._scan = self._scan, StoreCall(self._ctx.marker, self._ctx)
        super()._discard(aborted)
        self._scan = scan


class FailsOnce(RecordProducer):
    """A producer that fails its first transaction as if the broker could not take a record."""

    failed = False

    def commit(self, *arguments):
        if not FailsOnce.failed:
            FailsOnce.failed = True
            return self.abort(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS, "injected"))
        return super().commit(*arguments)


# -- 3. A delete matches id and create time


class MatchesIdsAlone(PostgresStore):
    """A store that recognises the manifest's rows by their ids alone."""

    def delete_published(self, ids, create_times):
        del create_times
        return self.table.execute("DELETE FROM {table} WHERE id = ANY (%(ids)s)", {"ids": list(ids)})


# -- 4. The manifest is read after init_transactions()


class ReadsManifestFirst(Recovery):
    """A recovery that reads the manifest before the fence, so that the predecessor may still commit in between."""

    def settle(self, producer):
        with_all, partition = self._transactions, TopicPartition(self._transactions.tracking_topic, 0)
        settings = reader_settings(with_all.kafka, with_all.group) | {"isolation.level": "read_uncommitted"}
        end = make_consumer(settings).get_watermark_offsets(partition, timeout=10, cached=False)[1]
        names = with_all.tracking_topic, 0, with_all.transactional_id
        ledger = identity.read_ledger(with_all.kafka, with_all.group, *names, end=end - 3, give_up=self._over)
        ended = producer.init(self._over)
        if ended is None and ledger.manifest is not None:
            self._delete(ledger.manifest.ids, ledger.manifest.create_times)
        return ended


# -- 5. The purge of a batch is committed before the commit of the next one is sent


class CommitsBeforePurge(Term):
    """A term that commits before the purge: the last manifest does not list all published rows of the table."""

    def _commit(self, producer, records):
        producer.all_arrive(10)
        return self._send_manifest(producer, records) or self._end(producer)


class NeverPurges(PostgresStore):
    """A store whose deletes all fail."""

    def delete_published(self, ids, create_times):
        del ids, create_times
        raise StoreUnavailable("injected: no deletes", in_doubt=True)


# -- 6. The tracking topic is read up to the barrier, even if its reported end is another


class ReadsToStableOffset(LedgerReader):
    """A reader that ends at the stable offset, and misses records behind another's open transaction."""

    def ledger(self, transactional_id, end):
        stable = self._consumer.get_watermark_offsets(self._place, timeout=10, cached=False)[1]
        return super().ledger(transactional_id, min(end, stable))


# -- 7. The outcome of a commit that timed out is unknown


class TimesOutOnce(RecordProducer):
    """A producer that never gets the answer to its first commit.

    Attributes:
        arrives: whether the commit takes effect.
    """

    arrives = True
    timed_out = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._producer = _Unanswered(self._producer)

    @classmethod
    def again(cls, *, arrives: bool) -> None:
        cls.arrives, cls.timed_out = arrives, False


class _Unanswered:
    """A Kafka producer that hides the answer to one commit."""

    def __init__(self, producer: Any) -> None:
        self._real = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __len__(self) -> int:
        return len(self._real)

    def commit_transaction(self, timeout: float) -> None:
        if TimesOutOnce.timed_out:
            self._real.commit_transaction(timeout)
            return
        TimesOutOnce.timed_out = True
        if TimesOutOnce.arrives:
            self._real.commit_transaction(30)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "injected"))


class TrustsTimeout(TimesOutOnce):
    """A producer that takes a commit that timed out for failed."""

    def commit(self, *arguments):
        outcome = super().commit(*arguments)
        return Aborted(None, record_at_fault=False) if isinstance(outcome, Ended) else outcome


class TrustsCommit(TimesOutOnce):
    """A producer that takes a commit that timed out for done."""

    def commit(self, *arguments):
        outcome = super().commit(*arguments)
        return Committed() if isinstance(outcome, Ended) else outcome


# -- 8. No transaction begins in an epoch in which an EndTxn may have been sent twice


class TrustsItsEpoch(RecordProducer):
    """A producer that stays in its epoch although a late EndTxn may be on its way."""

    must_replace = False

    def begin(self):
        self._must_replace = False
        return super().begin()


# -- 9. A torn transaction is recognised: opening first, manifest when all has arrived


class TakesTransactionsForWhole(Term):
    """A term without an opening, which writes the manifest behind the records whether or not they arrive."""

    def _send_opening(self, producer, records):
        del producer, records

    def _commit(self, producer, records):
        if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
            return producer.abort()
        return self._send_manifest(producer, records) or self._end(producer)


class Gate:
    """An event that happens once, for which threads wait."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def wait(self) -> None:
        assert self._opened.wait(60), "the gate was never opened"
