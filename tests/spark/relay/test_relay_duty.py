"""The watch over a relay's batches: when it has the elector step down, and whether it is able again."""

import threading

import pytest

from outbox_core.errors import KafkaUnavailable, StoreUnavailable
from outbox_core.kafka.duty import NEW_PATIENCE_SECONDS, PATIENCE_SECONDS
from outbox_spark.relay import duty
from outbox_spark.relay.duty import RelayDuty
from tests.harvesting import wait_until

SLOW = 400.0


class Store:
    """A store of a table that may be away."""

    def __init__(self, world):
        self._world = world

    def is_empty(self):
        if self._world.is_away:
            raise StoreUnavailable("away")
        return True

    def close(self):
        self._world.closed += 1


class World:
    """A clock, and what Kafka and the database answer."""

    def __init__(self):
        self.now = 1000.0
        self.members = 2
        self.silent = []
        self.is_away = False
        self.closed = 0
        self.steps = []

    def monotonic(self):
        return self.now

    def brokers(self, *_):
        if self.silent is None:
            raise KafkaUnavailable("nobody answers")
        return self.silent

    def group_members(self, *_, **__):
        return None if self.members is None else frozenset(map(str, range(self.members)))

    def step_down(self, reason, is_able):
        self.steps.append((self.now, reason, is_able))

    def pass_time(self, watch, seconds):
        for _ in range(int(seconds)):
            self.now += 1.0
            watch.look(self.step_down)


@pytest.fixture
def world(monkeypatch):
    """A world of its own clock."""
    world = World()
    monkeypatch.setattr(duty.time, "monotonic", world.monotonic)
    monkeypatch.setattr(duty, "unreachable_brokers", world.brokers)
    monkeypatch.setattr(duty, "group_members", world.group_members)
    return world


@pytest.fixture
def watch(world):
    """The watch over a relay that has led for a while, and published."""
    made = RelayDuty({}, "group", lambda: Store(world))
    made.leads(True)
    made.tries()
    made.succeeded()
    world.now += 100
    return made


def test_batches_that_fail_for_long_end_the_leadership(world, watch):
    """Tries that fail count from the first one's beginning; the reason of the last one is told, once."""
    began = world.now
    for _ in range(5):
        watch.tries()
        world.pass_time(watch, 5)
        watch.failed("the database is away", for_all=False)
    world.pass_time(watch, 60)
    ((at, reason, _),) = world.steps
    assert at - began <= PATIENCE_SECONDS + 1
    assert "could not publish rows for" in reason
    assert "the database is away" in reason


def test_a_step_that_hangs_ends_the_leadership(world, watch):
    """A step that takes moments, such as the planner's, has the patience and no more, even if this process is able."""
    began = world.now
    watch.tries()
    world.pass_time(watch, 60)
    assert PATIENCE_SECONDS <= world.steps[0][0] - began <= PATIENCE_SECONDS + 3


@pytest.mark.parametrize("is_new", [False, True])
def test_a_job_may_take_long_while_this_process_is_able(world, watch, is_new):
    """A job that waits for its executors keeps the leadership, of a newcomer, too; and so does what follows it."""
    if is_new:
        watch.leads(False)
        watch.leads(True)
    for _ in range(3):
        watch.tries(SLOW)
        world.pass_time(watch, SLOW - 10)
        watch.tries()
        world.pass_time(watch, 5)
    watch.tries(SLOW)
    world.pass_time(watch, 100)
    watch.succeeded()
    world.pass_time(watch, 100)
    assert world.steps == []


def test_a_job_without_an_end_ends_the_leadership(world, watch):
    """A job has a time of its own, after which it does not count as slow."""
    began = world.now
    watch.tries(SLOW)
    world.pass_time(watch, SLOW + 100)
    assert SLOW <= world.steps[0][0] - began <= SLOW + PATIENCE_SECONDS + 3


@pytest.mark.parametrize("away", ["the database", "a broker"])
def test_a_job_does_not_hide_that_this_process_is_unable(world, watch, away):
    """A link that is lost while a job is under way ends the leadership as soon as without one."""
    watch.tries(SLOW)
    world.pass_time(watch, 100)
    cut_at = world.now
    world.is_away, world.silent = away == "the database", ["broker 1 at h:9092"] if away == "a broker" else []
    world.pass_time(watch, 60)
    assert world.steps[0][0] - cut_at <= PATIENCE_SECONDS + 3


def test_a_job_after_one_that_failed_is_no_slow_one(world, watch):
    """Tasks that fail elsewhere after their own patience end the leadership soon, though the driver is able."""
    watch.tries(SLOW)
    world.pass_time(watch, 90)
    assert world.steps == []
    watch.failed("the workers reach no broker", for_all=False)
    watch.tries()
    watch.tries(SLOW)
    world.pass_time(watch, PATIENCE_SECONDS + 3)
    ((_, reason, _),) = world.steps
    assert "the workers reach no broker" in reason


def test_what_fails_for_all_keeps_the_leadership(world, watch):
    """A table that is missing is so for every process: nobody gains by a hand-over."""
    for _ in range(50):
        watch.tries()
        watch.failed("the table is missing", for_all=True)
        world.pass_time(watch, 5)
    assert world.steps == []


def test_a_driver_that_hangs_is_watched_in_its_next_leadership(world, watch):
    """A driver that never begins the leadership that was won loses it, each time, without a word of its own."""
    watch.tries()
    world.pass_time(watch, 30)
    assert len(world.steps) == 1
    for number in (2, 3):
        watch.leads(False)
        world.pass_time(watch, 100)
        watch.leads(True)
        world.pass_time(watch, NEW_PATIENCE_SECONDS + 3)
        assert len(world.steps) == number


def test_batches_that_succeed_keep_the_leadership(world, watch):
    """Batches, and failures between successes, are in order; so is a relay that does not lead."""
    for _ in range(10):
        watch.tries(SLOW)
        world.pass_time(watch, 14)
        watch.succeeded()
        watch.tries()
        world.pass_time(watch, 2)
        watch.failed("once", for_all=False)
    assert world.steps == []
    watch.leads(False)
    world.pass_time(watch, 300)
    assert world.steps == []


def test_a_relay_alone_tries_on(world, watch, caplog):
    """Nobody else could take over: it keeps the leadership, says so once, and looks again."""
    world.members = 1
    watch.tries()
    watch.failed("the database is away", for_all=False)
    world.pass_time(watch, 100)
    assert world.steps == []
    assert sum("this one tries on" in line for line in caplog.messages) == 1
    world.members = 2
    world.pass_time(watch, 5)
    assert len(world.steps) == 1


def test_a_new_leader_is_given_longer(world, watch):
    """A relay that has not published since it was elected steps down after a minute."""
    watch.leads(False)
    watch.leads(True)
    began = world.now
    watch.tries()
    watch.failed("the database is away", for_all=False)
    world.pass_time(watch, 120)
    assert world.steps[0][0] - began >= NEW_PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("is_away", "silent", "is_able"),
    [(False, [], True), (True, [], False), (False, ["broker 1 at h:9092"], False), (False, None, False)],
)
def test_it_is_able_if_it_reaches_all(world, watch, is_away, silent, is_able):
    """The table can be read over a new connection, which is closed, and every broker answers."""
    world.is_away, world.silent = is_away, silent
    assert watch.is_able() == is_able
    assert world.closed == 1


def test_its_thread_ends(watch, monkeypatch):
    """The thread ends once it is closed."""
    monkeypatch.undo()
    watch.start(None)
    watch.close()
    wait_until(lambda: "outbox-relay-duty" not in {each.name for each in threading.enumerate()}, "the thread ends")
