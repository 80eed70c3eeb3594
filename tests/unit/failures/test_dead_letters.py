"""Dead letters of at-least-once delivery that cannot be written: logged, and not at every try."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from outbox_core.harvest.context import DeadLetterTopic
from outbox_core.harvest.failures import dead_letters as module
from outbox_core.harvest.failures.dead_letters import DeadLetters
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.messages import Failure
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import NO_HOLDS, StoredRecord

TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)


@pytest.fixture
def letters():
    """Return the dead letters of a harvester."""
    ctx = SimpleNamespace(
        dead_letters=DeadLetterTopic(topic="dead", on_poison=False, ensure=lambda: None, forbidden=lambda _: set()),
        limits=SimpleNamespace(io_error_backoff=0.5),
        metrics=HarvestMetrics(),
        marker=None,
        purger=SimpleNamespace(submit=lambda _: Future()),
    )
    return DeadLetters(ctx)


@pytest.fixture
def clock(monkeypatch):
    """Return a function that moves the clock of the tested module: `clock(5.0)`."""
    time = [100.0]
    monkeypatch.setattr(module, "now", lambda: time[-1])
    monkeypatch.setattr("outbox_core.outage.time.monotonic", lambda: time[-1])
    return lambda seconds: time.append(time[-1] + seconds)


def fail(letters, letter):
    """Send a dead letter, and let it fail."""
    letters._ready.append(letter)
    letters.take_due()
    assert letters.failed([Failure(letter, TIMED_OUT, alone=True)]) == []


def test_wait_is_told_of_once_and_then_now_and_then(letters, clock, caplog):
    """A failing dead letter is logged at first, every minute, and when it arrives or is not requested any more."""
    caplog.set_level(logging.INFO)
    letter = StoredRecord(1, "dead", None, b"", None, None, -1, 0)
    for _ in range(25):
        fail(letters, letter)
        clock(5.0)
    letters._sent[1] = letter
    assert letters.delivered([letter]) == []
    fail(letters, letter)
    letters.advance(NO_HOLDS)
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
