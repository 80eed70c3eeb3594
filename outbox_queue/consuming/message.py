"""The public face of a message that a consumer has handed out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from typing import Protocol

from outbox_core import tracing
from outbox_core.claims.claims import ClaimStore, claim_of, collect
from outbox_core.plain import plain
from outbox_queue.consuming.delivery import Delivery, State
from outbox_queue.errors import InvalidMessage, MessageSettled
from outbox_queue.protocol.headers import LONGEST_REASON, Header
from outbox_queue.times import delay_milliseconds, utc_time


class Acks(Protocol):
    """The settling of a consumer's messages; `AckHandler` does it by markers."""

    def acknowledge(self, delivery: Delivery) -> None:
        """Finish it."""

    def nack(self, delivery: Delivery, delay_ms: int, reason: str, *, counts: bool) -> None:
        """Have it redelivered after a delay; the attempt counts, or does not."""

    def reject(self, delivery: Delivery, reason: str) -> None:
        """Make it a dead letter."""

    def interrupt(self, delivery: Delivery) -> None:
        """Have it redelivered after its timeout."""

    def extend(self, delivery: Delivery, duration: timedelta) -> None:
        """Keep it for so long from now."""


class Message:
    """A message in progress. Its methods may be called from any thread, and only `reject` waits for Kafka.

    Methods that settle or extend it raise `MessageSettled` if it is settled already, `QueueClosed` if its consumer has
    been closed (it will be redelivered), and `InvalidMessage` for a bad argument.

    Attributes:
        headers: (name, value) pairs as they were sent, without the queue's own.
        attempt: 1 when it is handed out for the first time.
        max_attempts: with this attempt it becomes a dead letter if it is not acknowledged; None for no limit.
        queue: name of its queue.
    """

    __slots__ = ("_acks", "_claim_store", "_delivery", "_payload", "attempt", "headers", "max_attempts", "queue")

    def __init__(self, delivery: Delivery, acks: Acks, claim_store: ClaimStore | None = None) -> None:
        message = delivery.message
        self._payload: bytes | None = None
        self.headers: tuple[Header, ...] = message.headers
        self.attempt: int = message.attempt
        self.max_attempts: int | None = message.max_attempts
        self.queue: str = message.queue
        self._delivery = delivery
        self._acks = acks
        self._claim_store = claim_store

    @property
    def payload(self) -> bytes:
        """The bytes as they were sent. A large payload comes from the claim store when it is asked for.

        Raises:
            ClaimMissing: if the store does not have it, or the service was given none.
            ClaimStoreFailed: if the store failed otherwise.
        """
        if self._payload is None:
            sent = self._delivery.message.payload
            name = claim_of(self.headers, sent)
            self._payload = sent if name is None else collect(self._claim_store, name)
        return self._payload

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.queue!r}, attempt {self.attempt}, {self._delivery.state.value}>"

    @property
    def id(self) -> str:
        """`partition-offset` of its first copy in the message topic: the same for every attempt."""
        return self._delivery.message.id

    @property
    def enqueued_at(self) -> datetime:
        """Time at which its first copy was sent, in UTC."""
        return utc_time(self._delivery.message.enqueued_at_ms)

    @property
    def is_settled(self) -> bool:
        """True if it has been acknowledged, nacked, rejected or interrupted."""
        return self._delivery.state is not State.IN_PROGRESS

    def header(self, name: str) -> bytes | None:
        """Return the last header of that name, None if there is none."""
        return next((value for key, value in reversed(self.headers) if key == name), None)

    def span(self) -> AbstractContextManager[None]:
        """Return the OpenTelemetry span in which it is handled, for handlers of your own loop; `Queue.run` makes it.

        Linked with the span in which it was sent or stashed. Without tracing it does nothing.
        """
        spans = tracing.active()
        if spans is None:
            return nullcontext()
        from outbox_core.tracing.spans import of_message

        attributes = of_message(None, self._delivery.message.payload, message_id=self.id)
        attributes["kafka_outbox.queue.attempt"] = self.attempt
        return spans.process(self.queue, self.headers, attributes)

    def ack(self) -> None:
        """Finish the message: it is not redelivered. Acknowledging once more does nothing."""
        if self._delivery.state is not State.ACKNOWLEDGED:
            self._check_unsettled("ack")
            self._acks.acknowledge(self._delivery)

    def nack(self, delay: timedelta | None = None, reason: str = "", *, counts: bool = True) -> None:
        """Have it redelivered after a delay (None: at once), or made a dead letter if this was its last attempt.

        The delay is at most the setting `max_delay`; a dead letter keeps 2,000 characters of the reason. An attempt
        that does not count, in an outage for example, is no last one: it comes again with the same number. It needs
        a delay.
        """
        self._check_unsettled("nack")
        if not counts and not delay:
            raise InvalidMessage("nack: an attempt that does not count needs a delay, or it comes again without end")
        self._acks.nack(self._delivery, delay_milliseconds(delay), checked_reason("nack", reason), counts=counts)

    def reject(self, reason: str) -> None:
        """Make it a dead letter, whatever attempts it has left. Waits until Kafka has it.

        Raises:
            SendFailed: if it cannot be written; the message is still in progress.
        """
        self._check_unsettled("reject")
        self._acks.reject(self._delivery, checked_reason("reject", reason))

    def interrupt(self) -> None:
        """Stop working on it without a marker: it is redelivered when its redelivery timeout has passed."""
        self._check_unsettled("interrupt")
        self._acks.interrupt(self._delivery)

    def extend(self, duration: timedelta) -> None:
        """Keep it from other consumers for so long from now, even if this process dies, and past `max_processing_time`.

        The duration is more than zero, and at most half of the setting `marker_retention`.
        """
        self._check_unsettled("extend")
        if not isinstance(duration, timedelta) or duration <= timedelta(0):
            raise InvalidMessage(f"extend: expected a timedelta of more than zero, got {duration!r}")
        self._acks.extend(self._delivery, duration)

    def _check_unsettled(self, verb: str) -> None:
        state = self._delivery.state
        if state is not State.IN_PROGRESS:
            raise MessageSettled(f"{verb}: message {self.id} of queue {self.queue!r} has been {state.value}")


def checked_reason(verb: str, reason: object) -> str:
    """Fit a reason into a marker: cut it after 2,000 characters, and replace characters that UTF-8 cannot encode."""
    reason = plain(reason)
    if not isinstance(reason, str):
        raise InvalidMessage(f"{verb}: the reason must be text, got {type(reason).__name__}")
    return reason[:LONGEST_REASON].encode(errors="replace").decode()
