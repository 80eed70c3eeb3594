"""`outbox harvest` as a process, against the real services: errors at the start, and normal runs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from outbox_core.schema import TableName, create_table_sql
from tests.harvesting import wait_until

REAPER_YAML = (Path(__file__).parents[2] / "reaper.yaml").read_text()
START_ERROR_SECONDS = 40  # 10 to wait for an answer; the rest is for a process to start beside other tests


@pytest.fixture
def closed_port():
    """A port of this machine on which no program listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def outbox_database(database):
    """URL of a database with an empty outbox."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
    return database


def environment(dsn, bootstrap, **more):
    """Return the variables that `python -m devstack up` prints, without the caller's own OUTBOX variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    return {**inherited, "OUTBOX_POSTGRES_DSN": dsn, "OUTBOX_KAFKA_BOOTSTRAP": bootstrap, **more}


def harvest(*arguments, env):
    """Run the command to its end."""
    command = [sys.executable, "-m", "outbox_core", "harvest", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def assert_one_error_line(done, *, naming):
    """Assert exit code 2, the error on the last line, and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("outbox: error: ")] == lines[-1:]
    assert re.search(naming, lines[-1]), lines[-1]


# -- errors at the start -----------------------------------------------------------------------------------------------


def test_unreachable_database_is_one_line(closed_port):
    """The error names the address, comes soon, and does not show the password."""
    began = time.monotonic()
    dsn = f"host=127.0.0.1 port={closed_port} user=u password=s3cr3t dbname=d"
    done = harvest(env=environment(dsn, "127.0.0.1:1"))
    assert_one_error_line(
        done, naming=rf"cannot connect to database d at 127\.0\.0\.1:{closed_port} as role u: .*refused"
    )
    assert time.monotonic() - began < START_ERROR_SECONDS
    assert "s3cr3t" not in done.stderr


def test_unreachable_kafka_is_one_line(outbox_database, closed_port):
    """The error names `bootstrap.servers`, and comes soon."""
    began = time.monotonic()
    done = harvest(env=environment(outbox_database, f"127.0.0.1:{closed_port}"))
    assert_one_error_line(done, naming=rf"bootstrap\.servers=127\.0\.0\.1:{closed_port}")
    assert time.monotonic() - began < START_ERROR_SECONDS


def test_missing_table_is_one_line(database):
    """The error names the table."""
    done = harvest("--table", "billing.outbox", env=environment(database, "127.0.0.1:1"))
    assert_one_error_line(done, naming="billing.outbox")


def test_table_that_is_no_outbox_is_one_line(database):
    """The error names the table and a column that it lacks."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    done = harvest("--table", "orders", env=environment(database, "127.0.0.1:1"))
    assert_one_error_line(done, naming="orders.*kafka_topic")


def test_wrong_kafka_property_is_one_line(outbox_database):
    """The error names the property."""
    done = harvest("-X", "security.protokol=ssl", env=environment(outbox_database, "127.0.0.1:1"))
    assert_one_error_line(done, naming=r"security\.protokol")


def test_wrong_file_has_a_line_for_each_mistake(tmp_path):
    """The errors name every wrong setting by its path, before the command connects to any service."""
    path = tmp_path / "reaper.yaml"
    path.write_text(
        REAPER_YAML.replace("sendBuffer", "sendBufer").replace("heartbeatTimeout: 5s", "heartbeatTimeout: 5")
    )
    done = harvest("-f", str(path), env=environment("", ""))
    assert done.returncode == 2, done.stderr
    told = sorted(line for line in done.stderr.splitlines() if line.startswith("outbox: error: "))
    assert len(told) == 2, done.stderr
    assert told[0].startswith("outbox: error: harvest.limits.heartbeatTimeout: ")
    assert told[1].startswith("outbox: error: harvest.limits.sendBufer: unknown field")


def test_metrics_port_in_use_is_one_line(outbox_database, kafka_bootstrap):
    """The error names `metrics_port`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = harvest("--metrics-port", port, env=environment(outbox_database, kafka_bootstrap))
    assert_one_error_line(done, naming=f"metrics_port: .*{port}")


# -- normal runs -------------------------------------------------------------------------------------------------------


def insert(dsn, topic, count):
    """Write records as any program may, with the INSERT of seed 001."""
    statement = """
        INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
        SELECT now(), %s, 'key-' || n %% 10, convert_to('value-' || n, 'UTF8'), '{}', '{}' FROM generate_series(1, %s) n
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement, [topic, count])


def pending(dsn):
    """Return the number of rows in the outbox."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        (count,) = connection.execute("SELECT count(*) FROM outbox").fetchone()
        return count


def test_drain_empties_the_table_and_exits(outbox_database, kafka_bootstrap, make_topic, topic_name, tmp_path):
    """Goharvest's own file works, with database and broker from the environment."""
    insert(outbox_database, make_topic(), 1000)
    path = tmp_path / "reaper.yaml"
    path.write_text(REAPER_YAML)
    group = topic_name("group")
    names = {"OUTBOX_LEADER_TOPIC": f"{group}.neli", "OUTBOX_LEADER_GROUP_ID": group}
    done = harvest("-f", str(path), "--drain", env=environment(outbox_database, kafka_bootstrap, **names))
    assert done.returncode == 0, done.stderr
    assert "outbox: error" not in done.stderr
    assert pending(outbox_database) == 0


@contextmanager
def running(*arguments, env):
    """Run a harvester process; yield it and the port of its metrics."""
    command = [sys.executable, "-m", "outbox_core", "harvest", "--metrics-port", "0", *arguments]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            found = re.search(r"serving /metrics and /healthz on 127\.0\.0\.1 port (\d+)", line)
            if found:
                break
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


def fetch(port, path):
    """Return the body of a page."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return response.read().decode()


def test_running_harvester_shows_metrics_and_ends_well_on_sigterm(outbox_database, kafka_bootstrap, make_topic):
    """Metrics count records under the outbox's identity, the leader is healthy, and SIGTERM gives exit code 0."""
    insert(outbox_database, make_topic(), 500)
    with running(env=environment(outbox_database, kafka_bootstrap)) as (process, port):
        wait_until(lambda: pending(outbox_database) == 0, "all is published")
        wait_until(lambda: json.loads(fetch(port, "/healthz")).get("leader"), "it leads")
        shown = re.search(r'outbox_records_published_total\{outbox="(.*)"\} (.*)', fetch(port, "/metrics"))
        assert shown[1].endswith(".public.outbox")
        assert float(shown[2]) == 500
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)  # with its stderr closed it could not log its end, and would exit with 120
        assert process.returncode == 0
