"""A real outbox for the browser to look at: tables, topics, harvesters and consoles, each harvester a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic

from devstack.processes import wait_until
from outbox_core.record import OutboxRecord
from outbox_core.schema import TableName, create_history_sql, create_hold_sql, create_table_sql
from outbox_core.stasher import Stasher

_BIN = Path(sys.executable).parent
_STOP_SECONDS = 30.0


class World:
    """The outbox `shop`, with its history, and `billing` beside it, which is empty and has none.

    Args:
        postgres: the running server.
        kafka: the running broker.
        directory: for files.
    """

    def __init__(self, postgres, kafka, directory: Path) -> None:
        self.kafka = kafka
        self._postgres = postgres
        self._directory = directory
        self._database = f"console_{uuid4().hex[:12]}"
        self.dsn = postgres.create_database(self._database)
        self._processes: dict[str, subprocess.Popen] = {}
        with psycopg.connect(self.dsn) as connection:
            outbox, billing = TableName("outbox"), TableName("outbox", "billing")
            connection.execute(create_table_sql(outbox) + create_hold_sql(outbox) + create_history_sql(outbox))
            connection.execute("CREATE SCHEMA billing")
            connection.execute(create_table_sql(billing) + create_hold_sql(billing))
        self.shop = self._settings("shop", "outbox")
        self.billing = self._settings("billing", "billing.outbox")

    def _settings(self, name: str, table: str) -> Path:
        path = self._directory / f"{name}.yaml"
        path.write_text(
            f"harvest:\n  dataSource: {self.dsn}\n  outboxTable: {table}\n"
            f"  baseKafkaConfig:\n    bootstrap.servers: {self.kafka.bootstrap}\n"
        )
        return path

    def topic(self, name: str, **settings: str) -> str:
        """Make a topic of one partition whose name begins like this, and return its name."""
        full = f"{name}-{uuid4().hex[:6]}"
        with_settings = {key.replace("_", "."): value for key, value in settings.items()}
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap})
        asked = NewTopic(full, num_partitions=1, replication_factor=1, config=with_settings)
        admin.create_topics([asked], operation_timeout=10)[full].result(timeout=30)
        return full

    def stash(self, topic: str, *values: bytes | str | None, key: str | None = "k", **headers: str) -> list[int]:
        """Commit records with these values, and return their ids."""
        stasher = Stasher()
        with psycopg.connect(self.dsn) as connection:
            for value in values:
                stasher.stash(connection, OutboxRecord(topic, key, value, list(headers.items())))
            rows = connection.execute("SELECT id FROM outbox ORDER BY id DESC LIMIT %s", (len(values),)).fetchall()
        return sorted(identity for (identity,) in rows)

    def holds(self) -> list[tuple[str, str | None]]:
        """Return reason and error of each hold of a record."""
        with psycopg.connect(self.dsn) as connection:
            return connection.execute("SELECT reason, error FROM outbox_hold WHERE record_id IS NOT NULL").fetchall()

    def start_harvester(self, name: str) -> None:
        """Start a harvester of this name, with statistics."""
        command = ["harvest", "-f", str(self.shop), "--name", name, "--metrics-port", "0"]
        self._start(name, [_BIN / "outbox", *command], stdout=subprocess.DEVNULL)

    def kill(self, name: str) -> None:
        """End a process at once, without a chance to say anything."""
        process = self._processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def start_console(self, *options: str, token: str | None = None) -> str:
        """Start `outbox console` for both outboxes and return its address."""
        environment = {**os.environ, "OUTBOX_CONSOLE_TOKEN": token} if token else None
        command = [_BIN / "outbox", "console", "-f", self.shop, "-f", self.billing, "--port", "0", *options]
        process = self._start(f"console-{len(self._processes)}", command, stdout=subprocess.PIPE, env=environment)
        line = process.stdout.readline().decode()
        assert line.startswith("console on http://"), f"{line!r}; see {self._directory}"
        return line.split()[2]

    def _start(self, name: str, command: list, **options) -> subprocess.Popen:
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([str(part) for part in command], stderr=log, start_new_session=True, **options)
        self._processes[name] = process
        return process

    def close(self) -> None:
        """Stop all processes and drop the database."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            if not wait_until(lambda process=process: process.poll() is not None, _STOP_SECONDS):
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._postgres.drop_database(self._database)
