"""Tests of the schedule: it comes from its seed alone, and leaves no kind out."""

from itertools import islice

import pytest

from tests.chaos.failpoints import ArmedFailpoint
from tests.chaos.schedule import DECKS, Schedule, outbox_kinds, shared_kinds


def _faults(seed, delivery="exactly-once", outboxes=3, each=40):
    schedule = Schedule(seed, delivery, outboxes)
    lists = [schedule.of_services(), *(schedule.of_outbox(number) for number in range(outboxes))]
    return [list(islice(faults, each)) for faults in lists]


def test_the_same_seed_gives_the_same_schedule():
    """The seed that a run prints is enough to repeat its faults."""
    assert _faults(7) == _faults(7)
    assert _faults(7) != _faults(8)


@pytest.mark.parametrize("deck", DECKS)
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_every_kind_comes_before_any_comes_twice(delivery, deck):
    """A short run has met every fault of its deck."""
    kinds, outboxes = outbox_kinds(delivery, deck, 3), 3
    schedule = Schedule(1, delivery, outboxes, deck, 3)
    rounds = [islice(schedule.of_outbox(number), len(kinds[number::outboxes])) for number in range(outboxes)]
    assert sorted(fault.kind for faults in rounds for fault in faults) == sorted(kinds)
    shared = shared_kinds(delivery, deck, 3)
    assert sorted(fault.kind for fault in islice(schedule.of_services(), len(shared))) == sorted(shared)
    assert schedule.kinds() == {*kinds, *shared}


def test_an_illness_lasts_for_as_long_as_was_asked():
    """Each illness lasts for ten seconds to two minutes by default, or to a shorter time."""
    for longest in (120, 40):
        schedule = Schedule(1, "exactly-once", 1, "one", 3, longest)
        seconds = [fault.seconds for fault in islice(schedule.of_outbox(0), 100)]
        assert 10 <= min(seconds) < 15
        assert longest - 10 < max(seconds) <= longest


def test_at_least_once_has_no_coordinator_of_transactions_to_lose():
    """A kind is not listed where it would disturb nobody."""
    assert "link:transactions hole" in outbox_kinds("exactly-once", "one", 3)
    assert "link:transactions hole" not in outbox_kinds("at-least-once", "one", 3)
    alone = [kind for kind in outbox_kinds("exactly-once", "one") if kind.startswith("link:")]
    assert {kind.split()[0] for kind in alone} == {"link:database", "link:brokers"}


def test_half_of_the_late_requests_end_transactions():
    """Half of the late requests end transactions, as these do the most harm."""
    kinds = outbox_kinds("exactly-once", "late")
    assert sum("end-txn" in kind for kind in kinds) * 2 == len(kinds)


def test_one_broker_suffers_nothing_that_takes_three():
    """Every deck can be played with one broker."""
    for deck in DECKS:
        assert not [kind for kind in outbox_kinds("exactly-once", deck) if kind.startswith(("move-", "cut-leader"))]


@pytest.mark.parametrize(
    ("text", "failpoint"),
    [
        ("commit-sent:3", ArmedFailpoint("commit-sent", 3, "kill", 0.003)),
        ("after-produce:1:stop", ArmedFailpoint("after-produce", 1, "stop", 0.0)),
        ("before-purge:2:kill:0.5", ArmedFailpoint("before-purge", 2, "kill", 0.5)),
        ("after-mark", ArmedFailpoint("after-mark", 1, "kill", 0.0)),
    ],
)
def test_a_failpoint_is_written_as_text(text, failpoint):
    """A failpoint written as text reads back as it was."""
    assert ArmedFailpoint.parse(text) == failpoint
    assert ArmedFailpoint.parse(str(failpoint)) == failpoint


@pytest.mark.parametrize("text", ["nowhere:1", "committed:1:explode", "committed:x"])
def test_a_failpoint_that_does_not_exist_is_refused(text):
    """A misspelt step is refused: otherwise the test would pass without testing."""
    with pytest.raises(ValueError, match=r"no such|invalid literal"):
        ArmedFailpoint.parse(text)
