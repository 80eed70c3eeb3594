"""Dead letters of at-least-once delivery that cannot be written are told of, and not at every try."""

import logging
from types import SimpleNamespace

import pytest

from outbox_core.harvest import burials as burials_module
from outbox_core.harvest.burials import Burials
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.surroundings import DeadLetters
from outbox_core.kafka import KafkaError
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_HOLDS

TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)


@pytest.fixture
def burials():
    """Dead letters of a harvester."""
    dead_letters = DeadLetters(topic="dead", on_poison=False, ensure=lambda: None, forbidden=lambda _: set())
    surroundings = SimpleNamespace(metrics=HarvestMetrics(), purger=SimpleNamespace(submit=lambda _: None))
    return Burials(dead_letters, SimpleNamespace(io_error_backoff=0.5), surroundings, publisher=None)


@pytest.fixture
def clock(monkeypatch):
    """Moves the clock of what is tested: `clock(5.0)`."""
    time = [100.0]
    monkeypatch.setattr(burials_module, "now", lambda: time[-1])
    monkeypatch.setattr("outbox_core.harvest.outage.time.monotonic", lambda: time[-1])
    return lambda seconds: time.append(time[-1] + seconds)


def fail(burials, letter):
    """Send a dead letter, and have it fail."""
    burials._ready.append(letter)
    burials.take()
    assert burials.failed([Failure(letter, TIMED_OUT, alone=True)]) == []


def test_wait_is_told_of_once_and_then_now_and_then(burials, clock, caplog):
    """When it begins, again every minute, and when it ends: one arrives, or none is asked for any more."""
    caplog.set_level(logging.INFO)
    letter = (1, "dead", None, b"", None, None, -1, 0)
    for _ in range(25):
        fail(burials, letter)
        clock(5.0)
    burials._sent[1] = letter
    assert burials.delivered([letter]) == []
    fail(burials, letter)
    burials.step(NO_HOLDS)
    told = [record.getMessage().removeprefix("dead letters for topic dead: ") for record in caplog.records]
    why = TIMED_OUT.str()
    assert told == [
        f"{why}; retrying",
        f"{why}; retrying for 60 s",
        f"{why}; retrying for 120 s",
        "back after 125.0 s",
        f"{why}; retrying",
        "not known to fail any more",
    ]
