"""One of three harvesters is ill, and the others publish: whoever can work, works."""

import time

import pytest

from tests.chaos.schedule import Fault
from tests.chaos.waiting import LONGEST_SECONDS

pytestmark = [pytest.mark.alone, pytest.mark.real_broker, pytest.mark.timeout(900)]

_ILLNESS_SECONDS = LONGEST_SECONDS + 5
_LOAD = {"outboxes": 1, "records_per_second": 40, "keys": 100}  # no overload, even over slow links
_LONG_SECONDS, _LONG_ILLNESS_SECONDS = 300, 60

both_deliveries = pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])


def _publishes_through(make_run, services, delivery, kind):
    """Let the leader be ill, and return the report and the names of the leaders before it and at its end."""
    name = f"one{delivery[0]}"
    with make_run(name, services, delivery=delivery, deck="one", **_LOAD) as chaos:
        with chaos.under_load():
            began, outbox = time.monotonic(), chaos.outboxes[0]
            before = outbox.leader().name
            chaos.suffer(outbox, Fault(kind, 0.0, count=1, share=0.4, seconds=_ILLNESS_SECONDS))
            after = outbox.leader().name
        return chaos.settle(time.monotonic() - began), before, after


def test_others_publish_while_the_leader_cannot_reach_the_broker_of_the_leader_topic(make_run, three_brokers, say):
    """Exactly once, a leader that cannot write to the leader topic leaves its place to one that can, in order."""
    report, before, after = _publishes_through(make_run, three_brokers, "exactly-once", "link:leader-topic hole")
    say(report.summary())
    assert not report.problems, report.markdown()
    assert after != before


def test_others_publish_while_the_leader_hears_nothing_of_the_database(make_run, services, say):
    """At least once, a leader whose statements get no answer leaves its place to one that can work, in order."""
    report, before, after = _publishes_through(make_run, services, "at-least-once", "link:database answers-lost")
    say(report.summary())
    assert not report.problems, report.markdown()
    assert after != before


@pytest.mark.complete
@both_deliveries
def test_one_of_three_is_always_ill(make_run, three_brokers, say, delivery):
    """For minutes one harvester after the other loses links, stands still or dies, and no row waits for long."""
    settings = {"deck": "one", "longest_illness": _LONG_ILLNESS_SECONDS, **_LOAD}
    with make_run(f"ill{delivery[0]}", three_brokers, delivery=delivery, **settings) as chaos:
        report = chaos.run(_LONG_SECONDS)
    say("\n".join([report.summary(), *report.fault_table()]))
    assert not report.problems, report.markdown()
    assert len(report.faults) >= _LONG_SECONDS / (2 * _LONG_ILLNESS_SECONDS), report.missed
