"""The findings that make a run unclean."""

import json

import pytest

from tests.chaos.late import LateArrival
from tests.chaos.report import Happened, Report

_COUNTS = (
    *("committed", "received", "rolled_back", "lost", "repeated_adjacent", "repeated_distant", "reordered"),
    *("strangers", "mislabelled", "excused", "transactions"),
)


def _report(*, delivery="exactly-once", **found):
    settings = {"seed": 1, "seconds": 1.0, "outboxes": 1, "longest_pause": 0.0, "pauses": {}, "faults": []}
    settings |= dict.fromkeys(_COUNTS, 0) | {"missed": [], "failures": []}
    return Report(delivery=delivery, **(settings | found))


def _late(request, end, code):
    arrival = LateArrival(request, 1.5, code, end)
    return Happened(at=0, began_at=0, ended_at=0, where="a", kind="late", what="", recovered=0.1, late=arrival)


@pytest.mark.parametrize(
    "found",
    [
        *({name: 1} for name in ("lost", "repeated_adjacent", "repeated_distant", "reordered", "strangers")),
        {"left_in_outbox": 3},
        {"drained": 30.5},
        {"failures": ["it ended"]},
        {"unread": ["t[0]"]},
        {"long_waits": ["row 7 has waited 46 s"]},
    ],
    ids=str,
)
def test_every_finding_makes_a_run_unclean(found):
    """Each finding alone makes a run unclean, also records that waited for too long after the last fault."""
    assert not _report(drained=29.5).problems
    assert len(_report(**found).problems) == 1


def test_at_least_once_may_repeat_a_record_at_once():
    """At least once may repeat a record at once, and not later."""
    assert not _report(delivery="at-least-once", repeated_adjacent=5).problems
    assert _report(delivery="at-least-once", repeated_distant=1).problems


def test_what_a_broker_has_forgotten_comes_first():
    """A report names what a broker has forgotten before what may follow from it; alone it is no problem."""
    problems = _report(forgotten_ends=2, strangers=1).problems
    assert [problem.endswith(end) for problem, end in zip(problems, (": 2", ": 1"), strict=True)] == [True, True]
    assert "KAFKA-20734" in problems[0]
    assert not _report(forgotten_ends=2).problems
    assert len(_report(delivery="at-least-once", forgotten_ends=2, strangers=1).problems) == 1


def test_the_longest_wait_of_each_kind_of_fault_is_shown():
    """A report names the longest wait of a row beside each kind of fault, and that of the run."""
    told = {"at": 0, "began_at": 0, "ended_at": 0, "where": "a", "what": "", "recovered": None}
    hole = [Happened(kind="link:database hole", waited=waited, **told) for waited in (12.5, 31.2, 4.0)]
    report = _report(faults=[*hole, Happened(kind="process:kill", **told)])
    assert "longest wait of a row 31 s" in report.summary()
    assert "| link:database hole | 3 | - | - | 31 |" in report.markdown()
    assert "| process:kill | 1 | - | - | - |" in report.markdown()


def test_late_requests_are_counted_by_what_they_did(tmp_path):
    """Late requests are counted by their effect, without those that were lost with their connection."""
    faults = [
        _late("END_TXN commit", "answered", 0),
        _late("END_TXN commit", "answered", 47),
        _late("PRODUCE", "answered", None),
        _late("FETCH", "lost", None),
    ]
    report = _report(faults=faults)
    assert "late requests 3, of them ends of transactions 2 (1 took effect)" in report.summary()
    assert "| END_TXN commit | answered | 47 | 1 |" in report.markdown()
    report.write(tmp_path)
    assert len(json.loads((tmp_path / "report.json").read_text())["late"]) == 3
