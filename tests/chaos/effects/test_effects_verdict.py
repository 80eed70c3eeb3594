"""The verdict finds each kind of wrong, and excuses what a killed worker explains."""

from dataclasses import replace

import pytest

from tests.chaos.effects.verdict import Call, Evidence, Run, judge

GROUP, CONCURRENCY = "group", 2
EFFECTS = [("record-0", "c-1"), ("record-1", "c-1"), ("task-5", None), ("task-6", None)]
RUNS = [Run("a", "w1", "worker-1", is_done=True), Run("b", "w1", "worker-1", is_done=True)]
RIGHT = Evidence(
    records={"record-0", "record-1"},
    committed={5: "a", 6: "b"},
    effects=EFFECTS,
    accepted={GROUP: 2, "tasks": 2},
    results={"a": ("SUCCESSFUL", ["w1"]), "b": ("SUCCESSFUL", ["w1"])},
    runs=RUNS,
    calls=[Call("c-1", 1, 1)],
    killed=set(),
    given_back={},
    left={"dead letters": 0},
)
AGAIN = [*RUNS, Run("b", "w2", "worker-2", is_done=True)]
TWICE = RIGHT.results | {"b": ("SUCCESSFUL", ["w1", "w2"])}


def test_all_is_right():
    """Nothing is found; a record whose commit its call saw as a repeat is no wrong."""
    assert judge(RIGHT, GROUP, CONCURRENCY) == {}


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"effects": EFFECTS[1:]}, "without an effect"),
        ({"effects": EFFECTS[:-1]}, "without an effect"),
        ({"effects": [*EFFECTS, ("task-5", None)]}, "more than one effect"),
        ({"effects": [*EFFECTS, ("before", None)]}, "effects of what was refused or never sent"),
        ({"effects": [*EFFECTS, ("task-7", None)]}, "effects of what was refused or never sent"),
        ({"accepted": {GROUP: 1, "tasks": 2}}, "acceptances"),
        ({"accepted": {GROUP: 2, "tasks": 3}}, "acceptances"),
        ({"accepted": {**RIGHT.accepted, "other": 1}}, "acceptances"),
        ({"calls": [Call("c-1", 3, 0)]}, "calls that counted wrong"),
        ({"calls": [Call("c-1", 0, 1)]}, "calls that counted wrong"),
        ({"results": RIGHT.results | {"b": ("RUNNING", ["w1"])}}, "results that are not successful"),
        ({"results": {"a": RIGHT.results["a"]}}, "results without a committed task, or the reverse"),
        ({"runs": [*RUNS, replace(RUNS[0], task="c")]}, "tasks that ran although they were never committed"),
        ({"results": RIGHT.results | {"b": ("SUCCESSFUL", [])}}, "runs that were not counted"),
        ({"results": RIGHT.results | {"b": ("SUCCESSFUL", ["w1"] * 2)}}, "attempts that were counted and never began"),
        (
            {"results": RIGHT.results | {"b": ("SUCCESSFUL", ["w1", *["w3"] * 3])}},
            "attempts that were counted and never began",
        ),
        ({"runs": AGAIN, "results": TWICE}, "tasks that ran again after their end"),
        ({"left": {"dead letters": 1}}, "dead letters"),
    ],
)
def test_what_is_wrong(wrong, kind):
    """Each kind is found, and no other."""
    assert list(judge(replace(RIGHT, **wrong), GROUP, CONCURRENCY)) == [kind]


@pytest.mark.parametrize(
    "explained",
    [
        {"runs": AGAIN, "results": TWICE, "killed": {"worker-1"}},
        {"runs": AGAIN, "results": TWICE, "given_back": {"worker-1": 1}},
        {"results": TWICE, "killed": {"worker-1"}},
        {"results": RIGHT.results | {"b": ("SUCCESSFUL", ["w1"] * 3)}, "killed": {"worker-1"}},
        {
            "runs": [*RUNS, replace(RUNS[0], worker="w2", is_done=False)],
            "results": RIGHT.results | {"a": ("SUCCESSFUL", ["w1", "w2"])},
            "given_back": {"worker-1": 1},
        },
    ],
)
def test_what_a_kill_explains(explained):
    """A task that a killed worker had begun runs again, and so does one whose worker could not write, and gave back."""
    assert judge(replace(RIGHT, **explained), GROUP, CONCURRENCY) == {}
