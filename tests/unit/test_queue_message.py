"""A message by itself: what is checked before it is settled."""

from datetime import UTC, datetime

import pytest

from outbox_queue import InvalidMessage
from outbox_queue.headers import NOTHING
from outbox_queue.message import Message


class Settler:
    """Notes the reasons that it is told."""

    def __init__(self):
        self.reasons = []

    def give_back(self, _message, _delay_ms, reason):
        self.reasons.append(reason)

    def set_aside(self, _message, reason):
        self.reasons.append(reason)


@pytest.fixture
def settler():
    """What messages turn to."""
    return Settler()


@pytest.fixture
def message(settler):
    """A message in progress."""
    return Message(settler, "q", b"", (0, 0), NOTHING, enqueued_at_ms=0, max_attempts=None)


@pytest.mark.parametrize("verb", ["nack", "reject"])
@pytest.mark.parametrize("reason", [ValueError("x"), b"x", None, 5])
def test_a_reason_that_is_no_text_is_refused(message, settler, verb, reason):
    """It is refused before anything else, so that the message can still be settled."""
    with pytest.raises(InvalidMessage, match=f"{verb}: the reason must be text, got {type(reason).__name__}"):
        getattr(message, verb)(reason=reason)
    assert settler.reasons == []
    assert not message.is_settled


@pytest.mark.parametrize("verb", ["nack", "reject"])
def test_a_reason_fits_into_a_marker(message, settler, verb):
    """Whatever text a handler's error has: it is cut after 2,000 characters, and what UTF-8 lacks is replaced."""
    getattr(message, verb)(reason="\ud800" + "\u00e9" * 1_000_000)
    assert settler.reasons == ["?" + "\u00e9" * 1999]


@pytest.mark.parametrize("milliseconds", [10**18, 253_402_300_800_000])
def test_a_time_beyond_the_calendar_is_its_end(settler, milliseconds):
    """A time that a stranger has written, or a broker taken, never raises in a handler."""
    message = Message(settler, "q", b"", (0, 0), NOTHING, enqueued_at_ms=milliseconds, max_attempts=None)
    assert message.enqueued_at == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
