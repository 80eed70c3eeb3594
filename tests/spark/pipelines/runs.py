"""Records in topics, and runs of pipelines, some of which die at a chosen place."""

import json
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

from confluent_kafka import Producer

from outbox_spark.pipelines.follower import Follower

ROOT = Path(__file__).resolve().parents[3]

SCHEMA = "n BIGINT NOT NULL, amount DECIMAL(10,2), items ARRAY<STRUCT<sku: STRING NOT NULL, cents: BIGINT>>"


def produce(bootstrap, topic, numbers, *, keys=5, abort=False):
    """Publish {"n": number} for each number in one transaction, keyed by number modulo keys; or abort it."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-tests"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in numbers:
        headers = [("outbox-id", f"db.public.outbox:{number}".encode())]
        value = json.dumps({"n": number, "amount": number / 4, "items": [{"sku": f"s{number % 3}", "cents": number}]})
        producer.produce(topic, value, f"k{number % keys}", headers=headers)
    if abort:
        producer.flush()
        producer.abort_transaction(30)
    else:
        producer.commit_transaction(30)


def run_once(pipeline, spark, bootstrap, settings, report=lambda _: None):
    """Run a pipeline to the present end of its source; return its counts."""
    targets = pipeline.targets(spark, settings)
    follower = Follower(spark, {"bootstrap.servers": bootstrap}, settings, targets, report)
    return follower.run(once=True, stop=threading.Event())


def forget_last_commit(checkpoint):
    """Delete the last entry of Spark's commit log, as if the driver had died before it was written."""
    commits = Path(checkpoint) / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)


def run_and_die(pipeline, bootstrap, settings):
    """Run a pipeline in a process of its own that dies by SIGKILL between its target's commit and Spark's."""
    script = f"""
import os, pickle, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from outbox_spark.pipelines import {pipeline}
from outbox_spark.pipelines.follower import Follower
from outbox_spark.session import start_session

def die(_):
    os.killpg(0, signal.SIGKILL)

spark = start_session("dies", {{"spark.driver.memory": "512m"}}, master="local[2]")
settings = pickle.loads({pickle.dumps(settings)!r})
targets = {pipeline}.targets(spark, settings)
Follower(spark, {{"bootstrap.servers": {bootstrap!r}}}, settings, targets, die).run(once=True, stop=threading.Event())
"""
    done = subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False, timeout=240, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
