"""Bounded chaos runs: every kind of fault at least once. `make chaos` runs for as long as one likes."""

import time

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.real_broker, pytest.mark.timeout(900)]

_LONGEST_SECONDS = 300  # on a busy machine; else it takes about one minute
_TWO_LEADERS_SECONDS = 15
_RATES = {"exactly-once": 800, "at-least-once": 300}  # what two cores can make up for after the last fault
_CHANGES = 4
_LATE_SECONDS = {"exactly-once": 40, "at-least-once": 15}
_HOSTILE_SECONDS = 15
_LONGEST_PAUSE_SECONDS = 10


def _assert_clean(report):
    assert not report.problems, report.markdown()


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_every_kind_of_fault(make_run, say, delivery):
    """Exactly once: nothing lost, repeated or reordered. At least once: the same, but for adjacent repeats."""
    leading = "mixed" if delivery == "exactly-once" else "elected"
    name = delivery.partition("-")[0]
    rate = _RATES[delivery]
    with make_run(name, delivery=delivery, outboxes=4, records_per_second=rate, leading=leading) as chaos:
        report = chaos.run(_LONGEST_SECONDS, one_of_each=True)
    say(report.summary())
    _assert_clean(report)
    assert set(report.by_kind) == chaos.schedule.kinds(), report.missed


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_requests_that_arrive_late(make_run, say, delivery):
    """Ends of transactions, records and what else may come twice: late copies lose, repeat and reorder nothing."""
    seconds = _LATE_SECONDS[delivery]
    with make_run(f"late{delivery[0]}", delivery=delivery, outboxes=4, records_per_second=1500, deck="late") as chaos:
        report = chaos.run(seconds)
    say("\n".join([report.summary(), *report.late_table()]))
    _assert_clean(report)
    assert len(report.late) >= seconds / 3, report.missed
    if delivery == "exactly-once":
        assert {arrival.request for arrival in report.late} >= {"END_TXN commit", "END_TXN abort"}


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_three_brokers(make_run, three_brokers, say, delivery):
    """Leaders and coordinators that move or are cut off alone, killed and isolated brokers, a min ISR that is lost."""
    name = f"three{delivery[0]}"
    with make_run(name, three_brokers, delivery=delivery, outboxes=3, records_per_second=300, deck="brokers") as chaos:
        report = chaos.run(_LONGEST_SECONDS, one_of_each=True)
    say(report.summary())
    _assert_clean(report)
    assert set(report.by_kind) == chaos.schedule.kinds(), report.missed


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_hostile_rows(make_run, say, delivery):
    """A role with INSERT alone writes what it likes: others' records arrive, in time and order, and none is missing."""
    name = f"rows{delivery[0]}"
    with make_run(name, delivery=delivery, outboxes=2, records_per_second=600, hostile=True) as chaos:
        report = chaos.run(_HOSTILE_SECONDS, faults=False)
    say(f"{report.summary()}\nhostile rows: {report.hostile}, published {report.odd}")
    _assert_clean(report)
    assert report.hostile["written"] > 10 * _HOSTILE_SECONDS
    assert report.longest_pause < _LONGEST_PAUSE_SECONDS


def test_two_that_always_believe_to_lead(make_run, say):
    """Kafka keeps them apart: nothing lost, repeated or reordered, and both make progress."""
    settings = {"delivery": "exactly-once", "leading": "always", "limits": {"mark_query_records": 25}}
    with make_run("both", outboxes=1, records_per_second=250, **settings) as chaos:  # each fence costs both 0.1 s
        report = chaos.run(_TWO_LEADERS_SECONDS, faults=False)
        sides = chaos.outboxes[0].committed_by_side
    say(f"{report.summary()}\ntransactions of each: {sides}")
    _assert_clean(report)
    assert min(sides) > 20


def test_changes_of_mode_under_load(make_run, say):
    """Harvesters are replaced one by one, in the other mode: nothing is lost, reordered or repeated."""
    modes = ["exactly-once", "at-least-once"] * (_CHANGES // 2)
    with make_run("modes", delivery="at-least-once", outboxes=2, records_per_second=600) as chaos:
        with chaos.under_load():
            began = time.monotonic()
            for mode in modes:
                for outbox in chaos.outboxes:
                    for side in (0, 1):
                        outbox.replace(side, mode)
                since = time.time()
                for outbox in chaos.outboxes:
                    assert chaos.reader.wait_for_delivery(outbox.name, since, 90) is not None, "it does not go on"
        report = chaos.settle(time.monotonic() - began)
    say(report.summary())
    _assert_clean(report)
    assert report.repeated_adjacent == 0, "a graceful change of mode repeated something"
