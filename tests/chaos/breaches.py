"""The rules of exactly-once delivery, each deliberately broken: what `test_rules` puts in the product's place.

Every class here changes as little as possible of the class it derives from. `Forced...` classes break nothing: they
only bring about, every time, the moment at which the rule matters, for the right product and the broken one alike.
"""

import threading
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from outbox_core.election.leadership import now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest import recovery
from outbox_core.harvest.record_producer import RecordProducer
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.term import Term
from outbox_core.harvest.tracking import _Reader, reader_settings
from outbox_core.harvest.transaction import Aborted, Committed, Ended
from outbox_core.kafka import TopicPartition, make_consumer
from outbox_core.stores.postgres import PostgresStore

# -- 1. The set of ids in flight is copied before the scan is sent, and that copy applies


class ForcedOverlap(Term):
    """The next batch is scanned before this one is committed, and looked at once this one is purged.

    From the head, as where there is no settled floor, which would hide that the set is wrong.
    """

    def _start_scan(self):
        self._with.floor.reset("the set of ids alone must do")
        super()._start_scan()
        if self._scanning is not None:
            self._waiting.until_done(self._scanning)

    def _collect_scan(self):
        self._purge_is_committed(None)
        return super()._collect_scan()


class ScansWhatIsInFlight(ForcedOverlap):
    """The scan excludes what awaits its purge, but not the batch that is being published."""

    def _start_scan(self):
        in_flight, self._in_flight = self._in_flight, {record[0] for record in self._unpurged}
        super()._start_scan()
        self._in_flight = in_flight


class ExcludesAfterTheScan(ForcedOverlap):
    """The scan is compared with the ids that are in flight when it has ended."""

    def _start_scan(self):
        in_flight, self._in_flight = self._in_flight, set()
        super()._start_scan()
        self._in_flight = in_flight

    def _collect_scan(self):
        scanned = super()._collect_scan()
        return scanned._replace(records=[record for record in scanned.records if record[0] not in self._in_flight])


# -- 2. An abort throws away what was scanned and not published


class KeepsScannedRows(Term):
    """The batch that was scanned meanwhile is published although the one before it was aborted."""

    def _discard(self, aborted, records):
        scanning, self._scanning = self._scanning, None
        super()._discard(aborted, records)
        self._scanning = scanning


class FailsOnce(RecordProducer):
    """The broker could not take a record of the first transaction."""

    failed = False

    def commit(self, *arguments):
        if not FailsOnce.failed:
            FailsOnce.failed = True
            return self.abort(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS, "injected"))
        return super().commit(*arguments)


# -- 3. A delete matches id and create time


class MatchesIdsAlone(PostgresStore):
    """Rows of the manifest are recognised by their ids."""

    def settle(self, ids, create_times):
        del create_times
        return self._execute(self._format("DELETE FROM {table} WHERE id = ANY (%(ids)s)"), {"ids": list(ids)}).rowcount


# -- 4. The manifest is read after init_transactions()


class ReadsManifestFirst(Recovery):
    """The predecessor may still commit between our reading and the fence."""

    def settle(self, producer):
        with_all, partition = self._transactions, TopicPartition(self._transactions.tracking_topic, 0)
        settings = reader_settings(with_all.kafka, with_all.group) | {"isolation.level": "read_uncommitted"}
        end = make_consumer(settings).get_watermark_offsets(partition, timeout=10, cached=False)[1]
        names = with_all.tracking_topic, 0, with_all.transactional_id
        ledger = recovery.read_ledger(with_all.kafka, with_all.group, *names, end=end - 3, give_up=self._over)
        ended = producer.init(self._over)
        if ended is None and ledger.manifest is not None:
            self._delete(ledger.manifest.ids, ledger.manifest.create_times)
        return ended


# -- 5. The purge of a batch is committed before the commit of the next one is sent


class CommitsBeforePurge(Term):
    """The last manifest alone no longer lists all that is in Kafka and still in the table."""

    def _commit(self, producer, records):
        producer.all_arrive(10)
        return self._send_manifest(producer, records) or producer.commit()


class NeverPurges(PostgresStore):
    """The database does not take deletes."""

    def settle(self, ids, create_times):
        del ids, create_times
        raise StoreUnavailable("injected: no deletes", in_doubt=True)


# -- 6. The tracking topic is read up to the barrier, whatever its end is said to be


class ReadsToStableOffset(_Reader):
    """What lies behind another's open transaction, or is not told by a broker, is taken not to exist."""

    def ledger(self, transactional_id, end):
        place = TopicPartition(self._topic, self._partition)
        stable = self._consumer.get_watermark_offsets(place, timeout=10, cached=False)[1]
        return super().ledger(transactional_id, min(end, stable))


# -- 7. Nobody knows the outcome of a commit that timed out


class TimesOutOnce(RecordProducer):
    """The answer to the first commit never comes.

    Attributes:
        arrives: whether the commit does.
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
    """A commit that timed out is taken to have failed."""

    def commit(self, *arguments):
        outcome = super().commit(*arguments)
        return Aborted(None, record_at_fault=False) if isinstance(outcome, Ended) else outcome


class TrustsCommit(TimesOutOnce):
    """A commit that timed out is taken to have arrived."""

    def commit(self, *arguments):
        outcome = super().commit(*arguments)
        return Committed() if isinstance(outcome, Ended) else outcome


# -- 8. No transaction begins in an epoch in which an EndTxn may have been sent twice


class TrustsItsEpoch(RecordProducer):
    """The producer goes on in its epoch although a late EndTxn may be on its way."""

    must_replace = False

    def begin(self):
        self._must_replace = False
        return super().begin()


# -- 9. A torn transaction is recognised: opening first, manifest when all has arrived


class TakesTransactionsForWhole(Term):
    """The manifest is produced behind the records, whether they arrive or not, and nothing before them."""

    def _send_opening(self, producer, records):
        del producer, records

    def _commit(self, producer, records):
        if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
            return producer.abort()
        return self._send_manifest(producer, records) or producer.commit()


class Gate:
    """Something that happens once, for which threads wait."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def wait(self) -> None:
        assert self._opened.wait(60), "the gate was never opened"
