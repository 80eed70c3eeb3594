"""Bounded chaos runs: some seconds of faults, or every kind once and for both deliveries (`make test-all`)."""

import time

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.real_broker, pytest.mark.timeout(900)]

_SOME_SECONDS = 10
_LONGEST_SECONDS = 300  # on a busy machine; else it takes about one minute
_TWO_LEADERS_SECONDS = 8
_RATES = {"exactly-once": 800, "at-least-once": 300}  # rates that two cores can make up for after the last fault
_LATE_SECONDS = 12
_LONGER_LATE_SECONDS = 40
_HOSTILE_SECONDS = 8
_LONGEST_PAUSE_SECONDS = 10

some_or_all = pytest.mark.parametrize(
    "every_kind", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.complete)]
)
both_deliveries = pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
at_least_once_in_complete_runs = pytest.mark.parametrize(
    "delivery", ["exactly-once", pytest.param("at-least-once", marks=pytest.mark.complete)]
)


def _assert_clean(report):
    assert not report.problems, report.markdown()


def _run_deck(chaos, every_kind, say):
    """Let faults happen for some seconds, or until each kind has happened once, and judge."""
    report = chaos.run(_LONGEST_SECONDS if every_kind else _SOME_SECONDS, one_of_each=every_kind)
    say(report.summary())
    _assert_clean(report)
    if every_kind:
        assert set(report.by_kind) == chaos.schedule.kinds(), report.missed


@some_or_all
@both_deliveries
def test_faults(make_run, say, delivery, every_kind):
    """Faults lose, repeat and reorder no record; at least once may repeat a record at once."""
    leading = "mixed" if delivery == "exactly-once" else "elected"
    name = delivery.partition("-")[0]
    rate, outboxes = (_RATES[delivery], 4) if every_kind else (_RATES[delivery] // 2, 2)
    with make_run(name, delivery=delivery, outboxes=outboxes, records_per_second=rate, leading=leading) as chaos:
        _run_deck(chaos, every_kind, say)


@some_or_all
@at_least_once_in_complete_runs
def test_requests_that_arrive_late(make_run, say, delivery, every_kind):
    """Late copies of requests, such as ends of transactions, lose, repeat and reorder no record."""
    seconds = _LONGER_LATE_SECONDS if every_kind else _LATE_SECONDS
    rate, outboxes = (1500, 4) if every_kind else (600, 2)
    name = f"late{delivery[0]}{int(every_kind)}"
    with make_run(name, delivery=delivery, outboxes=outboxes, records_per_second=rate, deck="late") as chaos:
        report = chaos.run(seconds)
    say("\n".join([report.summary(), *report.late_table()]))
    _assert_clean(report)
    # Each waits for a request of its kind, and some kinds are rare: a broker is asked for offsets at few moments.
    assert len(report.late) >= seconds / 6, report.missed
    if delivery == "exactly-once" and every_kind:
        assert {arrival.request for arrival in report.late} >= {"END_TXN commit", "END_TXN abort"}


@pytest.mark.complete
@some_or_all
@both_deliveries
def test_three_brokers(make_run, three_brokers, say, delivery, every_kind):
    """Three brokers whose leaders and coordinators move, die or are isolated lose, repeat and reorder no record."""
    name = f"three{delivery[0]}{int(every_kind)}"
    outboxes = 3 if every_kind else 1
    with make_run(
        name, three_brokers, delivery=delivery, outboxes=outboxes, records_per_second=300, deck="brokers"
    ) as chaos:
        _run_deck(chaos, every_kind, say)


@pytest.mark.complete
@both_deliveries
def test_hostile_rows(make_run, say, delivery):
    """A role with INSERT alone writes hostile rows, and all other records arrive, in time and in order."""
    name = f"rows{delivery[0]}"
    with make_run(name, delivery=delivery, outboxes=2, records_per_second=600, hostile=True) as chaos:
        report = chaos.run(_HOSTILE_SECONDS, faults=False)
    say(f"{report.summary()}\nhostile rows: {report.hostile}, published {report.odd}")
    _assert_clean(report)
    assert report.hostile["written"] > 10 * _HOSTILE_SECONDS
    assert report.longest_pause < _LONGEST_PAUSE_SECONDS


def test_two_that_always_believe_to_lead(make_run, say):
    """Of two leaders that always believe to lead both make progress, and no record is lost, repeated or reordered."""
    settings = {"delivery": "exactly-once", "leading": "always", "limits": {"mark_query_records": 25}}
    with make_run("both", outboxes=1, records_per_second=180, **settings) as chaos:  # each fence costs both 0.1 s
        report = chaos.run(_TWO_LEADERS_SECONDS, faults=False)
        sides = chaos.outboxes[0].committed_by_side
    say(f"{report.summary()}\ntransactions of each: {sides}")
    _assert_clean(report)
    assert min(sides) > 10


@pytest.mark.complete
def test_changes_of_mode_under_load(make_run, say):
    """Harvesters replaced one by one, in the other mode, lose, reorder and repeat no record."""
    with make_run("modes", delivery="at-least-once", outboxes=2, records_per_second=600) as chaos:
        with chaos.under_load():
            began = time.monotonic()
            for mode in ("exactly-once", "at-least-once"):
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
