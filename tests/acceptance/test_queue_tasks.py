"""Django tasks enqueued in transactions, with workers and harvesters killed: exactly the committed ones run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from devstack.processes import wait_until
from tests.harvesting import Scene

TASKS = int(os.environ.get("OUTBOX_TEST_TASKS", "10000"))
PATIENCE = 300 + TASKS / 20
_CHECKOUT = Path(__file__).resolve().parents[2]
_PROJECT = [sys.executable, "-m", "tests.acceptance.task_project"]
_ROLES = {"worker": ["run_tasks", "--queue=default", "--tracker", "--concurrency=8"], "harvester": ["run_harvester"]}


class Fleet:
    """Two workers and two harvesters; one that is killed is replaced."""

    def __init__(self, environment, log):
        self.kills = Counter()
        self._environment, self._log = environment, log
        self._running = [(role, self._start(role)) for role in _ROLES for _ in range(2)]

    def kill_one(self):
        """Send SIGKILL to one at random, and start another in its place."""
        role, process = self._running.pop(random.randrange(len(self._running)))
        assert process.poll() is None, self._log.read_text()[-5000:]
        process.kill()
        process.wait()
        self.kills[role] += 1
        self._running.append((role, self._start(role)))

    def end(self):
        """Stop all of them; return their exit codes."""
        for _, process in self._running:
            process.send_signal(signal.SIGTERM)
        try:
            return [process.wait(90) for _, process in self._running]
        finally:
            for _, process in self._running:
                process.kill()
                process.wait()

    def _start(self, role):
        return start(role, self._environment, self._log)


def start(role, environment, log):
    """Start a process of a role, which appends to a log."""
    with log.open("ab") as output:
        command = [*_PROJECT, *_ROLES[role]]
        return subprocess.Popen(
            command, cwd=_CHECKOUT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


@pytest.fixture
def environment(database, kafka_bootstrap, make_topic, topic_name):
    """The environment of the project: a database, topics of its own and short timeouts."""
    queue = {
        "bootstrap_servers": kafka_bootstrap,
        "message_topic": make_topic(8),
        "message_partitions": 8,
        "marker_topic": make_topic(8, config={"message.timestamp.type": "LogAppendTime"}),
        "dead_letter_topic": make_topic(2, config={"cleanup.policy": "compact"}),
        "redelivery_timeout": "4s",
        "max_attempts": 100,
        "kafka": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1500},
    }
    return {
        **os.environ,
        "TEST_DATABASE": database,
        "TEST_KAFKA": kafka_bootstrap,
        "TEST_LEADER_TOPIC": topic_name("leaders"),
        "TEST_QUEUE": json.dumps(queue),
    }


@pytest.mark.real_broker
def test_tasks_outlive_their_worker(environment, database, kafka_bootstrap, tmp_path):
    """Of few tasks, a third rolled back, exactly the committed ones run, although their worker is killed amid them."""
    journal, log, mark = tmp_path / "journal", tmp_path / "log", tmp_path / "mark"
    journal.touch()
    enqueue = [*_PROJECT, "enqueue", journal, "40", mark]
    subprocess.run(enqueue, cwd=_CHECKOUT, env=environment, check=True, timeout=PATIENCE)
    Scene(database, kafka_bootstrap, layout=None).drain()
    killed = start("worker", environment, log)
    assert killed.wait(PATIENCE) == -signal.SIGKILL, log.read_text()
    successor = start("worker", environment, log)
    try:
        assert wait_until(lambda: _unfinished(database) == 0, PATIENCE, 0.5), log.read_text()
        successor.send_signal(signal.SIGTERM)
        assert successor.wait(PATIENCE) == 0
    finally:
        successor.kill()
        successor.wait()
    committed, attempts = _outcome(database)
    ran = Counter(map(int, journal.read_text().split()))
    assert committed
    assert set(ran) == set(attempts) == committed
    assert all(ran[number] <= attempts[number] for number in committed)


@pytest.mark.real_broker
@pytest.mark.complete
@pytest.mark.timeout(PATIENCE + 300)
def test_exactly_the_committed_tasks_run(environment, database, tmp_path, say):
    """Every task of a committed transaction runs, its attempts are counted, and none of a rolled-back one does."""
    journal, log = tmp_path / "journal", tmp_path / "log"
    journal.touch()
    begun = time.monotonic()
    subprocess.run([*_PROJECT, "migrate", "--verbosity=0"], cwd=_CHECKOUT, env=environment, check=True)
    fleet = Fleet(environment, log)
    try:
        enqueuing = subprocess.Popen([*_PROJECT, "enqueue", journal, str(TASKS)], cwd=_CHECKOUT, env=environment)

        def is_over():
            if enqueuing.poll() is None or sum(fleet.kills.values()) < 8:
                time.sleep(random.uniform(0.5, 4))
                fleet.kill_one()
                return False
            return _unfinished(database) == 0

        finished = wait_until(is_over, PATIENCE, 1)
    finally:
        codes = fleet.end()
    assert enqueuing.wait() == 0
    assert finished, log.read_text()[-5000:]
    assert codes == [0] * 4, log.read_text()[-5000:]

    ran = Counter(map(int, journal.read_text().split()))
    committed, attempts = _outcome(database)
    say(
        f"{TASKS} tasks, {len(committed)} committed, killed {dict(fleet.kills)}, "
        f"{sum(count > 1 for count in attempts.values())} tried again, {time.monotonic() - begun:.0f} s"
    )
    assert TASKS * 0.5 < len(committed) < TASKS * 0.85
    assert set(ran) == committed
    assert set(attempts) == committed
    assert all(ran[number] <= attempts[number] for number in committed)


def _unfinished(database):
    with psycopg.connect(database) as connection:
        query = "SELECT count(*) FROM outbox_task_result WHERE status <> 'SUCCESSFUL'"
        return connection.execute(query).fetchone()[0]


def _outcome(database):
    """Return the numbers of the committed tasks, and the attempts of each that has a result."""
    with psycopg.connect(database) as connection:
        committed = {number for (number,) in connection.execute("SELECT number FROM committed")}
        query = """
            SELECT (args ->> 1)::int, jsonb_array_length(worker_ids) FROM outbox_task_result
            WHERE task_path LIKE '%append_line'
        """
        return committed, dict(connection.execute(query).fetchall())
