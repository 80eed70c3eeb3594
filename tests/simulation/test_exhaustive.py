"""The search of all interleavings in `make test`: it ends, sees broken rules, and repeats itself."""

import os
import subprocess
import sys

import pytest

from outbox_core.errors import must
from outbox_core.harvest.exactly_once.term import Term
from tests.simulation.exhaustive import Search, quiet_product, trace
from tests.simulation.small_world import Scope, World

_SMALL = Scope(records=1, batch=1, crashes=0, late=0, lease_ends=False)
_LIMIT_SECONDS = 3_600


def _states(scope, *wanted):
    """Return the fingerprints along a path: the first event with each text in its label, '' for the ordinary one."""
    with quiet_product(""):
        world = World(scope)
        found = [world.fingerprint()]
        for text in wanted:
            world.take(next(event for event in world.events() if text in event.label))
            found.append(world.fingerprint())
        world.close()
    return found


def test_promises_hold_in_every_order():
    """A record is published once, wherever its harvester crashes and whatever arrives first."""
    scope = Scope(records=1, batch=1, harvesters=1, late=0)
    found = Search(scope).run()
    assert not found.violations, trace(scope, found.violations[0][1])
    assert not found.endless, "from every state the ordinary course leads to an end"
    assert not found.left
    assert found.ended < found.paths < found.states, "most paths meet a state that is known"


def test_broken_rule_is_found():
    """A commit whose outcome is unknown and that is believed all the same loses the record: one unusual choice."""
    rule = "an unknown outcome is no success"
    found = Search(_SMALL, rule).run(deviations=1)
    problem, choices = found.violations[0]
    assert problem == "deleted, and not in Kafka: [b'r1']"
    assert "* B begins to lead" in trace(_SMALL, choices, rule)


def test_a_broken_invariant_is_found(monkeypatch):
    """A term that finds an invariant broken is a violation."""
    monkeypatch.setattr(Term, "_take_in_flight", lambda *_: must(condition=False, message="it must hold"))
    found = Search(_SMALL).run(deviations=0)
    assert [problem for problem, _ in found.violations] == ["A ended with InvariantBroken: it must hold"]


def test_orders_without_a_difference_are_one_state():
    """Questions of two harvesters to different servers commute; those to one server do not."""
    start = ["begins", "A: Init", "B: Init"]
    one = _states(_SMALL, *start, "A: AddPartitions", "B: AddPartitions")
    other = _states(_SMALL, *start, "B: AddPartitions", "A: AddPartitions")
    assert one[-1] == other[-1], "A is fenced, whichever comes first"
    assert one[-2] != other[-2]
    swapped = _states(_SMALL, "begins", "B: Init", "A: Init", "A: AddPartitions", "B: AddPartitions")
    assert swapped[-1] != one[-1], "the last one fences the other"
    assert len(set(one)) == len(one), "every event leads to another state"


def test_path_repeats():
    """The same choices lead through the same states: a search may begin each path anew."""
    path = [""] * 20
    assert _states(Scope(), "", "begins", *path) == _states(Scope(), "", "begins", *path)


def _explore(*arguments):
    command = [sys.executable, "-m", "tests.simulation.exhaustive", *arguments]
    return subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )


@pytest.mark.complete
def test_promises_hold_in_the_whole_scope():
    """The search of `make explore` ends without a violation."""
    done = _explore()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.complete
@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("an unknown outcome is no success", "deleted, and not in Kafka"),
        ("a term reads the last manifest", "repeated"),
        ("what a predecessor published is deleted", "repeated"),
        ("a torn transaction is read back", "repeated"),
        ("a batch is purged before the next commit", "repeated"),
    ],
)
def test_broken_rules_are_found(rule, problem):
    """The search sees each rule of the term that is broken, and says how."""
    done = _explore("--rule", rule)
    assert done.returncode == 1, done.stdout + done.stderr
    assert problem in done.stdout.splitlines()[-1]
