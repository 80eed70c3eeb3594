"""The simulation of queues in `make test`: some seeds, and rules that it must find broken."""

import os
import subprocess
import sys

import pytest

from outbox_queue.consuming import reader
from outbox_queue.consuming.buffer import PrefetchBuffer
from outbox_queue.consuming.group_member import GroupMember
from outbox_queue.consuming.marker_writer import MarkerWriter
from outbox_queue.consuming.reader import QueueReader
from outbox_queue.metrics import QueueCounters
from outbox_queue.redelivery.in_progress import InProgress
from tests.simulation.__main__ import outcome_of, shrink
from tests.simulation.broken_queue_rules import QUEUE_RULES
from tests.simulation.queue_bounds import CONCURRENCY
from tests.simulation.queue_simulation import QueuePlan, run

_LIMIT_SECONDS = 280


def _simulate(*arguments):
    """Run the command for queues, and return its result; the order of sets of texts is the same in each."""
    command = [sys.executable, "-m", "tests.simulation", "--mode", "queue", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)


def test_promises_of_queues_hold():
    """In some virtual minutes of faults every message is finished or a dead letter, and none comes without need."""
    done = _simulate("--hours", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "redelivered after a crash" in done.stdout


@pytest.mark.complete
def test_promises_of_queues_hold_for_hours():
    """The same for two virtual hours."""
    done = _simulate("--hours", "2", "--first", "1000")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        ("a tracker commits the first unfinished offset", 0),
        ("a tracker heeds keep-alives", 0),
        ("a tracker heeds end markers", 0),
        ("deadlines count from the reading of a marker", 0),
        ("what was not started is taken again", 0),
    ],
)
def test_broken_rules_of_queues_are_found(rule, first):
    """A run notices that a rule of queues is broken: from a seed on that is known to show it."""
    assert any(outcome_of(QueuePlan.of(seed), rule).problem for seed in range(first, first + 100))


@pytest.mark.complete
def test_all_broken_rules_of_queues_are_found():
    """The same for all rules; some take longer."""
    for rule in QUEUE_RULES:
        assert any(outcome_of(QueuePlan.of(seed), rule).problem for seed in range(300)), rule


def _rebuild_nothing(self):
    self._by_deadline.append((float("inf"), (-1, -1)))


def _keep(self, _):
    return len(self._in_progress) < CONCURRENCY + 1


def _write_too_much(self, record, is_wanted=None):
    _write_marker(self, record, is_wanted)
    self._failed.extend([(record, lambda: True)] * 2)


def _count_up_alone(self, change):
    self._processing += max(0, change)


def _fetch_all(self, _):
    _fetch(self, 1000)


def _start_two(self):
    _start_reader(self)
    reader.threading.Thread(target=reader.threading.Event().wait, name="left behind").start()


_write_marker, _fetch, _start_reader = MarkerWriter.write, GroupMember.fetch, QueueReader.start


@pytest.mark.parametrize(
    ("place", "name", "double", "shown"),
    [
        (InProgress, "end", lambda *_: False, "has ended, and is kept"),
        (InProgress, "_rebuild", _rebuild_nothing, "deadlines are kept"),
        (PrefetchBuffer, "_free", lambda _: 100, "must be in progress"),
        (PrefetchBuffer, "_remove", _keep, "received messages"),
        (GroupMember, "fetch", _fetch_all, "fetched records"),
        (MarkerWriter, "write", _write_too_much, "markers on their way"),
        pytest.param(
            QueueCounters, "in_progress", _count_up_alone, "messages in its metrics", marks=pytest.mark.complete
        ),
        pytest.param(QueueReader, "start", _start_two, "threads, and needs", marks=pytest.mark.complete),
    ],
)
def test_memory_of_queues_is_bounded(monkeypatch, place, name, double, shown):
    """A run notices a consumer or a tracker that keeps more than it may, or forgets nothing."""
    monkeypatch.setattr(place, name, double)
    plan = QueuePlan(3, "queue", ("crash",), writers=3, seconds=10.0, pause=0.05, conducts=("slow", "hang"), hangs=1.0)
    assert shown in run(plan).problem


def test_failing_plan_of_queues_is_shrunk():
    """Shrinking leaves a smaller plan that still fails."""
    plan = QueuePlan(1, "queue", ("restart",), writers=1, seconds=10.0, trackers=1, conducts=())
    rule = "a tracker heeds end markers"
    smaller = shrink(plan, rule)
    assert outcome_of(smaller, rule).problem
    assert (smaller.consumers, smaller.faults) == (1, ()), "messages that are finished suffice"


def test_seed_of_queues_replays():
    """The same plan takes the same steps, to the last line of its trace."""
    plan = QueuePlan(7, "queue", ("crash", "move", "clock"), writers=1, seconds=10.0)
    first, second = run(plan, trace=10_000), run(plan, trace=10_000)
    assert first.trace == second.trace
    assert (first.steps, first.records) == (second.steps, second.records)
    assert first.records
