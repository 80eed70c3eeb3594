"""The simulation in `make test`: some seeds of both deliveries, and rules that it must find broken."""

import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import shrink
from tests.simulation.broken_rules import RULES, broken, plan_of, shows
from tests.simulation.scheduling import Process, Scheduler
from tests.simulation.simulation import MODES, Plan, run
from tests.simulation.threads import Event

_LIMIT_SECONDS = 280
QUICKLY_FOUND = (
    "the transactions of 592f1f3",
    "what is in flight is copied before the scan",
    "the floor waits for open writers",
    "holds are read earlier than the rows",
    "a lease counts from the sending",
)


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


def _is_found(rule, most_seeds, first=0):
    with broken(rule):
        outcomes = (run(plan_of(seed, "", rule)) for seed in range(first, first + most_seeds))
        return any(shows(rule, outcome.problem) for outcome in outcomes)


@pytest.mark.parametrize("rule", QUICKLY_FOUND)
def test_broken_rules_are_found(rule):
    """A run notices that a rule of the product is broken."""
    assert _is_found(rule, 60)


@pytest.mark.complete
@pytest.mark.parametrize("rule", sorted(RULES.keys() - set(QUICKLY_FOUND)))
def test_all_broken_rules_are_found(rule):
    """The same for the rules that take longer."""
    assert _is_found(rule, 600)


@pytest.mark.complete
def test_torn_transactions_are_read_back():
    """A late EndTxn that can end another transaction tears batches, and recovery loses none of their records."""
    rule = "no transaction in an epoch with a late EndTxn"
    with broken(rule):
        outcomes = [run(plan_of(seed, "", rule)) for seed in range(20)]
    assert not [outcome.problem for outcome in outcomes if "lost" in outcome.problem]
    assert sum(outcome.seen["torn transaction read back"] for outcome in outcomes)


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
