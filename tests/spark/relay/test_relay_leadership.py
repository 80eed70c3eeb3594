"""The relay's member of the leader group: what it tells its watch, and when it contends again."""

import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.events import LeaderAcquired, LeaderRevoked
from outbox_spark.relay import leadership
from outbox_spark.relay.leadership import Contender


class Elector:
    """An elector that leads whenever it is told to."""

    failure = None

    def __init__(self, _settings, on_event):
        self.on_event = on_event
        self.leadership = None
        self.asked = []

    def step_down(self, reason, is_able):
        self.asked.append((reason, is_able))

    def wins(self):
        self.leadership = SimpleNamespace(leader_id=uuid4(), is_valid=lambda _: True)
        self.on_event(LeaderAcquired(self.leadership.leader_id))

    def loses(self):
        self.on_event(LeaderRevoked(self.leadership.leader_id))
        self.leadership = None


@pytest.fixture
def contender(monkeypatch):
    """A member without Kafka; `told` has what its watch was told, and which leadership could be begun then."""
    monkeypatch.setattr(leadership, "Neli", Elector)
    monkeypatch.setattr(leadership, "_UNABLE_SECONDS", 0.05)
    config = HarvestConfig(data_source="dbname=x", base_kafka_config={"bootstrap.servers": "h:1"})
    told = []
    made = Contender(config, "d.s.t", "7", lambda leads, _: told.append((leads, made._announced is not None)))
    made.told = told
    return made


def test_the_watch_hears_of_a_leadership_before_it_can_be_begun(contender):
    """The watch counts from the election on, also if the driver never begins; and no more once it is handed over."""
    contender._elector.wins()
    assert contender.told == [(True, False)]
    assert contender.begin() is not None
    contender.end()
    contender._elector.loses()
    assert contender.told == [(True, False), (False, True)]


def test_a_member_whose_driver_hangs_is_not_able(contender):
    """While the driver is at work on the leadership that it was to give up, it could begin no other."""
    elector = contender._elector
    elector.wins()
    assert contender.begin() is not None
    contender.step_down("it hangs", lambda: True)
    handing_over = threading.Thread(target=elector.loses)
    handing_over.start()
    handing_over.join(10)
    assert not handing_over.is_alive()
    ((_, is_able),) = elector.asked
    assert not is_able()
    contender.end()
    assert is_able()
    contender.step_down("the table cannot be read", lambda: False)
    assert not elector.asked[-1][1]()
