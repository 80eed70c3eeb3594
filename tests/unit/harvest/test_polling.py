"""Adaptive polling of the outbox table."""

from itertools import pairwise
from threading import Event

import pytest

from outbox_core.commit_signal import CommitFlag
from outbox_core.harvest.polling import PollSchedule

CEILING = 0.25


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    """Return a clock that stands still."""
    return Clock()


@pytest.fixture
def commits():
    """Return a flag that is not set."""
    return CommitFlag(Event())


@pytest.fixture
def schedule(commits, clock):
    """Return a schedule with a ceiling of a quarter of a second."""
    return PollSchedule(CEILING, commits, clock)


def poll(schedule, clock, *, took=0.0):
    """Wait until a poll is due, have it find no row, and return how long that was."""
    waited = schedule.due_in()
    clock.time += waited
    schedule.poll_starts()
    clock.time += took
    schedule.found_none(took)
    return waited


def test_first_poll_is_due_at_once(schedule):
    """The first poll does not wait."""
    assert schedule.due_in() == 0.0


def test_pauses_grow_to_the_ceiling(schedule, clock):
    """Pauses of an empty table begin with a millisecond, grow, and stay at the ceiling."""
    pauses = [poll(schedule, clock) for _ in range(200)][1:]
    assert pauses[0] == pytest.approx(0.001)
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(pauses))
    assert pauses[-1] == pytest.approx(CEILING)


def test_a_record_waits_for_a_sixteenth_of_the_silence_before_it(schedule, clock):
    """The next poll is a sixteenth of the time since the last record away, and a millisecond at least."""
    began = clock.time
    for _ in range(100):
        poll(schedule, clock)
        expected = min(CEILING, max(0.001, (clock.time - began) / 16))
        assert schedule.due_in() == pytest.approx(expected)


def test_full_batch_is_followed_at_once(schedule, clock):
    """A full batch is followed at once, as more rows are known to wait; another batch after a millisecond."""
    for _ in range(150):
        poll(schedule, clock)
    schedule.found_rows(more=True)
    assert schedule.due_in() == 0.0
    schedule.found_rows(more=False)
    assert schedule.due_in() == pytest.approx(0.001)
    assert poll(schedule, clock) == pytest.approx(0.001)
    assert schedule.due_in() < 0.002, "the pauses begin anew"


def test_signal_ends_a_pause(schedule, clock, commits):
    """A signal makes a poll due a millisecond after the last one, and wakes the waiting thread."""
    for _ in range(150):
        poll(schedule, clock)
    commits.notify()
    assert commits._wake.is_set()
    assert schedule.due_in() == pytest.approx(0.001)
    clock.time += 0.001
    assert schedule.due_in() == 0.0


def test_false_signals_lengthen_the_pause(schedule, clock, commits):
    """Any number of false signals causes at most fifty polls a second, in a table that has been idle for a second."""
    for _ in range(80):
        poll(schedule, clock)
    polls, end = 0, clock.time + 1
    while clock.time < end:
        commits.notify()
        poll(schedule, clock)
        polls += 1
    assert polls < 60
    commits.notify()
    assert schedule.due_in() == pytest.approx(0.02)
    schedule.found_rows(more=False)
    assert schedule.due_in() == pytest.approx(0.001), "a true signal restores the first pause"


def test_signal_during_a_poll_counts_for_the_next(schedule, clock, commits):
    """A signal during a poll counts for the next one, as the poll may have started before the commit."""
    for _ in range(150):
        poll(schedule, clock)
    schedule.poll_starts()
    commits.notify()
    schedule.found_none(0.0)
    assert schedule.due_in() == pytest.approx(0.001)
    poll(schedule, clock)
    assert schedule.due_in() > 0.2, "one signal, one poll"


def test_slow_poll_is_followed_by_a_pause(schedule, clock):
    """A slow empty poll is not repeated before four times its duration, up to two seconds."""
    poll(schedule, clock, took=0.3)
    assert schedule.due_in() == pytest.approx(1.2)
    poll(schedule, clock, took=30.0)
    assert schedule.due_in() == pytest.approx(2.0)


def test_failure_pauses_whatever_the_signals(schedule, commits):
    """An unavailable database is not queried for every signal."""
    schedule.retry_in(0.5)
    commits.notify()
    assert schedule.due_in() == pytest.approx(0.5)


def test_reliable_signals_make_polls_rare(schedule, clock, commits):
    """While every commit is signalled, pauses grow to two seconds; afterwards the old ceiling holds at once."""
    commits.is_reliable = True
    for _ in range(150):
        poll(schedule, clock)
    assert schedule.due_in() == pytest.approx(2.0)
    commits.is_reliable = False
    commits.notify()
    poll(schedule, clock)
    assert schedule.due_in() <= CEILING
