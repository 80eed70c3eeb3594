"""A message that a consumer has handed out, to be settled once: acknowledged, given back, rejected, or left alone."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Protocol

from outbox_queue.config import milliseconds
from outbox_queue.errors import InvalidMessage, MessageSettled
from outbox_queue.headers import LONGEST_REASON, Header, Travelled, place_text

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = 253_402_300_799_999


class State(Enum):
    """How far a message has come in this process."""

    UNSETTLED = "in progress"
    ACKNOWLEDGED = "acknowledged"
    GIVEN_BACK = "given back"
    REJECTED = "rejected"
    INTERRUPTED = "interrupted"


class Settler(Protocol):
    """What a message asks of its consumer."""

    def acknowledge(self, message: Message) -> None:
        """End the tracking of the message."""

    def give_back(self, message: Message, delay_ms: int, reason: str) -> None:
        """Have it redelivered after the delay."""

    def set_aside(self, message: Message, reason: str) -> None:
        """Make it a dead letter, and end its tracking."""

    def interrupt(self, message: Message) -> None:
        """Keep it alive no longer."""

    def extend(self, message: Message, duration: timedelta) -> None:
        """Keep it alive for at least so long."""


class Message:
    """A message in progress. Its methods may be called from any thread, and none but `reject` waits for Kafka.

    Attributes:
        payload: what was sent.
        headers: (name, value) pairs as they were sent, without the queue's own.
        attempt: 1 when it is handed out for the first time.
        max_attempts: with this attempt it becomes a dead letter if it is not acknowledged; None for no limit.
        queue: name of its queue.
    """

    __slots__ = (
        "_deadline",
        "_enqueued_at_ms",
        "_keep_alive_until",
        "_marker_partition",
        "_origin",
        "_place",
        "_received_at",
        "_settler",
        "_state",
        "attempt",
        "headers",
        "max_attempts",
        "payload",
        "queue",
    )

    def __init__(
        self,
        settler: Settler,
        queue: str,
        payload: bytes,
        place: tuple[int, int],
        travelled: Travelled,
        *,
        enqueued_at_ms: int,
        max_attempts: int | None,
    ) -> None:
        self.queue = queue
        self.payload = payload
        self.headers: tuple[Header, ...] = travelled.headers
        self.attempt = travelled.attempt
        self.max_attempts = max_attempts
        self._settler = settler
        self._place = place
        self._origin = travelled.origin or place
        self._enqueued_at_ms = enqueued_at_ms
        self._state = State.UNSETTLED
        # Below: written by the consumer, under its lock. Seconds of the monotonic clock.
        self._marker_partition = -1
        self._deadline = 0.0
        self._keep_alive_until = float("inf")
        self._received_at = 0.0

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.queue!r}, attempt {self.attempt}, {self._state.value}>"

    @property
    def id(self) -> str:
        """`partition-offset` of its first copy in the message topic: the same for every attempt."""
        return place_text(self._origin)

    @property
    def enqueued_at(self) -> datetime:
        """When its first copy was sent, in UTC."""
        return utc_time(self._enqueued_at_ms)

    @property
    def is_settled(self) -> bool:
        """Whether it has been acknowledged, given back, rejected or interrupted."""
        return self._state is not State.UNSETTLED

    def header(self, name: str) -> bytes | None:
        """The last header of that name, None if there is none."""
        return next((value for key, value in reversed(self.headers) if key == name), None)

    def ack(self) -> None:
        """It is done: no one gets it again. Acknowledging once more does nothing.

        Raises:
            MessageSettled: if it was given back, rejected or interrupted.
            QueueClosed: if its consumer has been closed; it will be redelivered.
        """
        if self._state is State.ACKNOWLEDGED:
            return
        self._must_be_unsettled("ack")
        self._settler.acknowledge(self)

    def nack(self, delay: timedelta | None = None, reason: str = "") -> None:
        """Give it back: it is handed out again after the delay, or becomes a dead letter if this was its last attempt.

        Args:
            delay: None for at once.
            reason: kept if it becomes a dead letter, up to 2,000 characters.

        Raises:
            InvalidMessage: if the delay is negative or more than the setting `max_delay`, or the reason is no text.
            MessageSettled: if it has been settled already.
            QueueClosed: if its consumer has been closed; it will be redelivered.
        """
        self._must_be_unsettled("nack")
        self._settler.give_back(self, delay_milliseconds(delay), checked_reason("nack", reason))

    def reject(self, reason: str) -> None:
        """Set it aside as a dead letter, whatever attempts it has left. Waits until Kafka has it.

        Args:
            reason: kept with the dead letter, up to 2,000 characters.

        Raises:
            InvalidMessage: if the reason is no text.
            SendFailed: if it cannot be written; the message is still in progress.
            MessageSettled: if it has been settled already.
            QueueClosed: if its consumer has been closed; it will be redelivered.
        """
        self._must_be_unsettled("reject")
        self._settler.set_aside(self, checked_reason("reject", reason))

    def interrupt(self) -> None:
        """Stop working on it without saying more: it is redelivered when its redelivery timeout has passed.

        Raises:
            MessageSettled: if it has been settled already.
        """
        self._must_be_unsettled("interrupt")
        self._settler.interrupt(self)

    def extend(self, duration: timedelta) -> None:
        """Let nobody else have it for so long from now, even if this process dies, and even past `max_processing_time`.

        Args:
            duration: more than none, and no more than half of the setting `marker_retention`.

        Raises:
            InvalidMessage: if the duration is out of these bounds.
            MessageSettled: if it has been settled already.
            QueueClosed: if its consumer has been closed.
        """
        self._must_be_unsettled("extend")
        if not isinstance(duration, timedelta) or duration <= timedelta(0):
            raise InvalidMessage(f"extend: expected a timedelta of more than none, got {duration!r}")
        self._settler.extend(self, duration)

    def _must_be_unsettled(self, verb: str) -> None:
        if self._state is not State.UNSETTLED:
            raise MessageSettled(f"{verb}: message {self.id} of queue {self.queue!r} has been {self._state.value}")


def delay_milliseconds(delay: timedelta | None) -> int:
    """A delay in whole milliseconds.

    Raises:
        InvalidMessage: if it is no timedelta, or negative.
    """
    if delay is None:
        return 0
    if not isinstance(delay, timedelta) or delay < timedelta(0):
        raise InvalidMessage(f"delay: expected a timedelta of none or more, got {delay!r}")
    return milliseconds(delay)


def checked_reason(verb: str, reason: object) -> str:
    """A reason as it fits into a marker: cut after 2,000 characters, and without what UTF-8 cannot encode.

    Raises:
        InvalidMessage: if it is no text.
    """
    if not isinstance(reason, str):
        raise InvalidMessage(f"{verb}: the reason must be text, got {type(reason).__name__}")
    return reason[:LONGEST_REASON].encode(errors="replace").decode()


def utc_time(milliseconds: int) -> datetime:
    """Milliseconds since 1970 as a time; the calendar's last one for what lies beyond it."""
    return _EPOCH + timedelta(milliseconds=min(max(0, milliseconds), _LAST_MS))


def now_ms() -> int:
    """Wall clock, milliseconds since 1970."""
    return time.time_ns() // 1_000_000
