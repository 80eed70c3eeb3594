"""The simulation in `make test`: some seeds of both deliveries, and rules that it must find broken."""

import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import shrink
from tests.simulation.broken_rules import RULES, broken
from tests.simulation.scheduling import Process, Scheduler
from tests.simulation.simulation import MODES, Plan, run
from tests.simulation.threads import Event

_LIMIT_SECONDS = 280


def _simulate(*arguments):
    """Run the command, and return its result; the order of sets of texts is the same in each."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)


@pytest.mark.parametrize("mode", MODES)
def test_promises_hold(mode):
    """In some virtual minutes of faults nothing is lost, invented or reordered, and in the end nothing waits."""
    done = _simulate("--hours", "0.02", "--mode", mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leader acquired" in done.stdout


@pytest.mark.complete
@pytest.mark.parametrize("mode", MODES)
def test_promises_hold_for_hours(mode):
    """The same for two virtual hours."""
    done = _simulate("--hours", "2", "--mode", mode, "--first", "1000")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        ("an unknown outcome is no success", 0),
        ("a term reads the last manifest", 0),
        ("the floor waits for open writers", 0),
    ],
)
def test_broken_rules_are_found(rule, first):
    """A run notices that a rule of the product is broken: from a seed on that is known to show it."""
    with broken(rule):
        problems = (run(Plan.of(seed, RULES[rule].mode)).problem for seed in range(first, first + 200))
        assert any(problems)


def test_failing_plan_is_shrunk():
    """Shrinking leaves a smaller plan that still fails."""
    plan = Plan(1, "exactly-once", ("break",), harvesters=2, writers=1, seconds=20.0)
    rule = "the floor waits for open writers"
    smaller = shrink(plan, rule)
    with broken(rule):
        assert run(smaller).problem
    assert (smaller.harvesters, smaller.writers, smaller.faults) == (1, 1, ()), "late commits suffice"


def test_seed_replays():
    """The same plan takes the same steps, to the last line of its trace."""
    plan = Plan.of(7, "exactly-once")
    first, second = run(plan, trace=10_000), run(plan, trace=10_000)
    assert first.trace == second.trace
    assert (first.steps, first.records) == (second.steps, second.records)
    assert first.records


def test_crashed_process_does_nothing_more():
    """A task's `finally` has no effect when its process crashes, and a suspended one goes on later."""
    scheduler, done = Scheduler(1), []
    killed, suspended = Process(scheduler, "killed"), Process(scheduler, "suspended")

    def work():
        try:
            Event().wait(5.0)
            done.append("worked")
        finally:
            Event().wait(1.0)
            done.append("cleaned up")

    killed.spawn(work, "work")
    suspended.spawn(work, "work")
    scheduler.run(1.0)
    killed.crash()
    before = suspended.boottime(), suspended.monotonic()
    suspended.suspend()
    scheduler.run(11.0)
    assert done == []
    suspended.resume()
    assert (round(suspended.boottime() - before[0]), round(suspended.monotonic() - before[1])) == (10, 0)
    scheduler.run(20.0)
    assert done == ["worked", "cleaned up"]
