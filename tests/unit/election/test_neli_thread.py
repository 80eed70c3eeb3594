"""The elector's thread, without a broker."""

import sys
import threading
import time
from typing import ClassVar

import pytest

from outbox_core.election import Neli, NeliConfig, neli
from outbox_core.election.member import ClientBroken
from outbox_core.errors import InvariantBroken, LeaderTopicError
from outbox_core.events import LeaderFenced


class _FencedAtOnce:
    """A member that is fenced when it first runs."""

    leadership = trouble = None
    silent_seconds = 0.0

    def __init__(self, config, width, notify, barrier):
        del config, width, barrier
        self._notify = notify

    def join(self):
        pass

    close = join

    def run_once(self):
        self._notify(LeaderFenced(None, "too slow", 1))

    def lose(self, reason):
        del reason


def test_handler_that_exits_ends_the_elector(monkeypatch):
    """An elector whose handler exits has failed, and says so: it must not look like one that stands by."""
    monkeypatch.setattr(neli, "ensure_leader_topic", lambda *_: 1)
    monkeypatch.setattr(neli, "Member", _FencedAtOnce)
    elector = Neli(NeliConfig(kafka={}, group_id="billing"), lambda _: sys.exit("no leader any more"))
    elector.start()
    with pytest.raises(SystemExit, match="no leader any more"):
        elector.join(10)
    assert elector.trouble == "no leader any more"


class _Patient(_FencedAtOnce):
    """A member that only notes what it is told to step down for, and on which thread."""

    def run_once(self):
        time.sleep(0.01)

    def step_down(self, reason, is_able):
        steps.append((reason, is_able(), threading.current_thread().name))


steps = []


def test_stepping_down_is_done_on_the_elector_s_thread(monkeypatch):
    """From any thread, also before the start and after the stop, it returns at once; the member hears each in turn."""
    monkeypatch.setattr(neli, "ensure_leader_topic", lambda *_: 1)
    monkeypatch.setattr(neli, "Member", _Patient)
    steps.clear()
    elector = Neli(NeliConfig(kafka={}, group_id="billing"))
    elector.step_down("before", lambda: True)
    elector.start()
    elector.step_down("after", lambda: False)
    deadline = time.monotonic() + 10
    while len(steps) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    elector.stop()
    elector.step_down("at the end", lambda: False)
    assert steps == [("before", True, "neli-billing"), ("after", False, "neli-billing")]


class _Breaks(_FencedAtOnce):
    """A member whose client breaks when it first runs; a later one's may be broken, too, or not even be made."""

    lives: ClassVar = []
    failures: ClassVar = {}  # life -> the error of its start

    def __init__(self, config, width, notify, barrier):
        super().__init__(config, width, notify, barrier)
        self.calls = []
        self.lives.append(self)

    def succeeds(self):
        self.calls.append("succeed")

    def join(self):
        self.calls.append("join")
        if error := self.failures.get(len(self.lives)):
            raise error

    def run_once(self):
        if len(self.lives) < 4:
            raise ClientBroken("leader group 'billing': the Kafka client gave up: Broker: fenced")
        time.sleep(0.01)

    def lose(self, reason):
        self.calls.append(f"lose: {reason}")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def broken(monkeypatch):
    """Return an elector whose client breaks, and the lives of its members."""
    monkeypatch.setattr(neli, "ensure_leader_topic", lambda *_: 1)
    monkeypatch.setattr(neli, "Member", _Breaks)
    monkeypatch.setattr(neli, "_NEW_CLIENT_SECONDS", 0.01)
    monkeypatch.setattr(_Breaks, "lives", [])
    monkeypatch.setattr(_Breaks, "failures", {})
    elector = Neli(NeliConfig(kafka={}, group_id="billing", name="one"))
    yield elector, _Breaks.lives
    elector.stop()


def test_a_broken_client_is_replaced(broken, caplog):
    """The elector gives its lease up, tells it once, and contends on as another member, however often that fails."""
    elector, lives = broken
    _Breaks.failures[2] = LeaderTopicError("leader topic 'billing.neli' is away")
    elector.start()
    deadline = time.monotonic() + 10
    while len(lives) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert elector.failure is None
    why = "leader group 'billing': the Kafka client gave up: Broker: fenced"
    assert lives[0].calls == ["join", f"lose: {why}", "close"]
    assert lives[1].calls == ["succeed", "join", "close"]
    assert lives[2].calls == ["succeed", "join", f"lose: {why}", "close"]
    assert [line for line in caplog.messages if "client" in line or "away" in line] == [
        f"one: {why}; another one is made",
        f"one: no client for leader group billing can be made: {_Breaks.failures[2]}; trying on",
        f"one: {why}; another one is made",
    ]
    elector.stop()
    assert lives[3].calls == ["succeed", "join", "close"]


def test_a_stop_while_no_client_can_be_made(broken):
    """It does not wait for one, and closes nothing twice."""
    elector, lives = broken
    _Breaks.failures.update(dict.fromkeys(range(2, 10_000), LeaderTopicError("leader topic 'billing.neli' is away")))
    elector.start()
    deadline = time.monotonic() + 10
    while len(lives) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    elector.stop()
    elector.join(10)
    assert [life.calls.count("close") for life in lives] == [1] * len(lives)


def test_a_broken_invariant_ends_the_elector(broken):
    """Nothing that the process knows is to be trusted then."""
    elector, lives = broken
    _Breaks.failures[2] = InvariantBroken("a lease must not shrink")
    elector.start()
    with pytest.raises(InvariantBroken):
        elector.join(10)
    assert len(lives) == 2
