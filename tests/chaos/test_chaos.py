"""Bounded chaos runs: every kind of fault at least once. `make chaos` runs for as long as one likes."""

import time

import pytest

from tests.chaos.schedule import outbox_kinds, shared_kinds

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(900)]

_LONGEST_SECONDS = 300  # on a busy machine; else it takes about one minute
_TWO_LEADERS_SECONDS = 15
_CHANGES = 4


def _assert_clean(report):
    assert not report.problems, report.markdown()


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_every_kind_of_fault(make_run, say, delivery):
    """Exactly once: nothing lost, repeated or reordered. At least once: the same, but for adjacent repeats."""
    leading = "mixed" if delivery == "exactly-once" else "elected"
    name = delivery.partition("-")[0]
    with make_run(name, delivery=delivery, outboxes=4, records_per_second=800, leading=leading) as chaos:
        report = chaos.run(_LONGEST_SECONDS, one_of_each=True)
    say(report.summary())
    _assert_clean(report)
    assert set(report.by_kind) == {*outbox_kinds(delivery), *shared_kinds(delivery)}, report.missed


def test_two_that_always_believe_to_lead(make_run, say):
    """Kafka keeps them apart: nothing lost, repeated or reordered, and both make progress."""
    settings = {"delivery": "exactly-once", "leading": "always", "limits": {"mark_query_records": 25}}
    with make_run("both", outboxes=1, records_per_second=500, **settings) as chaos:
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
