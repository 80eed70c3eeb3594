"""The relay on Spark: killed, cut off and raced, it loses, repeats and reorders no record."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from outbox_spark.pipelines.relay import RelayConfig, RelayFailed, run_relay
from outbox_spark.relay.batch_store import BatchStore
from outbox_spark.relay.sink import KafkaSink
from tests.harvesting import GENEROUS_SECONDS, Scene, by_key, identity_of, wait_until
from tests.kafka_reader import read_topic
from tests.spark.relay.faulty_sinks import DIE_AT, FailingSink, flag_of
from tests.spark.relay.outcome import assert_each_once_in_order

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(600)]

SPARK_SECONDS = 240.0
"""Longer than a Spark process takes to start on a machine that does seven other things."""


class RelayProcess:
    """A relay in a process of its own."""

    def __init__(self, scene, directory, *, once=False, records=200, die_at=""):
        self.log = Path(directory) / f"relay-{os.urandom(3).hex()}.log"
        self.checkpoint = Path(directory) / "checkpoint"
        settings = {
            "dsn": scene.database,
            "table": scene.table.quoted,
            "bootstrap": scene.bootstrap,
            "checkpoint": str(self.checkpoint),
            "records": records,
            "once": once,
        }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.relay.relay_process", json.dumps(settings)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, DIE_AT: die_at},
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


def config_of(scene, checkpoint, **options):
    """Return settings of a relay in this process."""
    settings = {"shards": 2, "batch_records": 100} | options
    return RelayConfig(harvest=scene.config(delivery="exactly-once"), checkpoint=str(checkpoint), **settings)


def test_a_relay_publishes_all_and_ends(spark, scene, make_topic, tmp_path):
    """One run publishes all present rows, even if the last entry of the commit log, or the whole log, was deleted."""
    topic = make_topic()
    scene.fill(topic, 350, keys=9)
    told = []
    checkpoint = tmp_path / "checkpoint"
    run_relay(spark, config_of(scene, checkpoint), once=True, on_progress=told.append)
    assert_each_once_in_order(scene, topic, 350)
    assert sum(progress["numInputRows"] for progress in told) == 350

    newest = max((checkpoint / "commits").iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1)
    newest.unlink()
    for entry in (checkpoint / "commits").glob(".*"):
        entry.unlink()
    scene.fill(topic, 50, keys=9, prefix="again")
    run_relay(spark, config_of(scene, checkpoint), once=True)
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 401))

    shutil.rmtree(checkpoint)
    scene.fill(topic, 50, keys=9, prefix="anew")
    run_relay(spark, config_of(scene, checkpoint), once=True)
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 451))
    assert scene.count() == 0


def test_a_relay_that_cannot_work_says_why(spark, scene, make_topic, tmp_path):
    """A relay that finds marks of an at-least-once harvester ends with that reason, and publishes no record."""
    topic = make_topic()
    scene.fill(topic, 5)
    scene.execute(f"UPDATE {scene.table.quoted} SET leader_id = gen_random_uuid() WHERE id = 3")
    with pytest.raises(RelayFailed, match="carry the mark of an at-least-once harvester"):
        run_relay(spark, config_of(scene, tmp_path / "checkpoint"), once=True)
    assert scene.read(topic) == []


@pytest.mark.complete
def test_a_failed_task_is_tried_again(spark, database, kafka_bootstrap, make_topic, tmp_path):
    """After tasks failed before and after the Kafka commit, a new query publishes the missing records, once."""
    table = f"outbox_{os.urandom(4).hex()}"
    scene = Scene(database, kafka_bootstrap, table=table)
    topic = make_topic()
    scene.fill(topic, 250, keys=9)
    flags = [flag_of(table, step) for step in ("sent", "committed")]
    for flag in flags:
        flag.touch()
    spark.dataSource.register(FailingSink)
    try:
        run_relay(spark, config_of(scene, tmp_path / "checkpoint"), once=True)
    finally:
        spark.dataSource.register(KafkaSink)
    assert not any(flag.exists() for flag in flags)
    assert_each_once_in_order(scene, topic, 250)


@pytest.mark.complete
@pytest.mark.parametrize("checkpoint_survives", [True, False], ids=["checkpoint-kept", "checkpoint-deleted"])
def test_a_driver_that_dies_between_kafkas_commit_and_its_own(scene, make_topic, relay_of, spark, checkpoint_survives):
    """A driver killed after the shards' commits, before the batch is in Spark's commit log, repeats no record."""
    topic = make_topic()
    scene.fill(topic, 500, keys=9)
    dying = relay_of(scene, die_at="2")
    assert dying.wait() == -signal.SIGKILL
    dying.kill()
    assert scene.count() > 0
    if not checkpoint_survives:
        shutil.rmtree(dying.checkpoint)
    run_relay(spark, config_of(scene, dying.checkpoint), once=True)
    assert_each_once_in_order(scene, topic, 500)


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
    assert BatchStore(scene.database).batches(0) == []


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
