"""The simulation of consumers and tasks in `make test`: some seeds, and rules that it must find broken."""

import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import outcome_of, shrink
from tests.simulation.broken_consuming_rules import CONSUMER_RULES
from tests.simulation.consuming_simulation import GROUPS, ConsumerPlan, run

_LIMIT_SECONDS = 280


def _simulate(*arguments):
    """Run the command for consumers, and return its result; the order of sets of texts is the same in each."""
    command = [sys.executable, "-m", "tests.simulation", "--mode", "consumers", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)


def test_promises_of_consumers_hold():
    """In some virtual minutes of faults every record has its effect once, and every task an outcome that is true."""
    done = _simulate("--hours", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outcome of a COMMIT unknown" in done.stdout


@pytest.mark.complete
def test_promises_of_consumers_hold_for_hours():
    """The same for two virtual hours."""
    done = _simulate("--hours", "2", "--first", "1000")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "rule",
    [
        "success is what the database confirms",
        "what was begun again is not confirmed",
        "an offset is committed behind its transaction",
        "a broken connection is replaced",
        "a receiver's error is not the task's",
    ],
)
def test_broken_rules_of_consumers_are_found(rule):
    """A run notices that a rule of consumers or tasks is broken."""
    assert any(outcome_of(ConsumerPlan.of(seed), rule).problem for seed in range(100))


@pytest.mark.complete
def test_all_broken_rules_of_consumers_are_found():
    """The same for all rules; some take longer."""
    for rule in CONSUMER_RULES:
        assert any(outcome_of(ConsumerPlan.of(seed), rule).problem for seed in range(100)), rule


def test_failing_plan_of_consumers_is_shrunk():
    """Shrinking leaves a smaller plan that still fails."""
    plan = ConsumerPlan(1, "consumers", ("crash",), writers=1, seconds=10.0, conducts=("swallow",))
    rule = "success is what the database confirms"
    smaller = shrink(plan, rule)
    assert outcome_of(smaller, rule).problem
    assert (len(smaller.groups), smaller.faults) == (1, ()), "one consumer and a handler that swallows errors suffice"


def test_seed_of_consumers_replays():
    """The same plan takes the same steps, to the last line of its trace."""
    faults = ("crash", "move", "at a statement", "terminate", "in a handler")
    plan = ConsumerPlan(7, "consumers", faults, writers=1, seconds=10.0, groups=GROUPS)
    first, second = run(plan, trace=10_000), run(plan, trace=10_000)
    assert first.trace == second.trace
    assert (first.steps, first.records) == (second.steps, second.records)
    assert first.records
