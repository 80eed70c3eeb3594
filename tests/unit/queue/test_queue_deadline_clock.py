"""The clock of deadlines, with brokers' clocks that are set, skewed and stopped, and monotonic clocks that stop."""

from hypothesis import given
from hypothesis import strategies as st

from outbox_queue.redelivery.deadline_clock import TOLERANCE_MS, DeadlineClock

MINUTE = 60_000.0
HOUR = 60 * MINUTE
STEPS = st.lists(
    st.tuples(
        st.floats(0, 4000),  # milliseconds since the last marker
        st.one_of(st.just(0.0), st.floats(-2 * HOUR, 2 * HOUR)),  # how far the broker's clock is set
        st.booleans(),  # whether the broker's clock stands still meanwhile
    ),
    max_size=40,
)


class World:
    """A broker with a clock of its own, and a tracker that reads each marker at once."""

    def __init__(self, clock, stamp=1_000_000.0):
        self.clock, self.stamp, self.now = clock, stamp, 5_000.0

    def pass_by(self, milliseconds, *, set_by=0.0, stopped=False):
        self.now += milliseconds
        self.stamp += set_by + (0 if stopped else milliseconds)

    def marker(self):
        return self.clock.read(self.stamp, self.now)

    def tick(self):
        appended = self.marker()
        self.clock.read_up_to(self.now, self.now)
        return appended


def test_no_time_before_the_first_marker():
    """Before the first marker there is no time, even if all markers have been read."""
    clock = DeadlineClock()
    clock.read_up_to(1.0, 2.0)
    assert clock.time(3.0) is None
    assert [clock.read(stamp, 3.0) for stamp in (5.0, 5000.0)] == [5.0, 5000.0]


def test_history_is_read_at_any_speed():
    """Timestamps of old markers are taken as they are, independent of the monotonic clock."""
    clock = DeadlineClock()
    assert [clock.read(stamp, 7.0) for stamp in (1000.0, 61_000.0, 3_661_000.0)] == [1000.0, 61_000.0, 3_661_000.0]
    assert clock.time(7.0) == 3_661_000.0


def test_a_clock_set_back_in_history_does_not_go_back():
    """In history, a marker is never earlier than one before it."""
    clock = DeadlineClock()
    clock.read(HOUR, 1.0)
    assert clock.read(MINUTE, 1.0) == HOUR


def test_time_goes_on_without_markers():
    """Between markers the monotonic clock counts."""
    world = World(DeadlineClock())
    appended = world.tick()
    assert world.clock.time(world.now + 1234.0) == appended + 1234.0


def test_a_tracker_that_slept_puts_markers_where_they_belong():
    """Markers read late, after a pause of the tracker, count from when they were appended."""
    world = World(DeadlineClock())
    appended = world.tick()
    stamps = [world.stamp + late for late in (1000.0, 20_000.0, 59_000.0)]
    world.pass_by(MINUTE)
    assert [world.clock.read(stamp, world.now) - appended for stamp in stamps] == [1000.0, 20_000.0, 59_000.0]


@given(STEPS)
def test_it_never_goes_back(steps):
    """Time does not go back with any clock of brokers, and no marker is later than now, but for the tolerance."""
    world = World(DeadlineClock())
    last = world.tick()
    for milliseconds, set_by, stopped in steps:
        world.pass_by(milliseconds, set_by=set_by, stopped=stopped)
        before = world.clock.time(world.now)
        assert world.marker() <= before + TOLERANCE_MS
        assert world.clock.time(world.now) >= before >= last
        last = world.clock.time(world.now)


@given(STEPS)
def test_a_kept_alive_message_never_expires(steps):
    """With timely keep-alives and ticks, no setting of brokers' clocks makes a message expire."""
    world = World(DeadlineClock())
    deadline = world.tick() + 15_000.0
    for milliseconds, set_by, stopped in steps:
        world.pass_by(milliseconds, set_by=set_by, stopped=stopped)
        assert world.clock.time(world.now) < deadline
        deadline = world.marker() + 15_000.0
        world.tick()


@given(STEPS)
def test_an_abandoned_message_expires(steps):
    """A message without keep-alives expires within its timeout, independent of brokers' clocks."""
    world = World(DeadlineClock())
    deadline, begun = world.tick() + 15_000.0, world.now
    for milliseconds, set_by, stopped in steps:
        world.pass_by(milliseconds, set_by=set_by, stopped=stopped)
        world.tick()
    world.pass_by(max(0.0, begun + 15_000.0 - world.now))
    assert world.clock.time(world.now) >= deadline


@given(st.floats(-HOUR, HOUR))
def test_a_clock_that_was_set_is_right_afterwards(set_by):
    """After a step of the broker's clock, intervals between markers are right again."""
    world = World(DeadlineClock())
    world.tick()
    world.pass_by(500.0, set_by=set_by)
    first = world.tick()
    world.pass_by(2500.0)
    assert abs(world.marker() - first - 2500.0) <= TOLERANCE_MS + 500.0


def test_a_monotonic_clock_that_stopped_delays_and_expires_nothing():
    """If the tracker's own clock stood still, messages started before wait longer; none expires early."""
    world = World(DeadlineClock())
    deadline = world.tick() + MINUTE
    world.stamp += HOUR
    fresh = world.marker()
    assert world.clock.time(world.now) < deadline
    assert fresh <= world.clock.time(world.now)
