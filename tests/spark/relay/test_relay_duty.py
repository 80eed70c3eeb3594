"""The watch over a relay's batches: when it has the elector step down, and whether it is able again."""

import pytest

from outbox_core.errors import KafkaUnavailable, StoreUnavailable
from outbox_core.kafka.duty import NEW_PATIENCE_SECONDS, PATIENCE_SECONDS
from outbox_spark.relay import duty
from outbox_spark.relay.duty import RelayDuty
from outbox_spark.relay.plan import SLICE_SECONDS


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

    def pass_time(self, watch, seconds):
        for _ in range(int(seconds)):
            self.now += 1.0
            watch.look()


@pytest.fixture
def world(monkeypatch):
    """A world of its own clock."""
    world = World()
    monkeypatch.setattr(duty.time, "monotonic", world.monotonic)
    monkeypatch.setattr(duty, "unreachable_brokers", world.brokers)
    monkeypatch.setattr(RelayDuty, "_members", lambda _: world.members)
    return world


@pytest.fixture
def watch(world):
    """The watch over a relay that has led for a while, and published."""
    made = RelayDuty({}, "group", lambda: Store(world), lambda reason, _: world.steps.append((world.now, reason)))
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
        watch.failed("the database is away")
    world.pass_time(watch, 60)
    ((at, reason),) = world.steps
    assert at - began <= PATIENCE_SECONDS + 1
    assert "could not publish rows for" in reason
    assert "the database is away" in reason


def test_a_batch_that_hangs_ends_the_leadership(world, watch):
    """A batch without an end is given its own time, and then the patience."""
    began = world.now
    watch.tries()
    world.pass_time(watch, 60)
    assert PATIENCE_SECONDS + SLICE_SECONDS <= world.steps[0][0] - began <= PATIENCE_SECONDS + SLICE_SECONDS + 2


def test_batches_that_succeed_keep_the_leadership(world, watch):
    """Long batches, and failures between successes, are in order; so is a relay that does not lead."""
    for _ in range(10):
        watch.tries()
        world.pass_time(watch, SLICE_SECONDS + 4)
        watch.succeeded()
        watch.tries()
        world.pass_time(watch, 2)
        watch.failed("once")
    assert world.steps == []
    watch.leads(False)
    world.pass_time(watch, 300)
    assert world.steps == []


def test_a_relay_alone_tries_on(world, watch, caplog):
    """Nobody else could take over: it keeps the leadership, says so once, and looks again."""
    world.members = 1
    watch.tries()
    watch.failed("the database is away")
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
    watch.failed("the database is away")
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
    watch.start()
    watch.close()
    watch._thread.join(10)
    assert not watch._thread.is_alive()
