"""Exactly-once delivery without services: an outbox in memory, a cluster that obeys, and the harvest thread's own code.

Each topic decides what Kafka does: take records, refuse the right to write, not answer, or be missing.
"""

import logging
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from uuid import uuid4

from outbox_core.commit_signal import CommitFlag
from outbox_core.election import Leadership, now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.at_least_once.send_window import SendWindow
from outbox_core.harvest.context import DeadLetterTopic, HarvestContext, HarvestLimits
from outbox_core.harvest.exactly_once import term as term_module
from outbox_core.harvest.exactly_once.terms import ExactlyOnce
from outbox_core.harvest.store_calls import StoreThread
from outbox_core.harvest.watermark import LowWatermark
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import Sent
from outbox_core.kafka.tracking import Ledger
from outbox_core.kafka.transactions import Aborted, Committed, Ended
from outbox_core.metrics import HarvestMetrics
from outbox_core.monitoring.meter import Meter
from outbox_core.outage import Outage
from outbox_core.stores.interface import HoldSet, NewHold, SequenceSnapshot, StoredRecord, lane_of, row_id

TRACKING, LETTERS = "tracking", "letters"
POISON = b"poison"
LONG_SECONDS = 10.0
_LONGEST_SECONDS = 20.0


class Table:
    """An outbox and its holds; an `OutboxStore` as far as exactly-once delivery goes.

    Attributes:
        rows: by id.
        held: the holds.
        kept: records that the dead-letter topic refused, with the error.
        failing_scans: number of the next scans that fail.
        during_scan: called between the snapshot of every scan and its answer.
    """

    def __init__(self):
        self.rows = {}
        self.held = []
        self.kept = {}
        self.failing_scans = 0
        self.during_scan = lambda: None
        self._last_id = self._first_time = 0
        self._lock = threading.RLock()
        self.sequence = self
        self.holds = FakeHolds(self)

    def add(self, topic, count=1, *, key=None, value=b"v"):
        """Stash records, a key each unless all have the same; return the last one's id."""
        with self._lock:
            for identity in range(self._last_id + 1, self._last_id + count + 1):
                time = self._first_time + identity
                row = StoredRecord(identity, topic, key or f"k{identity}", value, None, None, -1, time)
                self.rows[identity] = row
            self._last_id += count
            return self._last_id

    def restart(self):
        """Truncate the table and restart its ids; rows that are added later are younger."""
        with self._lock:
            self.rows.clear()
            self._first_time += self._last_id
            self._last_id = 0

    def request(self, identity):
        """Hold a record and ask for it as a dead letter."""
        record = self.rows[identity]
        self.held.append(NewHold(record.topic, record.key, identity, "refused", "boo", dead_letter=True))

    def left(self):
        """Return the ids that are still there."""
        return sorted(self.rows)

    # -- the store

    def snapshot(self):
        return SequenceSnapshot(0, None, frozenset(), "there are no sequences here")

    def scan(self, query):
        with self._lock:
            if self.failing_scans:
                self.failing_scans -= 1
                raise StoreUnavailable("canceling statement due to statement timeout")
            found = [
                row
                for _, row in sorted(self.rows.items())
                if row_id(row) not in map(row_id, query.without_rows)
                and lane_of(row) not in query.without_keys
                and row.topic not in query.without_topics
                and not query.holds.covers(row)
                and (query.only_rows is None or row_id(row) in query.only_rows)
            ]
        self.during_scan()
        return found[: query.limit]

    def delete_published(self, ids, create_times):
        with self._lock:
            published = [row for row in map(self.rows.get, ids) if row and row.create_time in create_times]
            return sum(self.rows.pop(row.id, None) is not None for row in published)

    def find(self, ids):
        with self._lock:
            return [self.rows[identity] for identity in sorted(ids) if identity in self.rows]

    def is_empty(self):
        return not self.rows

    def close(self):
        pass


class FakeHolds:
    """The holds of a `FakeStore`."""

    def __init__(self, store):
        self.store = store

    def read(self):
        held = list(self.store.held)
        return HoldSet(
            frozenset(hold.topic for hold in held if hold.key is None and hold.record_id is None),
            frozenset((hold.topic, hold.key) for hold in held if hold.key is not None),
            frozenset(hold.record_id for hold in held if hold.key is None and hold.record_id is not None),
            {hold.record_id: hold.error for hold in held if hold.dead_letter},
        )

    def add(self, holds):
        self.store.held += [hold for hold in holds if hold not in self.store.held]

    def fetch(self, ids):
        rows, held = self.store.rows, {hold.record_id for hold in self.store.held}
        return [rows[identity] for identity in ids if identity in rows and identity in held]

    def delete_dead_lettered(self, ids, create_times):
        self.store.held = [hold for hold in self.store.held if hold.record_id not in ids]
        return self.store.delete_published(ids, create_times)

    def refuse_dead_letters(self, ids, error):
        self.store.kept |= dict.fromkeys(ids, error)
        self.store.held = [
            hold._replace(dead_letter=hold.dead_letter and hold.record_id not in ids) for hold in self.store.held
        ]
        return len(ids)

    def release_gone(self):
        return 0


class Cluster:
    """A Kafka cluster whose behaviour depends on the topic.

    Attributes:
        forbidden: topics that we may not write to. A transaction with one of them breaks its producer.
        silent: topics that do not acknowledge anything.
        slow: seconds after which a topic acknowledges what is waited for as long.
        missing: topics that are not there.
        tells: whether it names the topics that we may not write to.
        breaks: number of the next commits that break their producer for another reason.
        breaking: topics that break the producer without a reason.
        hesitates: number of the next commits that must be aborted for a reason that is about no record.
        refusing: topics that we may not write to, as only the delivery reports say.
        refused: values that the broker refuses.
        transactions: the attempted ones: the topics of each, without the tracking topic.
        published: ids of the committed records, by topic.
    """

    def __init__(self):
        self.forbidden, self.silent, self.missing = set(), set(), set()
        self.tells = True
        self.breaks = self.hesitates = 0
        self.breaking, self.refusing, self.refused = set(), set(), set()
        self.slow = {}
        self.transactions = []
        self.published = {}


class Producer:
    """A `TransactionalProducer` of the cluster. The client itself refuses poison."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._records = []
        self._reports = None

    def init(self, give_up):
        del give_up

    def discard(self):
        pass

    def limit_batches(self, max_bytes, *, unbatched=False):
        self.batch_bytes, self.is_unbatched = max_bytes, unbatched

    def begin(self):
        self._records = []

    def send(self, records, give_up, reports=None):
        del give_up
        self._reports = reports
        sent, stopped = Sent([], []), set()
        for record in records:
            if lane_of(record) in stopped:
                continue
            if record[3] == POISON and record[1] != LETTERS:
                sent.refused.append(Failure(record, KafkaError(KafkaError._INVALID_ARG), alone=True))
                stopped.add(lane_of(record))
            else:
                sent.records.append(record)
        self._records = list(sent.records)
        self.sent = sent.records
        return sent

    must_replace = False
    manifest_offset = 0

    @property
    def failure(self):
        return None

    def send_manifest(self, topic, value, partition=0, *, key=None):
        del topic, value, partition, key

    def all_arrive(self, timeout_seconds, give_up=lambda: False):
        del give_up
        cluster = self._cluster
        late = {topic for topic, seconds in cluster.slow.items() if seconds > timeout_seconds}
        if self._reports is not None:
            failing = cluster.silent | cluster.missing | cluster.refusing | late
            self._reports.arrived = [
                record for record in self._records if record[1] not in failing and record.value not in cluster.refused
            ]
        # A transaction that is waited for as long as any other fails in the end: the commit says so.
        return timeout_seconds >= LONG_SECONDS or not self._in(cluster.silent | late)

    def abort(self, cause=None, give_up=lambda: False):
        del give_up
        self._note()
        return Aborted(cause, record_at_fault=cause is not None)

    def commit(self, give_up=lambda: False):
        del give_up
        cluster = self._cluster
        self._note()
        if cluster.breaks:
            cluster.breaks -= 1
            return Ended("broken")
        if cluster.hesitates and self._records:
            cluster.hesitates -= 1
            return Aborted(KafkaError(KafkaError.NOT_COORDINATOR), record_at_fault=False)
        if self._in(cluster.breaking):
            return Ended("the commit's outcome is unknown: invalid state")
        if self._in(cluster.forbidden) or TRACKING in cluster.forbidden:
            return Ended("broken", KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
        for topics, code in (
            (cluster.refusing, KafkaError.TOPIC_AUTHORIZATION_FAILED),
            (cluster.missing, KafkaError.UNKNOWN_TOPIC_OR_PART),
            (cluster.silent, KafkaError._MSG_TIMED_OUT),
            (cluster.refused, KafkaError.INVALID_RECORD),
        ):
            failed = self._in(topics)
            if topics is cluster.refused:
                failed = [record for record in self._records if record.value in topics]
            if failed:
                if self._reports is not None:
                    self._reports.failures += [
                        Failure(record, KafkaError(code), self.is_unbatched, partition=0) for record in failed
                    ]
                return Aborted(KafkaError(code), record_at_fault=True)
        for record in self._records:
            cluster.published.setdefault(record[1], []).append(record[0])
        return Committed()

    def _in(self, topics):
        return [record for record in self._records if record[1] in topics]

    def _note(self):
        if self._records:
            self._cluster.transactions.append({record[1] for record in self._records})


class World:
    """One leadership over a table and a cluster.

    Args:
        monkeypatch: puts a recovery that has nothing to recover in the place of the real one.
        batch: number of records in one transaction.
        on_poison: whether bad records become dead letters by themselves.

    Attributes:
        table: the outbox.
        cluster: Kafka.
        delivery: the leadership.
        ensured: number of times that the dead-letter topic was ensured.
        looks_for_marks: number of times that terms searched for marks.
    """

    def __init__(self, monkeypatch, *, batch=10, on_poison=True):
        self.table, self.cluster = Table(), Cluster()
        self.ensured = self.looks_for_marks = 0
        limits = HarvestLimits(
            mark_query_records=batch,
            most_in_transaction=batch,
            max_in_flight_records=4 * batch,
            max_in_flight_bytes=2**20,
            lane_capacity=batch,
            mark_backoff=0.01,
            io_error_backoff=0.01,
            delivery_timeout=3.0,
            drain_timeout=5.0,
            max_message_bytes=2**20,
        )
        wake, metrics, leader_id = threading.Event(), HarvestMetrics(), uuid4()
        self.ctx = HarvestContext(
            elector=SimpleNamespace(leadership=Leadership(leader_id, 0, float("inf"))),
            limits=limits,
            marker=StoreThread(self.table, "test-mark", wake.set),
            purger=StoreThread(self.table, "test-purge", wake.set),
            watermark=LowWatermark(metrics, now),
            metrics=metrics,
            meter=Meter(60.0, now),
            emit=lambda _: None,
            wake=wake,
            commits=CommitFlag(wake),
            database=Outage("database", logging.getLogger(__name__)),
            kafka=Outage("kafka", logging.getLogger(__name__)),
            dead_letters=DeadLetterTopic(
                topic=LETTERS, on_poison=on_poison, ensure=self._ensure, forbidden=self._forbidden
            ),
            grant_write="grant WRITE on it to User:relay",
            send_window=SendWindow(3.0, metrics),
            batches=BatchSizes(),
            removal=Outage("removal", logging.getLogger(__name__)),
        )
        transactions = SimpleNamespace(
            new_producer=lambda: Producer(self.cluster),
            begin=lambda producer, *_: producer.begin(),
            tracking_topic=TRACKING,
            outbox="d.s.t",
            transactional_id="d.s.t",
            timeout=LONG_SECONDS,
            heartbeat_timeout=1.0,
            reached=lambda _: None,
        )
        self.delivery = ExactlyOnce(leader_id, self.ctx, transactions, drain=True)
        monkeypatch.setattr(term_module, "Recovery", lambda *_: self)

    def _forbidden(self, topics):
        return topics & (self.cluster.forbidden | self.cluster.refusing) if self.cluster.tells else set()

    def _ensure(self):
        self.ensured += 1
        self.cluster.missing.discard(LETTERS)

    # -- as its terms' recovery

    def settle(self, producer):
        del producer

    ledger = Ledger()

    def server_id(self):
        return "1"

    def refuse_marks(self):
        self.looks_for_marks += 1

    # -- life

    def run(self):
        """Harvest until the table is drained."""
        timer = threading.Timer(_LONGEST_SECONDS, self.delivery.stop)
        timer.start()
        try:
            self.delivery.run()
        finally:
            timer.cancel()
            self.close()

    @contextmanager
    def running(self):
        """Harvest on another thread within the context, drained or not."""
        self.delivery.drain = False
        thread = threading.Thread(target=self.delivery.run)
        thread.start()
        try:
            yield
        finally:
            self.delivery.stop()
            thread.join()
            self.close()

    def close(self):
        self.ctx.marker.close()
        self.ctx.purger.close()
