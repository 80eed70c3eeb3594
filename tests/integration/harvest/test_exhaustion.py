"""The hand-over by a leader whose process lacks a resource."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outbox_core.upkeep import exhaustion as watch
from tests.harvesting import Scene

MODES = [
    pytest.param("at-least-once", marks=pytest.mark.complete),
    pytest.param("exactly-once", marks=pytest.mark.real_broker),
]


@pytest.mark.parametrize("delivery", MODES)
def test_leader_without_descriptors(database, kafka_bootstrap, delivery):
    """A leader without a free descriptor for its connections hands over, logs why in one line, and is unhealthy."""
    Scene(database, kafka_bootstrap)
    program = [sys.executable, str(Path(__file__).with_name("exhausted.py")), database, kafka_bootstrap, delivery]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=90, check=False)
    told = [line for line in ran.stdout.splitlines() if line != "LeaderRefreshed"]  # may come after a lost connection
    assert told[:2] == ["LeaderAcquired", "LeaderRevoked"], ran.stderr
    assert told[2:], ran.stderr
    assert told[2].startswith("gave up: this process can open no more files and connections")
    assert "its limit is 256" in told[2]
    assert told[3:] == ["failing"]


def test_what_a_process_may_lack(monkeypatch):
    """A process that lacks no resource reports none; one that can start no threads names the limit."""
    assert watch.what_the_process_lacks() == ""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert watch.what_the_process_lacks().startswith("this process can start no more threads (can't start new thread)")
