"""How long the harvester waits before it looks at the table again."""

from itertools import pairwise
from threading import Event

import pytest

from outbox_core.harvest.pace import News, Pace

CEILING = 0.25


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    """Stands still."""
    return Clock()


@pytest.fixture
def news():
    """None yet."""
    return News(Event())


@pytest.fixture
def pace(news, clock):
    """A pace with a ceiling of a quarter of a second."""
    return Pace(CEILING, news, clock)


def look(pace, clock, *, took=0.0):
    """Wait until a look is due, have it find nothing, and return how long that was."""
    waited = pace.due_in()
    clock.time += waited
    pace.begin()
    clock.time += took
    pace.found_nothing(took)
    return waited


def test_first_look_is_due_at_once(pace):
    """Nothing is waited for before the first look."""
    assert pace.due_in() == 0.0


def test_pauses_grow_to_the_ceiling(pace, clock):
    """Pauses of an empty table begin with milliseconds, grow by a third, and stay at the ceiling."""
    pauses = [look(pace, clock) for _ in range(60)][1:]
    assert pauses[0] < 0.002
    assert all(later == pytest.approx(min(CEILING, earlier * 4 / 3)) for earlier, later in pairwise(pauses))
    assert pauses[-1] == pytest.approx(CEILING)


def test_a_record_waits_for_a_third_of_the_silence_before_it(pace, clock):
    """Whenever a record is committed, the next look is no further away than a third of the time without one."""
    began = clock.time
    for _ in range(40):
        look(pace, clock)
        silence = clock.time - began
        assert pace.due_in() <= silence / 3 + 0.002


def test_full_batch_is_followed_at_once(pace, clock):
    """More rows are known to wait: there is no pause. A batch that was not full is followed after a millisecond."""
    for _ in range(50):
        look(pace, clock)
    pace.found(more=True)
    assert pace.due_in() == 0.0
    pace.found(more=False)
    assert pace.due_in() == pytest.approx(0.001)
    assert look(pace, clock) == pytest.approx(0.001)
    assert pace.due_in() < 0.002, "the pauses begin anew"


def test_news_ends_a_pause(pace, clock, news):
    """News makes a look due a millisecond after the last one, however long the pause, and wakes who waits."""
    for _ in range(60):
        look(pace, clock)
    news.tell()
    assert news._wake.is_set()
    assert pace.due_in() == pytest.approx(0.001)
    clock.time += 0.001
    assert pace.due_in() == 0.0


def test_false_news_is_believed_less_and_less(pace, clock, news):
    """However often somebody tells of commits that nobody finds: soon there are fifty looks a second, and no more."""
    looks, end = 0, clock.time + 1
    while clock.time < end:
        news.tell()
        look(pace, clock)
        looks += 1
    assert looks < 60
    news.tell()
    assert pace.due_in() == pytest.approx(0.02)
    pace.found(more=False)
    assert pace.due_in() == pytest.approx(0.001), "what is true once is believed again"


def test_news_during_a_look_counts_for_the_next(pace, clock, news):
    """A look may have begun before the commit that it is told of: it does not use that news up."""
    for _ in range(60):
        look(pace, clock)
    pace.begin()
    news.tell()
    pace.found_nothing(0.0)
    assert pace.due_in() == pytest.approx(0.001)
    look(pace, clock)
    assert pace.due_in() > 0.2, "told once, looked once"


def test_slow_look_rests(pace, clock):
    """A look that found nothing for long is not repeated before four times as long, up to two seconds."""
    look(pace, clock, took=0.3)
    assert pace.due_in() == pytest.approx(1.2)
    look(pace, clock, took=30.0)
    assert pace.due_in() == pytest.approx(2.0)


def test_failure_rests_whatever_the_news(pace, news):
    """A database that is away is not asked again for every commit that somebody tells of."""
    pace.failed(0.5)
    news.tell()
    assert pace.due_in() == pytest.approx(0.5)


def test_promised_news_makes_looks_rare(pace, clock, news):
    """While every commit is told of, pauses grow to two seconds; when that ends, the ceiling is the old one at once."""
    news.is_promised = True
    for _ in range(60):
        look(pace, clock)
    assert pace.due_in() == pytest.approx(2.0)
    news.is_promised = False
    news.tell()
    look(pace, clock)
    assert pace.due_in() <= CEILING
