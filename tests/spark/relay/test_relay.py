"""The relay on Spark: killed, cut off and raced, it loses, repeats and reorders no record."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from devstack.ports import LOCALHOST
from devstack.proxy import TcpProxy
from outbox_core.errors import InvalidConfig, MarkedRowsFound
from outbox_core.kafka.duty import NEW_PATIENCE_SECONDS
from outbox_core.record import OutboxRecord
from outbox_spark.pipelines.relay import RelayConfig, RelayFailed, run_relay
from outbox_spark.relay.plan import SLICE_SECONDS
from tests.harvesting import GENEROUS_SECONDS, Scene, by_key, identity_of, standing_still, wait_until
from tests.kafka_reader import read_topic
from tests.spark.relay.outcome import assert_each_once_in_order
from tests.spark.relay.relay_process import killing

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(600)]

PROMISED_SECONDS = 45.0
SPARK_SECONDS = 240.0
"""Longer than a Spark process takes to start on a machine that does seven other things."""


class RelayProcess:
    """A relay in a process of its own."""

    def __init__(
        self,
        scene,
        directory,
        *,
        once=False,
        records=200,
        shards=2,
        fault=None,
        master="local[2]",
        spark=None,
        dsn=None,
    ):
        self.log = Path(directory) / f"relay-{os.urandom(3).hex()}.log"
        settings = {
            "dsn": dsn or scene.database,
            "table": scene.table.quoted,
            "bootstrap": scene.bootstrap,
            "records": records,
            "shards": shards,
            "once": once,
            "fault": fault,
            "master": master,
            "spark": spark or {},
        }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.relay.relay_process", json.dumps(settings)],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self):
        return self.log.read_text()

    def wait_for(self, text):
        """Wait until the log has this text."""
        wait_until(lambda: text in self.text() or self.process.poll() is not None, text, SPARK_SECONDS)
        assert text in self.text(), self.text()[-3000:]

    def wait(self):
        return self.process.wait(SPARK_SECONDS)

    def kill(self):
        """Send SIGKILL to the driver, its JVM and its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(GENEROUS_SECONDS)


@pytest.fixture
def relay_of(tmp_path):
    """Yield a factory of relay processes, which end with the test."""
    made = []

    def make(scene, **options):
        made.append(RelayProcess(scene, tmp_path, **options))
        return made[-1]

    yield make
    for relay in made:
        relay.kill()


def config_of(scene, **options):
    """Return settings of a relay in this process."""
    return RelayConfig(harvest=scene.config(delivery="exactly-once"), **{"shards": 2, "batch_records": 100} | options)


@pytest.fixture
def fault_of(tmp_path):
    """Return a function that plans the death of the `victim`, "driver", "executor" or "worker", at a row's id."""

    def make(victim, at):
        flag = tmp_path / f"{victim}-{at}"
        flag.touch()
        return {"victim": victim, "at": at, "flag": str(flag)}

    return make


def test_a_relay_publishes_all_and_ends(spark, scene, make_topic):
    """One run publishes all present rows, with one task for each shard; a later one, with more shards, the others."""
    topic = make_topic()
    scene.fill(topic, 350, keys=9)
    told = []
    run_relay(spark, config_of(scene), once=True, on_progress=told.append)
    assert_each_once_in_order(scene, topic, 350)
    assert sum(report.counts["records"] for report in told) == 350
    assert all(0 < report.longest_task <= report.seconds for report in told)
    scene.fill(topic, 50, keys=9, prefix="again")
    run_relay(spark, config_of(scene, shards=3), once=True)
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 401))
    assert scene.count() == 0


def test_a_task_that_dies_is_made_up_for(spark, scene, make_topic, fault_of):
    """After the worker of a task was killed in its transaction, the next batch publishes the missing records, once."""
    topic = make_topic()
    scene.fill(topic, 250, keys=9)
    dies = partial(killing, driver=0, **fault_of("worker", 120))
    run_relay(spark, config_of(scene, batch_records=40), once=True, transform=dies)
    assert_each_once_in_order(scene, topic, 250)


def test_a_relay_that_cannot_work_says_why(spark, scene, make_topic):
    """A relay that finds marks of an at-least-once harvester ends with that reason, and publishes no record."""
    topic = make_topic()
    scene.fill(topic, 5)
    scene.execute(f"UPDATE {scene.table.quoted} SET leader_id = gen_random_uuid() WHERE id = 3")
    with pytest.raises(MarkedRowsFound, match="carry the mark of an at-least-once harvester"):
        run_relay(spark, config_of(scene), once=True)
    assert scene.read(topic) == []


def test_a_record_that_stops_a_relay_is_named(spark, scene, make_topic):
    """A task's error about a record is the relay's, and says which."""
    topic = make_topic(1, config={"max.message.bytes": "20000"})
    scene.execute("DROP TABLE outbox_hold")  # it would be held
    scene.stash(OutboxRecord(topic=topic, key="b", value=os.urandom(50_000)))
    with pytest.raises(RelayFailed, match=f"record.* 1 .*for topic '{topic}'"):
        run_relay(spark, config_of(scene), once=True)
    assert scene.count() == 1


def test_functions_are_not_handed_to_workers(scene):
    """A setting that is a function is refused by its name, as workers could not call it."""
    config = scene.config(base_kafka_config={"bootstrap.servers": "h:1", "oauth_cb": print})
    with pytest.raises(InvalidConfig, match="oauth_cb: a function cannot be handed"):
        run_relay(None, RelayConfig(harvest=config))


@pytest.mark.complete
@pytest.mark.parametrize("at", [1, 230, 490])
def test_a_driver_that_dies(scene, make_topic, relay_of, fault_of, at):
    """After the driver was killed at some record, a relay publishes the missing ones, once, in order."""
    topic = make_topic()
    scene.fill(topic, 500, keys=9)
    dying = relay_of(scene, fault=fault_of("driver", at), records=50, once=True)
    assert dying.wait() == -signal.SIGKILL
    dying.kill()
    relay = relay_of(scene, once=True)
    assert relay.wait() == 0, relay.text()[-3000:]
    assert_each_once_in_order(scene, topic, 500)


@pytest.mark.complete
def test_an_executor_that_dies(scene, make_topic, relay_of, fault_of):
    """After an executor was killed, with speculation on, its tasks run elsewhere: all is published once, in order."""
    topic = make_topic()
    scene.fill(topic, 500, keys=9)
    options = {"spark.speculation": "true", "spark.speculation.minTaskRuntime": "1s"}
    relay = relay_of(
        scene, fault=fault_of("executor", 250), records=50, once=True, master="local-cluster[2,1,512]", spark=options
    )
    assert relay.wait() == 0, relay.text()[-3000:]
    assert_each_once_in_order(scene, topic, 500)


@pytest.mark.complete
def test_a_relay_whose_jvm_dies_ends(scene, make_topic, relay_of):
    """A driver whose JVM was killed does not go on leading without one: it ends, and says why."""
    relay = relay_of(scene)
    relay.wait_for("leads")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == relay.process.pid and (process / "comm").read_text() == "java\n":
                os.kill(int(process.name), signal.SIGKILL)
    scene.fill(make_topic(), 10)
    assert relay.wait() == 1
    assert "Spark has ended, start the relay again" in relay.text()
    assert scene.count() == 10


@pytest.mark.complete
@pytest.mark.alone
@pytest.mark.parametrize("fault", ["refused", "black hole"])
def test_a_relay_without_its_database_leaves_the_work_to_a_harvester(scene, make_topic, relay_of, postgres, fault):
    """A leading relay whose link to the database is cut hands over within the promised time, and comes back later."""
    topic = make_topic()
    with TcpProxy(LOCALHOST, postgres.port) as link:
        relay = relay_of(scene, dsn=scene.database.replace(f":{postgres.port}/", f":{link.port}/"))
        relay.wait_for("leads")
        scene.fill(topic, 300, keys=9)
        wait_until(lambda: scene.count() == 0, "the relay publishes", SPARK_SECONDS)
        time.sleep(2 * SLICE_SECONDS)  # until its batch has ended: a newcomer that has done none is more patient
        with scene.running(elector_factory=None, config={"delivery": "exactly-once"}) as harvester:
            link.reset() if fault == "refused" else link.cut()
            cut_at = time.monotonic()
            scene.fill(topic, 300, keys=9)
            wait_until(lambda: len(scene.read(topic)) > 300, "the harvester publishes", PROMISED_SECONDS)
            assert time.monotonic() - cut_at <= PROMISED_SECONDS + 5  # what it takes to read the topic
            assert harvester.is_leader
            assert "could not publish rows" in relay.text()
            link.resume() if fault == "refused" else link.restore()
            wait_until(lambda: scene.count() == 0, "the harvester publishes the rest", SPARK_SECONDS)
            relay.wait_for("joins leader group")
            assert harvester.is_leader
        scene.fill(topic, 300, keys=9)
        wait_until(lambda: scene.count() == 0, "the relay publishes again", SPARK_SECONDS)
        messages = scene.read(topic)
        assert sorted(map(identity_of, messages)) == list(range(1, 901))
        of_key = {}
        for message in messages:
            of_key.setdefault(message.key, []).append(identity_of(message))
        assert all(ids == sorted(ids) for ids in of_key.values())


@pytest.mark.complete
@pytest.mark.alone
def test_a_relay_whose_batches_take_long_keeps_the_work(scene, make_topic, relay_of):
    """Four shards on one core take longer than the patience; a harvester stands by, and publishes nothing."""
    topic = make_topic()
    relay = relay_of(scene, master="local[1]", shards=4, records=10)
    relay.wait_for("leads")
    scene.fill(topic, 50, keys=99)
    wait_until(lambda: scene.count() == 0, "the relay publishes", SPARK_SECONDS)
    with scene.running(elector_factory=None, config={"delivery": "exactly-once"}) as harvester:
        scene.fill(topic, 15_000, keys=99)
        wait_until(lambda: scene.count() == 0 or harvester.is_leader, "the relay publishes the rest", SPARK_SECONDS)
        assert not harvester.is_leader
    assert "leaves leader group" not in relay.text()
    messages = scene.read(topic)
    assert sorted(map(identity_of, messages)) == list(range(1, 15_051))


@contextmanager
def frozen_sessions(scene):
    """Stop the server's side of the relay's connections; new ones work."""
    ours = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'kafka-outbox-spark%'"
    pids = [row.pid for row in scene.execute(f"{ours} AND datname = current_database()")]
    assert pids
    with standing_still(pids):
        yield


@pytest.mark.complete
@pytest.mark.alone
def test_a_relay_whose_driver_hangs_never_keeps_the_work(scene, make_topic, relay_of):
    """A driver that hangs leaves the work to a harvester; also once it was elected again, as nobody else was there."""
    topic = make_topic()
    relay = relay_of(scene)
    relay.wait_for("leads")
    scene.fill(topic, 50, keys=9)
    wait_until(lambda: scene.count() == 0, "the relay publishes", SPARK_SECONDS)
    time.sleep(2 * SLICE_SECONDS)
    exactly_once = {"elector_factory": None, "config": {"delivery": "exactly-once"}}
    with frozen_sessions(scene):
        with scene.running(**exactly_once):
            scene.fill(topic, 50, keys=9)
            wait_until(lambda: scene.count() == 0, "the harvester publishes", PROMISED_SECONDS)
            time.sleep(20.0)
            assert "joins leader group" not in relay.text()
        relay.wait_for("joins leader group")
        wait_until(lambda: relay.text().count(" leads ") >= 2, "the relay leads again", GENEROUS_SECONDS)
        scene.fill(topic, 50, keys=9)
        with scene.running(**exactly_once):
            wait_until(lambda: scene.count() == 0, "the second harvester publishes", NEW_PATIENCE_SECONDS + 25)
    wait_until(lambda: relay.text().count("joins leader group") == 2, "the relay stands by", SPARK_SECONDS)
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 151))


@pytest.mark.complete
def test_a_harvester_and_a_relay_never_both_publish(scene, make_topic, relay_of):
    """Of a harvester and a relay one publishes, and takes over when the other is killed; all arrives once, in order."""
    topic = make_topic()
    relay = relay_of(scene)
    relay.wait_for("leads")
    with scene.running(elector_factory=None, config={"delivery": "exactly-once"}) as harvester:
        scene.fill(topic, 300, keys=9)
        wait_until(lambda: len(scene.read(topic)) >= 100, "the relay publishes", SPARK_SECONDS)
        assert not harvester.is_leader
        relay.kill()
        wait_until(lambda: harvester.is_leader, "the harvester takes over")
        scene.fill(topic, 300, keys=9)
        wait_until(lambda: scene.count() == 0, "the harvester publishes the rest")
        second = relay_of(scene)
        second.wait_for("contends")
        assert harvester.is_leader
    scene.fill(topic, 300, keys=9)
    second.wait_for("leads")
    wait_until(lambda: scene.count() == 0, "the second relay publishes", SPARK_SECONDS)
    messages = scene.read(topic)
    assert sorted(map(identity_of, messages)) == list(range(1, 901))
    of_key = {}
    for message in messages:
        assert of_key.get(message.key, 0) < identity_of(message)
        of_key[message.key] = identity_of(message)
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.wait() == 0


@pytest.mark.complete
def test_services_may_restart_under_a_relay(private_stack, private_database, make_topic, relay_of):
    """Restarts of Postgres and the broker under a working relay lose, repeat and reorder no record."""
    bootstrap = private_stack.kafka.bootstrap
    topic = make_topic(bootstrap=bootstrap)
    scene = Scene(private_database, bootstrap)
    scene.fill(topic, 600, keys=9)
    relay_of(scene, records=100)
    wait_until(lambda: len(read_topic(bootstrap, topic)) >= 100, "the relay publishes", SPARK_SECONDS)
    private_stack.postgres.restart("immediate")
    scene.fill(topic, 300, keys=9, prefix="later")
    wait_until(lambda: len(read_topic(bootstrap, topic)) >= 400, "the relay goes on", SPARK_SECONDS)
    private_stack.kafka.kill()
    private_stack.kafka.start()
    wait_until(lambda: scene.count() == 0, "all is published", SPARK_SECONDS)
    messages = read_topic(bootstrap, topic)
    # Not by ids: a sequence leaves some out when its server has crashed.
    assert len({identity_of(message) for message in messages}) == len(messages) == 900
    for key, values in by_key(messages).items():
        count = 300 if key.startswith(b"later") else 600
        number = int(key.removeprefix(b"later").removeprefix(b"k"))
        assert [int(value) for value in values] == [n for n in range(1, count + 1) if n % 9 == number]
