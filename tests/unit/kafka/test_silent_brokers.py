"""The brokers that do not answer, asked once for all who want to know, and those among them that lead partitions."""

import threading

import pytest

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import reach
from outbox_core.kafka.admin import Broker
from outbox_core.kafka.reach import SilentBrokers

LEADERS = {1: Broker(1, "kafka1", 9092), 2: Broker(2, "kafka2", 9092)}
ONE = str(LEADERS[1])


class World:
    """A clock, brokers that are asked, and the partitions' leaders."""

    def __init__(self):
        self.now = 1000.0
        self.asked = []
        self.silent = [ONE]
        self.leaders = {("orders", 0): LEADERS[2], ("orders", 1): LEADERS[1], ("orders", 2): None}

    def monotonic(self):
        return self.now

    def unreachable(self, settings, _timeout):
        self.asked.append(settings["a"])
        if self.silent is None:
            raise KafkaUnavailable("nobody is there")
        return self.silent

    def leaders_of(self, topics):
        return {place: leader for place, leader in self.leaders.items() if place[0] in topics}


@pytest.fixture
def world(monkeypatch):
    """A world of its own clock."""
    made = World()
    monkeypatch.setattr(reach.time, "monotonic", made.monotonic)
    monkeypatch.setattr(reach, "unreachable_brokers", made.unreachable)
    monkeypatch.setattr(reach, "_inquiry", lambda *_: _Inquiry(made))
    return made


class _Inquiry:
    def __init__(self, world):
        self._world = world

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def leaders(self, topics):
        if self._world.leaders is None:
            raise KafkaUnavailable("no answer about topics")
        return self._world.leaders_of(topics)


def test_answers_are_shared(world):
    """Of many that want to know one asks; later the brokers are asked again; other settings differ."""
    silent = SilentBrokers(6.0)
    for _ in range(5):
        assert silent.lately({"a": 1}, 8.0) == [ONE]
    assert world.asked == [1]
    silent.lately({"a": 2}, 8.0)
    world.now += 10
    silent.lately({"a": 1}, 15.0)
    assert world.asked == [1, 2]
    silent.lately({"a": 1}, 8.0)
    silent.lately({"a": 1}, 0.0)
    assert world.asked == [1, 2, 1]
    world.now += 0.1
    silent.lately({"a": 1}, 0.0)
    assert world.asked == [1, 2, 1, 1]


def test_silence_of_all_is_an_answer(world):
    """It is told to all, and asked no more often than another one."""
    world.silent = None
    silent = SilentBrokers(6.0)
    for _ in range(3):
        with pytest.raises(KafkaUnavailable, match="nobody is there"):
            silent.lately({"a": 1}, 8.0)
    with pytest.raises(KafkaUnavailable, match="nobody is there"):
        silent.leading({"a": 1}, [("orders", 1)], 8.0)
    assert world.asked == [1]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("orders", 1)], [ONE]),
        ([("orders", None)], [ONE]),
        ([("orders", 0), ("orders", 2), ("orders", 9)], []),
        ([("hidden", None), ("hidden", 0)], []),
    ],
)
@pytest.mark.usefixtures("world")
def test_leaders_that_do_not_answer(places, expected):
    """A partition counts, or all of a topic; one without a leader, or of a topic that we may not see, has none."""
    assert SilentBrokers(6.0).leading({"a": 1}, places, 8.0) == expected


def test_leaders_that_kafka_does_not_tell(world):
    """Any of the brokers may be one; while all answer nobody asks for leaders."""
    world.leaders = None
    silent = SilentBrokers(6.0)
    assert silent.leading({"a": 1}, [("orders", 0)], 8.0) == [ONE]
    world.silent = []
    assert silent.leading({"a": 1}, [("orders", 0)], 0.0) == [ONE]
    world.now += 1
    assert silent.leading({"a": 1}, [("orders", 0)], 0.0) == []


def test_several_threads_get_one_answer(world, monkeypatch):
    """A thread that comes while the brokers are asked waits for that answer."""
    may_answer, answers = threading.Event(), []

    def slowly(settings, timeout):
        may_answer.wait(10)
        return world.unreachable(settings, timeout)

    monkeypatch.setattr(reach, "unreachable_brokers", slowly)
    silent = SilentBrokers(6.0)
    threads = [threading.Thread(target=lambda: answers.append(silent.lately({"a": 1}, 8.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    may_answer.set()
    for thread in threads:
        thread.join(10)
    assert answers == [[ONE]] * 3
    assert world.asked == [1]
