"""Services, a cluster, and pipelines that follow one another: outbox -> relay -> topic -> archive and projection."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic

from devstack.spark import SparkCluster
from devstack.stack import DevStack
from outbox_core.schema import TableName, create_hold_sql, create_table_sql
from outbox_spark.runtime.java import find_java
from tests.harvesting import wait_until

TOPIC, REPLAYED = "orders", "orders.replayed"
KEYS = 1000
PIPELINES = ("relay", "archive", "project")
_PARTITIONS = 4
_SECONDS = 900.0
_INSERT = f"""
INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT now(), '{TOPIC}', 'k' || n %% {KEYS}, convert_to(json_build_object('n', n)::text, 'UTF8'), '{{}}', '{{}}'
FROM generate_series(%s::bigint, %s::bigint) AS n
"""


class World:
    """Everything that runs, in one directory. As a context manager, started and stopped.

    Args:
        directory: for all data and logs.
        brokers: 1 or 3.
    """

    def __init__(self, directory, *, brokers=1):
        self.directory = Path(directory)
        self.stack = DevStack(self.directory / "stack", embedded=False, brokers=brokers, small=True)
        self.spark = SparkCluster(self.directory / "spark", find_java().home_for_spark(), cores=3, gigabytes=3)
        self.running = {}
        self.written = 0
        self._brokers = brokers
        self._starts = 0
        self._counting = None
        self._closing = ExitStack()

    def __enter__(self):
        try:
            return self._start_services()
        except BaseException:
            self._closing.close()  # nobody else would
            raise

    def _start_services(self):
        self._closing.enter_context(self.stack)
        self._closing.enter_context(self.spark)
        self._closing.callback(self.kill_drivers)
        self._closing.callback(self._close_counting)
        self.spark.start(workers=2)
        self.database = self.stack.postgres.create_database("shop")
        table = TableName.parse("outbox")
        for statement in (create_table_sql(table, "binary"), create_hold_sql(table)):
            self.query(statement)
        topics = [NewTopic(topic, _PARTITIONS, self._brokers) for topic in (TOPIC, REPLAYED)]
        admin = AdminClient({"bootstrap.servers": self.servers})  # its requests end with it
        for made in admin.create_topics(topics).values():
            made.result(30)
        self._write_file()
        return self

    def __exit__(self, *_):
        self._closing.close()

    @property
    def servers(self):
        return self.stack.kafka.bootstrap

    def _write_file(self):
        kafka = {"bootstrap.servers": self.servers}
        shared, places = self.directory / "shared", {}
        for name in ("archive", "project"):
            places[name] = {
                "name": name,
                "topics": TOPIC,
                "checkpoint": f"{shared}/checkpoints/{name}",
                "trigger": "1s",
            }
        settings = {
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.speculation": "true",
            "spark.speculation.minTaskRuntime": "2s",
            "spark.sql.shuffle.partitions": "4",
        }
        document = {
            "kafka": kafka,
            "spark": {"master": self.spark.url, "settings": settings},
            "archive": places["archive"] | {"path": f"{shared}/archive"},
            "project": places["project"]
            | {"schema": "n BIGINT NOT NULL", "postgres": {"dsn": self.database, "table": "projected"}},
            "replay": {"name": "again", "archive": f"{shared}/archive", "to": {TOPIC: REPLAYED}},
            "audit": {"expected": {"archive": f"{shared}/archive"}, "found": {"topics": [TOPIC]}},
            "harvest": {"baseKafkaConfig": kafka, "dataSource": self.database},
            "relay": {"shards": 2, "batchRecords": 2000},
        }
        (self.directory / "pipelines.yaml").write_text(json.dumps(document))  # JSON is YAML

    # -- pipelines

    def start(self, name, *options):
        """Start a pipeline's driver; its log is `<name>-<number>.log`."""
        self._starts += 1
        log = self.directory / f"{name}-{self._starts}.log"
        command = [sys.executable, "-m", "outbox_spark", name, "-f", str(self.directory / "pipelines.yaml"), *options]
        with log.open("w") as out:
            environ = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
            process = subprocess.Popen(command, env=environ, stdout=out, stderr=out, start_new_session=True)
        self.running[name] = process, log

    def kill_driver(self, name):
        """Send SIGKILL to a driver and its JVM."""
        process, _ = self.running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _close_counting(self):
        if self._counting is not None:
            self._counting.close()
        self._counting = None

    def kill_drivers(self):
        for name in list(self.running):
            self.kill_driver(name)

    def must_run(self):
        """Raise an error if a pipeline has ended by itself."""
        for name, (process, log) in self.running.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {log.read_text()[-3000:]}"

    def finish(self, name, *options):
        """Stop a pipeline, if it runs; run it to its end."""
        if name in self.running:
            process, log = self.running[name]
            process.terminate()
            assert process.wait(_SECONDS) == 0, log.read_text()[-3000:]
        self.start(name, *options)
        process, log = self.running.pop(name)
        assert process.wait(_SECONDS) == 0, log.read_text()[-3000:]
        return log.read_text()

    # -- records

    def query(self, statement, parameters=None):
        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def write(self, count):
        """Stash so many records, n = written + 1, ..., in one transaction."""
        self.query(_INSERT, (self.written + 1, self.written + count))
        self.written += count

    def waiting(self):
        """Return the number of rows in the outbox; None while the database is away."""
        with suppress(psycopg.OperationalError):
            if self._counting is None:  # one for all counts, as each would cost more than its count
                self._counting = psycopg.connect(self.database, autocommit=True)
            return self._counting.execute("SELECT count(*) FROM outbox").fetchone()[0]
        self._close_counting()
        return None

    def wait_for(self, what, condition):
        """Wait until a condition holds while all pipelines run."""
        wait_until(partial(self._holds, condition), what, _SECONDS)

    def _holds(self, condition):
        self.must_run()
        return condition()
