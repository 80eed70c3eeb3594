"""`outbox status` and `outbox doctor`, and Django's, while a service is away: they print the half that is known.

A port on which no program listens stands for a service that was stopped, one on which a program listens and never
answers for a service that hangs.
"""

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from io import StringIO

import psycopg
import pytest
from django.core.management import call_command

from outbox_core.cli import main
from outbox_core.config import HarvestConfig
from outbox_core.doctor.status import read_status
from outbox_core.schema import TableName, create_hold_sql, create_table_sql
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.services import as_role

__all__ = ["django_db_modify_db_settings"]

INSERT = "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 'orders', i::text FROM generate_series(1, 3) AS i"


@pytest.fixture
def outbox_database(database, monkeypatch):
    """The URL of a database with three records in its outbox, the second of which is held."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(create_hold_sql(TableName("outbox")))
        connection.execute(INSERT)
    assert main(["hold", "add", "--record", "2"]) == 0
    return database


@pytest.fixture
def closed_port():
    """A port on which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(params=["closed", "silent"])
def dead_port(request, closed_port):
    """A port on which no program listens, or one that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield closed_port if request.param == "closed" else server.getsockname()[1]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns its exit code and its output."""

    def run(*arguments, kafka="127.0.0.1:1"):
        monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", kafka)
        capsys.readouterr()
        return main(list(arguments)), capsys.readouterr().out

    return run


@contextmanager
def locked(database):
    """Lock the outbox as a migration does, and yield the session's pid."""
    with psycopg.connect(database, application_name="migration") as connection:
        connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        yield connection.info.backend_pid
        connection.rollback()


@pytest.mark.usefixtures("outbox_database")
def test_without_kafka(run, dead_port):
    """Without Kafka the backlog is shown, with what is held of it; the exit code tells which service is missing."""
    servers = f"127.0.0.1:{dead_port}"
    code, shown = run("status", kafka=servers)
    assert code == 4
    assert "waiting  3 records, the oldest for " in shown
    assert "ready    2 records" in shown
    assert "held     1 record, the oldest for " in shown
    assert f"Kafka    unknown: cannot reach Kafka at bootstrap.servers={servers}" in shown
    code, shown = run("doctor", kafka=servers)
    assert code == 4
    assert "ok       table" in shown
    assert re.search("PROBLEM  Kafka .*cannot reach Kafka", shown)


def test_without_the_database(run, kafka_bootstrap, monkeypatch, closed_port, dead_port):
    """Without the database the group in Kafka is shown, under the name that the settings let assume."""
    patience = "60" if dead_port == closed_port else "5"  # Kafka may be slow where tests run side by side
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", f"postgresql://me:s3cret@127.0.0.1:{dead_port}/shop")
    code, shown = run("status", "--timeout", patience, kafka=kafka_bootstrap)
    assert code == 3
    assert "outbox   shop.public.outbox" in shown
    assert f"unknown: cannot connect to database shop at 127.0.0.1:{dead_port} as role me" in shown
    assert "no harvester" in shown
    assert "s3cret" not in shown
    code, shown = run("doctor", "--timeout", patience, kafka=kafka_bootstrap)
    assert code == 3
    assert "ok       cluster" in shown
    assert "s3cret" not in shown


def test_with_a_locked_table(outbox_database, run):
    """While the table is locked, both commands name the session that has the lock, and go on with Kafka."""
    with locked(outbox_database) as pid:
        code, shown = run("status")
        assert code == 5
        assert re.search(rf"waiting  unknown: pid {pid} \(migration, .*holds ACCESS EXCLUSIVE on public.outbox", shown)
        assert f"-> SELECT pg_terminate_backend({pid})" in shown
        document = json.loads(run("status", "--json")[1])
        assert (document["pending"], document["harvesters"]) == (None, None)
        assert f"pid {pid}" in document["database_error"]["reason"]
        assert "bootstrap.servers=127.0.0.1:1" in document["kafka_error"]["reason"]
        code, shown = run("doctor")
        assert code == 5
        assert "ok       server" in shown
        assert re.search(rf"PROBLEM  lock .*pid {pid}", shown)


def test_with_a_role_that_only_reads(outbox_database, run, monkeypatch, topic_name, kafka_bootstrap):
    """SELECT suffices: the status is complete, and the doctor reports no problem."""
    role = topic_name("reader")
    with psycopg.connect(outbox_database, autocommit=True) as connection:
        connection.execute(f'CREATE ROLE "{role}" LOGIN; GRANT SELECT ON outbox, outbox_hold TO "{role}"')
        try:
            monkeypatch.setenv("OUTBOX_POSTGRES_DSN", as_role(outbox_database, role))
            code, shown = run("status", "--timeout", "60", kafka=kafka_bootstrap)
            assert code == 0
            assert "waiting  3 records" in shown
            code, shown = run("doctor", "--timeout", "60", kafka=kafka_bootstrap)
            assert code == 0, shown
            assert "only reads, which suffices to look" in shown
            assert len(run("peek")[1].splitlines()) == 3
            assert run("hold", "list")[0] == 0
        finally:
            connection.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("outbox_status", ["waiting  0 records", "Kafka    unknown"]),
        ("outbox_doctor", ["ok       table", "PROBLEM  Kafka"]),
    ],
)
def test_djangos_commands_without_kafka(settings, closed_port, command, told):
    """Django's commands print the database's half and exit with 4, and remedies name Django's commands."""
    settings.OUTBOX = {"KAFKA": {"bootstrap.servers": f"127.0.0.1:{closed_port}"}}
    call_command("outbox_hold", "add", "--topic", "orders", "--database", "default", stdout=StringIO())
    out = StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command(command, stdout=out)
    assert ended.value.code == 4
    for text in told:
        assert text in out.getvalue()
    assert command == "outbox_status" or "`manage.py outbox_hold list` shows why" in out.getvalue()


@pytest.mark.usefixtures("outbox_database")
def test_watching(closed_port):
    """`status --watch` shows the status again and again; Ctrl-C ends it."""
    arguments = ["--watch", "0.1", "--timeout", "0.1", "--json", "--bootstrap-servers", f"127.0.0.1:{closed_port}"]
    command = [sys.executable, "-m", "outbox_core", "status", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 4
    assert [json.loads(line)["pending"] for line in lines] == [3, 3]


def test_status_as_data(outbox_database, kafka_bootstrap):
    """`read_status` returns values for other programs."""
    config = HarvestConfig(data_source=outbox_database, base_kafka_config={"bootstrap.servers": kafka_bootstrap})
    status = read_status(config, connect_seconds=60.0)
    backlog = status.database.backlog
    assert (backlog.pending, backlog.held_at_head, backlog.held.records) == (3, 1, 1)
    assert backlog.oldest_held_seconds >= 0
    assert [(topic.topic, topic.waiting, topic.held) for topic in backlog.topics] == [("orders", 3, 1)]
    assert status.kafka.harvesters == ()
    assert json.loads(json.dumps(status.as_json()))["outbox"] == status.database.outbox
