"""Exactly-once delivery without services: an outbox in memory, a cluster that obeys, and the harvest thread's own code.

What Kafka does is decided by topic: it takes what is sent, does not let us write, does not answer, or is not there.
"""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from uuid import uuid4

from outbox_core.election import Leadership, now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest import term as term_module
from outbox_core.harvest.exactly_once import ExactlyOnce
from outbox_core.harvest.floor import SettledFloor
from outbox_core.harvest.lanes import lane_of
from outbox_core.harvest.meter import Meter
from outbox_core.harvest.pace import News
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.record_producer import Sent
from outbox_core.harvest.send_window import SendWindow
from outbox_core.harvest.store_thread import StoreThread
from outbox_core.harvest.surroundings import DeadLetters, Surroundings, Timing
from outbox_core.harvest.tracking import Ledger
from outbox_core.harvest.transaction import Aborted, Committed, Ended
from outbox_core.kafka import KafkaError
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_FLOOR, NO_HOLDS, NO_LIMIT, HoldSet, NewHold, Sight, StoredRecord

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
        failing_scans: how many of the next scans fail.
        during_scan: called between the snapshot of every scan and its answer.
    """

    def __init__(self):
        self.rows = {}
        self.held = []
        self.kept = {}
        self.failing_scans = 0
        self.during_scan = lambda: None
        self._last_id = 0
        self._lock = threading.RLock()

    def add(self, topic, count=1, *, key=None, value=b"v"):
        """Stash records; a key each, unless all have the same. Returns the last one's id."""
        with self._lock:
            for identity in range(self._last_id + 1, self._last_id + count + 1):
                row = StoredRecord(identity, topic, key or f"k{identity}", value, None, None, -1, identity)
                self.rows[identity] = row
            self._last_id += count
            return self._last_id

    def request(self, identity):
        """Hold a record and ask for it as a dead letter."""
        record = self.rows[identity]
        self.held.append(NewHold(record.topic, record.key, identity, "refused", "boo", dead_letter=True))

    def left(self):
        """The ids that are still there."""
        return sorted(self.rows)

    # -- the store

    def sight(self):
        return Sight(0, None, frozenset(), "there are no sequences here")

    def scan(self, limit, in_flight, excluding=(), floor=NO_FLOOR, *, max_bytes=NO_LIMIT, holds=NO_HOLDS):
        del floor, max_bytes
        with self._lock:
            if self.failing_scans:
                self.failing_scans -= 1
                raise StoreUnavailable("canceling statement due to statement timeout")
            found = [
                row
                for identity, row in sorted(self.rows.items())
                if identity not in in_flight and lane_of(row) not in excluding and not holds.covers(row)
            ]
        self.during_scan()
        return found[:limit]

    def holds(self):
        held = list(self.held)
        return HoldSet(
            frozenset(hold.topic for hold in held if hold.key is None and hold.record_id is None),
            frozenset((hold.topic, hold.key) for hold in held if hold.key is not None),
            frozenset(hold.record_id for hold in held if hold.key is None and hold.record_id is not None),
            {hold.record_id: hold.error for hold in held if hold.dead_letter},
        )

    def hold(self, holds):
        self.held += [hold for hold in holds if hold not in self.held]

    def fetch(self, ids):
        held = {hold.record_id for hold in self.held}
        return [self.rows[identity] for identity in ids if identity in self.rows and identity in held]

    def settle(self, ids, create_times):
        del create_times
        with self._lock:
            return sum(self.rows.pop(identity, None) is not None for identity in ids)

    def bury(self, ids, create_times):
        self.held = [hold for hold in self.held if hold.record_id not in ids]
        return self.settle(ids, create_times)

    def keep(self, ids, error):
        self.kept |= dict.fromkeys(ids, error)
        self.held = [hold._replace(dead_letter=hold.dead_letter and hold.record_id not in ids) for hold in self.held]
        return len(ids)

    def release_gone(self):
        return 0

    def is_empty(self):
        return not self.rows

    def close(self):
        pass


class Cluster:
    """What Kafka does, by topic.

    Attributes:
        forbidden: topics that we may not write to. A transaction with one of them breaks its producer.
        silent: topics that do not acknowledge anything.
        missing: topics that are not there.
        tells: whether it says where we may not write.
        breaks: how many of the next commits break their producer for no such reason.
        breaking: topics that break the producer, of which Kafka does not say why.
        hesitates: how many of the next commits must be aborted for a reason that is about no record.
        refusing: topics that we may not write to, of which only the delivery reports tell.
        transactions: what was attempted: the topics of each, without the tracking topic.
        published: ids of what was committed, by topic.
    """

    def __init__(self):
        self.forbidden, self.silent, self.missing = set(), set(), set()
        self.tells = True
        self.breaks = self.hesitates = 0
        self.breaking, self.refusing = set(), set()
        self.transactions = []
        self.published = {}


class Producer:
    """A `TransactionalProducer` of the cluster. The client itself refuses what is poison."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._records = []
        self._failures = None

    def init(self, give_up):
        del give_up

    def discard(self):
        pass

    def limit_batches(self, max_bytes):
        self.batch_bytes = max_bytes

    def begin(self):
        self._records = []

    def send(self, records, give_up, failures=None):
        del give_up
        self._failures = failures
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
        # A transaction that is waited for as long as any other fails in the end: the commit says so.
        return timeout_seconds >= LONG_SECONDS or not self._in(self._cluster.silent)

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
        ):
            failed = self._in(topics)
            if failed:
                if self._failures is not None:
                    self._failures += [Failure(record, KafkaError(code), partition=0) for record in failed]
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
        batch: how many records one transaction takes.
        on_poison: whether bad records become dead letters by themselves.

    Attributes:
        table: the outbox.
        cluster: Kafka.
        delivery: the leadership.
        ensured: how often the dead-letter topic was seen to.
        looks_for_marks: how often terms looked for marks.
    """

    def __init__(self, monkeypatch, *, batch=10, on_poison=True):
        self.table, self.cluster = Table(), Cluster()
        self.ensured = self.looks_for_marks = 0
        timing = Timing(
            mark_query_records=batch,
            max_in_flight_records=4 * batch,
            max_in_flight_bytes=2**20,
            lane_capacity=batch,
            mark_backoff=0.01,
            io_error_backoff=0.01,
            delivery_timeout=3.0,
            drain_timeout=5.0,
        )
        wake, metrics, leader_id = threading.Event(), HarvestMetrics(), uuid4()
        database, kafka = (
            SimpleNamespace(began=lambda _: None, ended=lambda: None, worked=lambda **_: None, faded=lambda _: None)
            for _ in range(2)
        )
        self.surroundings = Surroundings(
            elector=SimpleNamespace(leadership=Leadership(leader_id, 0, float("inf"))),
            marker=StoreThread(self.table, "test-mark", wake.set),
            purger=StoreThread(self.table, "test-purge", wake.set),
            floor=SettledFloor(metrics, now),
            metrics=metrics,
            meter=Meter(60.0, now),
            emit=lambda _: None,
            wake=wake,
            news=News(wake),
            database=database,
            kafka=kafka,
            grant_write="grant WRITE on it to User:relay",
            send_window=SendWindow(3.0, metrics),
        )
        self.dead_letters = DeadLetters(
            topic=LETTERS,
            on_poison=on_poison,
            ensure=self._ensure,
            forbidden=self._forbidden,
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
        self.timing = timing
        self.delivery = ExactlyOnce(
            leader_id, timing, self.surroundings, transactions, dead_letters=self.dead_letters, drain=True
        )
        monkeypatch.setattr(term_module, "Recovery", lambda *_: self)

    def _forbidden(self, topics):
        return topics & (self.cluster.forbidden | self.cluster.refusing) if self.cluster.tells else set()

    def _ensure(self):
        self.ensured += 1
        self.cluster.missing.discard(LETTERS)

    # -- as its terms' recovery

    def check_topic(self):
        return None

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
        self.surroundings.marker.close()
        self.surroundings.purger.close()
