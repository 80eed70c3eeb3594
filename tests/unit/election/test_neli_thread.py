"""The elector's thread, without a broker."""

import sys
import threading
import time

import pytest

from outbox_core.election import Neli, NeliConfig, neli
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
