"""A process that can do nothing with its leadership gives it up."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outbox_core.harvest import watch
from tests.harvesting import Scene

MODES = ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)]


@pytest.mark.parametrize("delivery", MODES)
def test_leader_without_descriptors(database, kafka_bootstrap, delivery):
    """Without a descriptor for its connections a leader hands over, says why in one line, and is not well."""
    Scene(database, kafka_bootstrap)
    program = [sys.executable, str(Path(__file__).with_name("exhausted.py")), database, kafka_bootstrap, delivery]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=90, check=False)
    told = [line for line in ran.stdout.splitlines() if line != "LeaderRefreshed"]  # a lost connection is looked into
    assert told[:2] == ["LeaderAcquired", "LeaderRevoked"], ran.stderr
    assert told[2].startswith("gave up: this process can open no more files and connections")
    assert "its limit is 256" in told[2]
    assert told[3:] == ["failing"]


def test_what_a_process_may_lack(monkeypatch):
    """A process that lacks nothing says so; one without threads names the limit."""
    assert watch.what_the_process_lacks() == ""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert watch.what_the_process_lacks().startswith("this process can start no more threads (can't start new thread)")
