"""Faults on the way to Kafka, and between two leaders: no record is lost, and the order is kept."""

import itertools
import logging
import random
import time
from collections import deque
from contextlib import ExitStack

import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.election import now
from outbox_core.errors import StoreUnavailable
from outbox_core.events import LeaderRevoked, MeterRead
from outbox_core.record import OutboxRecord
from outbox_core.schema import drop_checks_sql
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import (
    GENEROUS_SECONDS,
    FaultyProducer,
    assert_only_adjacent_repeats,
    by_key,
    identity_of,
    wait_until,
)

QUICK = {"io_error_backoff": "20ms"}


def test_delivery_errors(scene, make_topic):
    """With 2% of sends refused and 2% of reports wrong no record is lost, and every repeat is adjacent."""
    topic = make_topic()
    scene.fill(topic, 2000, keys=40)
    seeds = itertools.count()
    producers = []

    def make_producer():
        settings = scene.config().producer_settings()
        producers.append(FaultyProducer(settings, refused=0.02, misreported=0.02, seed=next(seeds)))
        return producers[-1]

    harvester = scene.drain(elector_factory=None, limits=QUICK, producer_factory=make_producer)
    messages = scene.read(topic)
    assert_only_adjacent_repeats(messages, 2000)
    assert sum(producer.faults for producer in producers) > 20
    assert len(messages) > 2000
    assert len(harvester.leader_ids) == 1, "nobody else is marked again"


class _SlowProducer(FaultyProducer):
    """A producer through which so many records a second pass; the others wait until their delivery timeout."""

    rate, timeout = 400, 3.0

    def __init__(self, settings):
        super().__init__(settings)
        self._waiting = deque()
        self._passed_at = now()
        self.timed_out = 0
        self.most_waiting = 0

    def produce(self, *message, on_delivery, headers):
        self._waiting.append((now(), message, on_delivery, headers))
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def poll(self, seconds):
        self._let_pass()
        return self._producer.poll(min(seconds, 1 / self.rate))

    flush = poll

    def _let_pass(self):
        if not self._waiting:
            self._passed_at = now()
        while self._waiting and now() - self._passed_at >= 1 / self.rate:
            self._passed_at += 1 / self.rate
            sent_at, message, on_delivery, headers = self._waiting.popleft()
            if now() - sent_at < self.timeout:
                super().produce(*message, on_delivery=on_delivery, headers=headers)
            else:
                self.timed_out += 1
                on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT), None)


def test_slow_kafka(scene, make_topic, caplog):
    """Once a slow link, or a quota, is known, no more is in flight than arrives in time, and nothing fails."""
    caplog.set_level(logging.INFO, "outbox_core.harvest")
    topic = make_topic()
    producer = _SlowProducer(scene.config().producer_settings())
    scene.fill(topic, 1800, keys=1800)
    with scene.running(producer_factory=lambda: producer):
        wait_until(lambda: scene.count() == 0, "the first ones arrive")
        timed_out, producer.most_waiting = producer.timed_out, 0
        scene.fill(topic, 2000, keys=2000, prefix="l")
        wait_until(lambda: scene.count() == 0, "the others arrive")
    assert producer.timed_out == timed_out
    assert 100 < producer.most_waiting < producer.rate * producer.timeout * 0.75
    assert len(scene.read(topic)) == 3800
    assert "Kafka acknowledges after" in caplog.text


def test_a_topic_that_is_away_takes_no_room(scene, make_topic, caplog):
    """With nine of ten records for a topic that does not answer, the others arrive before one of them times out.

    That is so even under a limit of the records in flight, as Kafka was slow a moment ago.
    """
    caplog.set_level(logging.INFO, "outbox_core.harvest")
    topic, away = make_topic(), make_topic()
    scene.fill(topic, 500, keys=500)
    swallowed, delays = [], [2.0]

    class Swallowing(FaultyProducer):
        def produce(self, topic, *message, on_delivery, headers):
            def report(error, message):
                while delays:
                    time.sleep(delays.pop())
                on_delivery(error, message)

            if topic == away:
                swallowed.append(on_delivery)
            else:
                super().produce(topic, *message, on_delivery=report, headers=headers)

        def purge(self, **options):
            self._producer.purge(**options)
            while swallowed:
                swallowed.pop()(KafkaError(KafkaError._PURGE_QUEUE), None)

    producer = Swallowing(scene.config().producer_settings())
    harvester = scene.harvester(producer_factory=lambda: producer)
    harvester.start()
    wait_until(lambda: "Kafka acknowledges after" in caplog.text, "there is a limit")
    scene.execute("BEGIN")
    scene.fill(away, 5000, keys=5000)
    scene.execute("UPDATE outbox SET kafka_topic = %s WHERE kafka_topic = %s AND id %% 10 = 0", [topic, away])
    scene.execute("COMMIT")
    assert len(scene.read(topic, count=1000)) == 1000
    wait_until(lambda: len(swallowed) == 4500, "none of them waits for room")
    harvester.stop()
    assert harvester.join(GENEROUS_SECONDS)
    assert scene.count() == 4500


def test_too_large_record_does_not_stop_other_keys(scene, make_topic, monkeypatch):
    """Without holds a record that Kafka refuses is retried with growing pauses; its key waits in order, others flow."""
    scene.execute("DROP TABLE outbox_hold")
    topic = make_topic()
    scene.stash(OutboxRecord(topic, "large", b"x" * 1_100_000), OutboxRecord(topic, "large", b"behind"))
    scene.fill(topic, 500, keys=20)
    attempts = []

    class Watching(FaultyProducer):
        def produce(self, topic, value, *rest, **options):
            if len(value) > 1_000_000:
                attempts.append(now())
            super().produce(topic, value, *rest, **options)

    monkeypatch.setattr("outbox_core.harvest.parts.make_producer", Watching)  # also of records that are tried alone
    harvester = scene.harvester(
        limits=QUICK,
        config={"producer_kafka_config": {"message.max.bytes": 2_000_000}},  # larger values are not even read
    )
    harvester.start()
    assert len(scene.read(topic, count=500)) == 500
    wait_until(lambda: scene.count() == 2, "all other rows are gone")
    wait_until(lambda: len(attempts) >= 6, "it is tried again")
    scene.stash(OutboxRecord(topic, "later", b"flows"))
    assert len(scene.read(topic, count=501)) == 501
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    pauses = pauses[1:6]  # the second try is at once, by itself
    assert all(pause > 0.002 * 2**number * 0.9 for number, pause in enumerate(pauses)), pauses
    scene.execute("UPDATE outbox SET kafka_value = 'small' WHERE length(kafka_value) > 1000000")
    messages = scene.read(topic, count=503)
    harvester.stop()
    harvester.join()
    assert by_key(messages)[b"large"] == [b"small", b"behind"]
    assert scene.count() == 0


def test_row_that_is_no_message_does_not_end_the_harvester(scene, make_topic):
    """Unchecked rows with impossible topics, partitions or headers do not end the harvester."""
    topic = make_topic()
    scene.execute(drop_checks_sql(scene.table))
    scene.stash(OutboxRecord(topic, "a", b"1", partition=1_000_000))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_partition) VALUES ('not a topic!', 'a', NULL),"
        " ('', 'a', NULL), (%s, 'b', -5)",
        [topic],
    )
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys) VALUES (%s, 'c', '{a}')", [topic])
    scene.stash(OutboxRecord(topic, "fine", b"2"))
    with scene.running(limits=QUICK):
        assert [message.value for message in scene.read(topic, count=1)] == [b"2"]
        wait_until(lambda: scene.count("kafka_key = 'fine'") == 0, "the good row is gone")


def test_full_producer_queue(scene, make_topic):
    """With a producer queue of five records the others are sent later."""
    topic = make_topic()
    scene.fill(topic, 1000, keys=None)
    settings = scene.config().producer_settings() | {"queue.buffering.max.messages": 5}
    producer = FaultyProducer(settings)
    harvester = scene.drain(producer_factory=lambda: producer)
    assert sorted(int(message.value) for message in scene.read(topic)) == list(range(1, 1001))
    assert producer.longest_queue <= 5
    assert harvester.kinds(without=MeterRead) == ["LeaderAcquired", "LeaderRevoked"]


def test_fatal_producer_error(scene, make_topic):
    """A producer that has failed for good is replaced, and its successor sends the records in its queue."""
    topic = make_topic()
    scene.fill(topic, 300, keys=10)
    producers = []

    class Dying(FaultyProducer):
        """A producer after a fatal error, as in librdkafka: `poll` reports it once, then `produce` refuses."""

        told = False

        def produce(self, *record, **options):
            if self.told:
                raise KafkaException(KafkaError(KafkaError._FATAL, "Unable to produce message"))
            super().produce(*record, **options)

        def poll(self, timeout):
            if len(producers) == 1 and not self.told:
                self.told = True
                self._producer.purge()
                raise KafkaException(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "dead", True))
            return self._producer.poll(timeout)

        flush = poll

    def make_producer():
        producers.append(Dying(scene.config().producer_settings()))
        return producers[-1]

    scene.drain(limits=QUICK, producer_factory=make_producer)
    assert len(producers) == 2
    assert_only_adjacent_repeats(scene.read(topic), 300)


_AUDIT = [
    """CREATE TABLE audit (id bigint, operation text, before uuid, after uuid, actor text)""",
    """CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         INSERT INTO public.audit VALUES (OLD.id, TG_OP, OLD.leader_id, CASE TG_OP WHEN 'UPDATE' THEN NEW.leader_id END,
                                   current_setting('application_name'));
         RETURN NULL; END $$""",
    "CREATE TRIGGER audit AFTER UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION audit()",
]


def test_two_leaders_never_touch_each_others_rows(scene, make_topic):
    """Two harvesters that both lead may repeat records, but neither purges nor resets rows that the other marked."""
    topic = make_topic()
    for statement in _AUDIT:
        scene.execute(statement)
    limits = QUICK | {"mark_query_records": 20, "max_in_flight_records": 40}

    def make_producer():
        return FaultyProducer(scene.config().producer_settings(), refused=0.01)

    rivals = [scene.harvester(name=name, limits=limits, producer_factory=make_producer) for name in ("a", "b")]

    def look():
        owner = {leader_id: rival.config.name for rival in rivals for leader_id in rival.leader_ids}
        return owner, scene.execute("SELECT *, substr(actor, length('kafka-outbox ') + 1) AS name FROM audit")

    def have_met():
        if scene.count() == 0:
            scene.fill(topic, 1500, keys=30)
        owner, audit = look()
        return any(row.before and row.after and owner.get(row.before) != owner.get(row.after) for row in audit)

    for rival in rivals:
        rival.start()
    try:
        wait_until(have_met, "one marks a row that the other had marked")
        wait_until(lambda: scene.count() == 0, "all is published")
    finally:
        for rival in rivals:
            rival.stop()
            rival.join(GENEROUS_SECONDS)
    owner, audit = look()
    assert {row.name for row in audit} == {"a", "b"}
    for row in audit:
        if row.after is None:  # a purge or a reset
            assert owner.get(row.before) == row.name, row
        else:
            assert owner[row.after] == row.name, row
    assert {int(message.value) for message in scene.read(topic)} == set(range(1, 1501))


def test_lost_marks_are_marked_again(scene, make_topic):
    """Rows whose marks are replaced by a stranger's are marked and published again, and not lost."""
    topic = make_topic()
    scene.execute(
        """CREATE FUNCTION steal() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF OLD.leader_id IS NULL AND random() < 0.05 THEN NEW.leader_id := gen_random_uuid(); END IF;
             RETURN NEW; END $$"""
    )
    scene.execute("CREATE TRIGGER steal BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION steal()")
    scene.fill(topic, 300, keys=10)
    harvester = scene.drain(limits=QUICK)
    assert len(harvester.leader_ids) > 1
    assert_only_adjacent_repeats(scene.read(topic), 300)


class _LostAnswers(PostgresStore):
    """A store that does its work and then, one time in three, loses the connection before the answer.

    Losses are random: every third call could be the same step of each round, and no round would ever end.
    """

    def _lose(self, answer):
        if random.random() < 1 / 3:
            self.close()
            raise StoreUnavailable("the answer is lost", in_doubt=True)
        return answer

    def mark(self, *arguments, **limits):
        return self._lose(super().mark(*arguments, **limits))

    def purge(self, *arguments):
        return self._lose(super().purge(*arguments))

    def reset(self, *arguments):
        return self._lose(super().reset(*arguments))


def test_lost_answers_of_the_database(scene, make_topic):
    """Statements that took effect although the connection died before the answer neither hide nor reverse records."""
    topic = make_topic()
    scene.fill(topic, 300, keys=10)
    scene.drain(limits=QUICK | {"mark_query_records": 40}, store_factory=lambda: _LostAnswers(scene.database))
    assert_only_adjacent_repeats(scene.read(topic), 300)


def test_rows_with_our_own_mark_that_are_put_back(scene, make_topic, monkeypatch, caplog):
    """Rows that were copied while they were marked, and are put back, are published under load, and the log tells."""
    monkeypatch.setattr("outbox_core.harvest.at_least_once.loop._LOOK_FOR_LOST_EVERY_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.harvest.watermark._FROM_HEAD_BUSY_SECONDS", 1.0)
    topic = make_topic()
    with scene.running() as harvester:
        scene.fill(topic, 20)
        wait_until(lambda: scene.count() == 0, "it publishes")
        scene.execute(
            "INSERT INTO outbox (id, kafka_topic, kafka_key, leader_id) OVERRIDING SYSTEM VALUE"
            " SELECT n, %s, 'back', %s FROM generate_series(3, 9) AS n",
            [topic, harvester.leader_id],
        )
        while scene.count("kafka_key = 'back'"):
            scene.fill(topic, 20)
            assert scene.count() < 20_000, "they wait in vain"
            time.sleep(0.05)
        wait_until(lambda: scene.count() == 0, "the others go on")
    assert caplog.text.count("7 rows of the outbox (ids 3 to 9) carry the mark of this leadership") == 1
    assert [identity_of(message) for message in scene.read(topic) if message.key == b"back"] == list(range(3, 10))


class _FailsOver(PostgresStore):
    """A store whose server fails over when `lost` is set: the next answer about holds, or an empty table, is missing.

    On the new server rows are back that had been purged, with their marks.
    """

    def __init__(self, scene):
        super().__init__(scene.database)
        self.lost = None
        self._scene = scene
        read = self.holds.read
        self.holds.read = lambda **options: read(**options) if self.lost is None else self._fail_over()

    def _fail_over(self):
        (topic, leader_id), self.lost = self.lost, None
        self._scene.execute(
            "INSERT INTO outbox (leader_id, kafka_topic, kafka_value, kafka_header_keys, kafka_header_values)"
            " VALUES (%s, %s, 'back', '{}', '{}')",
            [leader_id, topic],
        )
        self.close()
        raise StoreUnavailable("the connection is lost", in_doubt=True)


def test_purge_that_a_failover_undid_is_no_hidden_row(scene, make_topic):
    """Rows that come back with our own mark are published again, whichever statement meets the failover."""
    topic = make_topic()
    scene.hold("add", topic="another")
    stores = []

    def store():
        stores.append(_FailsOver(scene))
        return stores[-1]

    with scene.running(limits=QUICK, store_factory=store) as harvester:
        scene.fill(topic, 1, keys=None)
        wait_until(lambda: scene.count() == 0, "it is published")
        for each in stores:
            each.lost = topic, harvester.leader_id
        wait_until(lambda: any(each.lost is None for each in stores), "the failover")
        wait_until(lambda: scene.count() == 0, "what came back is published")
    assert {message.value for message in scene.read(topic)} == {b"1", b"back"}


def test_connections_that_die_lose_nothing(scene, make_topic, caplog):
    """Harvesting goes on over new connections after the database has ended the old ones at any moment."""
    topic = make_topic()
    scene.fill(topic, 1500, keys=10)
    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(scene.database, autocommit=True))
        harvester = scene.harvester(limits=QUICK | {"mark_query_records": 50}, drain=True)
        harvester.start()
        for remaining in (1300, 1000, 600, 200):
            wait_until(lambda remaining=remaining: scene.count() < remaining, "it goes on")
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'kafka-outbox%' AND datname = current_database()"
            )
        assert harvester.join(GENEROUS_SECONDS)
    assert_only_adjacent_repeats(scene.read(topic), 1500)
    told = [record.message for record in caplog.records if record.message.startswith("database")]
    began = sum(message.endswith("; retrying") for message in told)  # a second reason is told with its time
    assert began == sum("back after" in message for message in told) >= 1


def test_crash_settles_what_is_in_flight_before_the_hand_over(scene, make_topic, monkeypatch):
    """A harvester that an error ends also hands over only once no record is on its way to Kafka."""
    topic = make_topic()
    scene.fill(topic, 10, keys=None)
    queued = []

    class Slow(FaultyProducer):
        def flush(self, timeout):
            return self._producer.poll(timeout)  # lets records linger

    producer = Slow(scene.config().producer_settings() | {"linger.ms": 1000})

    def on_event(event):
        if isinstance(event, LeaderRevoked):
            queued.append(len(producer))

    harvester = scene.harvester(on_event=on_event, producer_factory=lambda: producer)
    harvester.start()
    wait_until(lambda: len(producer) == 10, "records are in flight")

    def crash(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(PostgresStore, "mark", crash)
    with pytest.raises(RuntimeError, match="a defect"):
        harvester.join(GENEROUS_SECONDS)
    assert queued == [0]
