"""The watch over a member of a queue's group: when it leaves, whom it leaves the work to, and when it comes back."""

import threading
from collections import deque

import pytest

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.duty import NEW_PATIENCE_SECONDS, PATIENCE_SECONDS, SILENCE_JITTER_SECONDS, SILENCE_SECONDS
from outbox_queue import QueueConfig, duty
from outbox_queue.duty import GroupDuty

CONFIG = QueueConfig(bootstrap_servers="localhost:9092")
START = "start messages"


class World:
    """A clock, Kafka's answers, and what a member did."""

    def __init__(self):
        self.now = 1000.0
        self.members = frozenset({"a", "us"})
        self.silent = []
        self.leaders = {}
        self.done = []
        self.changes = []
        self.questions = deque(maxlen=1000)

    def monotonic(self):
        return self.now

    def brokers(self, *_):
        self.questions.append("brokers")
        if self.silent is None:
            raise KafkaUnavailable("nobody answers")
        return self.silent

    def run(self, member, seconds):
        """Let time pass; the member's thread calls `act` and the other one looks."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            member._look()
            member.act(lambda: self.done.append(("left", self.now)), lambda: self.done.append(("joined", self.now)))


@pytest.fixture
def world(monkeypatch):
    """A world of its own clock."""
    world = World()
    monkeypatch.setattr(duty.time, "monotonic", world.monotonic)
    monkeypatch.setattr(duty, "unreachable_brokers", world.brokers)
    monkeypatch.setattr(duty, "silent_brokers", world.brokers)
    monkeypatch.setattr(GroupDuty, "_leaders", lambda _: world.leaders)
    monkeypatch.setattr(GroupDuty, "_members", lambda _: world.members)
    return world


@pytest.fixture
def member(world):
    """A member at work for a while, that has started messages."""
    made = GroupDuty("this consumer", "kafka-mq-q", "messages", CONFIG, world.changes.append)
    made.assigned([0, 1], "us")
    made.tried(START)
    made.succeeded(START)
    for partition in (0, 1):
        made.has_read(partition)
    world.now += 100
    return made


def test_leaves_when_a_broker_does_not_answer_and_others_are_there(world, member, caplog):
    """Work that fails for the patience is left to others; log, state and metrics say so once, and name the broker."""
    world.silent = ["broker 2 at h:9092"]
    member.tried(START)
    began = world.now
    world.run(member, PATIENCE_SECONDS - 1)
    assert world.done == []
    assert member.trouble is None
    world.run(member, 60)
    ((what, at),) = world.done
    assert what == "left"
    assert at - began <= PATIENCE_SECONDS + 2
    assert "could not start messages, and broker 2 at h:9092 does not answer it" in member.trouble
    assert world.changes == [True]
    assert sum("leaves group kafka-mq-q" in line for line in caplog.messages) == 1


def test_comes_back_when_every_broker_answers(world, member, caplog):
    """A member that is out joins again soon after its link is mended, and works as a newcomer."""
    world.silent = ["broker 2 at h:9092"]
    member.tried(START)
    world.run(member, 200)
    mended_at, world.silent = world.now, []
    world.run(member, 30)
    assert [what for what, _ in world.done] == ["left", "joined"]
    assert world.done[-1][1] - mended_at <= 12
    assert not member.is_unable
    assert world.changes == [True, False]
    assert sum("joins group kafka-mq-q again" in line for line in caplog.messages) == 1
    member.assigned([0], "us")
    member.tried(START)
    world.silent = ["broker 2 at h:9092"]
    world.run(member, NEW_PATIENCE_SECONDS - 2)
    assert not member.is_unable
    world.run(member, 10)
    assert member.is_unable


@pytest.mark.parametrize(
    ("silent", "members"), [([], {"a", "us"}), (None, {"a", "us"}), (["broker 2 at h:9092"], {"us"})]
)
def test_stays_where_leaving_helps_nobody(world, member, silent, members):
    """What fails although every broker answers, or as none does, fails for others, too; and the last one stays."""
    world.silent, world.members = silent, frozenset(members)
    member.tried(START)
    world.run(member, 300)
    assert world.done == []
    assert not member.is_unable


def test_leaves_when_kafka_does_not_say_who_is_there(world, member):
    """A member whose coordinator does not answer about the group, while others do, leaves."""
    world.silent, world.members = ["broker 2 at h:9092"], None
    member.tried(START)
    world.run(member, 40)
    assert [what for what, _ in world.done] == ["left"]


def test_the_first_member_leaves_last(world, member):
    """The first in the order of IDs waits for the others to leave, and stays if they did."""
    world.silent, world.members = ["broker 2 at h:9092"], frozenset({"us", "when"})
    member.tried(START)
    world.run(member, PATIENCE_SECONDS + 4)
    assert world.done == []
    world.members = frozenset({"us"})
    world.run(member, 100)
    assert world.done == []
    world.members = frozenset({"us", "when"})
    world.run(member, 12)
    assert [what for what, _ in world.done] == ["left"]


def test_comes_back_where_nobody_is_left(world, member):
    """Where the group has no member at all for the silence, one that is out tries again; not while others are in it."""
    world.silent = ["broker 2 at h:9092"]
    member.tried(START)
    world.run(member, 60)
    world.members = frozenset()
    deserted_at = world.now
    world.run(member, SILENCE_SECONDS + SILENCE_JITTER_SECONDS + 5)
    assert world.done[-1][0] == "joined"
    assert world.done[-1][1] - deserted_at >= SILENCE_SECONDS - 0.5


def test_a_partition_that_cannot_be_read_counts(world, member):
    """A partition of which nothing is read counts as failing if its leader does not answer; other quiet ones do not."""
    world.leaders = {0: "broker 1 at h:9092", 1: "broker 2 at h:9092"}
    world.run(member, 600)
    assert world.done == []
    cut_at = world.now
    world.silent = ["broker 2 at h:9092"]
    world.run(member, 60)
    ((what, at),) = world.done
    assert what == "left"
    assert at - cut_at <= PATIENCE_SECONDS + 2
    assert "could not read messages[1]" in member.trouble


def test_who_reads_asks_nobody(world, member):
    """No broker is asked while every partition is read from."""
    for _ in range(100):
        member.has_read(0)
        member.has_read(1)
        world.run(member, 5)
    assert not world.questions


def test_work_of_a_partition_that_is_another_members_is_forgotten(world, member):
    """A rebalance takes what is owed for a partition along, and leaves what is owed for those that stay."""
    world.silent = ["broker 2 at h:9092"]
    member.tried("redeliver messages of", 1)
    world.run(member, 15)
    member.assigned([0], "us")
    world.run(member, 100)
    assert world.done == []
    member.tried("redeliver messages of", 0)
    world.run(member, 30)
    member.assigned([0, 1], "us")
    world.run(member, 40)
    assert [what for what, _ in world.done] == ["left"]


def test_nothing_is_judged_after_a_pause(world, monkeypatch):
    """A process that had no CPU for a while gives its threads a turn before it judges them."""
    looks, ends = [], iter([False, False, True])
    monkeypatch.setattr(GroupDuty, "_look", lambda _: looks.append(world.now))
    member = GroupDuty("this consumer", "kafka-mq-q", "messages", CONFIG, world.changes.append)
    pauses = iter([60.0, 1.0, 0.0])

    def wait(_):
        world.now += next(pauses)
        return next(ends)

    monkeypatch.setattr(member._closing, "wait", wait)
    member._run()
    assert looks == [1061.0]


def test_its_thread_ends(world):
    """The thread ends once it is closed."""
    member = GroupDuty("this consumer", "kafka-mq-thread", "messages", CONFIG, world.changes.append)
    member.start()
    member.close()
    member._thread.join(10)
    assert "outbox-duty-kafka-mq-thread" not in {thread.name for thread in threading.enumerate()}
