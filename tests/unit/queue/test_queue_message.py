"""A message by itself: the checks before it is settled."""

from datetime import UTC, datetime

import pytest

from outbox_queue import InvalidMessage
from outbox_queue.consuming.message import Message
from tests.queueing import delivery


class Acks:
    """A recorder of the given reasons."""

    def __init__(self):
        self.reasons = []

    def nack(self, _delivery, _delay_ms, reason, *, counts):  # noqa: ARG002
        self.reasons.append(reason)

    def reject(self, _delivery, reason):
        self.reasons.append(reason)


@pytest.fixture
def acks():
    """Return the handler of a message's settling."""
    return Acks()


@pytest.fixture
def message(acks):
    """Return a message in progress."""
    return Message(delivery(), acks)


@pytest.mark.parametrize("verb", ["nack", "reject"])
@pytest.mark.parametrize("reason", [ValueError("x"), b"x", None, 5])
def test_a_reason_that_is_no_text_is_refused(message, acks, verb, reason):
    """A reason that is no text is refused first of all, so that the message can still be settled."""
    with pytest.raises(InvalidMessage, match=f"{verb}: the reason must be text, got {type(reason).__name__}"):
        getattr(message, verb)(reason=reason)
    assert acks.reasons == []
    assert not message.is_settled


@pytest.mark.parametrize("verb", ["nack", "reject"])
def test_a_reason_fits_into_a_marker(message, acks, verb):
    """A reason of any text is cut after 2,000 characters, and characters that UTF-8 lacks are replaced."""
    getattr(message, verb)(reason="\ud800" + "\u00e9" * 1_000_000)
    assert acks.reasons == ["?" + "\u00e9" * 1999]


@pytest.mark.parametrize("milliseconds", [10**18, 253_402_300_800_000])
def test_a_time_beyond_the_calendar_is_its_end(acks, milliseconds):
    """A time beyond the calendar, from a stranger or a broker, becomes the calendar's end, and never raises."""
    message = Message(delivery(enqueued_at_ms=milliseconds), acks)
    assert message.enqueued_at == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
