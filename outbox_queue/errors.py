"""What can go wrong with a queue; all of it derives from OutboxError."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_core.errors import OutboxError


class QueueError(OutboxError):
    """The root of the errors of queues."""


class InvalidMessage(QueueError, ValueError):
    """A payload, header, delay or queue name that cannot be sent; nothing was."""


class MessageTooLarge(InvalidMessage):
    """A message whose start marker would be larger than the marker topic takes."""


class SendFailed(QueueError):
    """Messages were not delivered to Kafka, or it is not known that they were.

    Attributes:
        failures: the reasons, with the number of messages that each is about.
        undelivered: payloads of messages that are certainly not in Kafka, to be sent again; the first of them, where
            there are very many.
        unconfirmed: how many messages may be in Kafka or not: neither delivered nor refused when the time was over.
    """

    def __init__(
        self,
        message: str,
        failures: dict[str, int] | None = None,
        *,
        undelivered: Sequence[bytes] = (),
        unconfirmed: int = 0,
    ) -> None:
        super().__init__(message)
        self.failures = failures or {}
        self.undelivered = tuple(undelivered)
        self.unconfirmed = unconfirmed


class QueueClosed(QueueError):
    """The consumer or producer has been closed."""


class MessageSettled(QueueError):
    """The message has been acknowledged, given back or rejected already."""


class Reject(QueueError):
    """Raised by a handler of `queue.run`: set this message aside as a dead letter, whatever attempts it has left.

    Args:
        reason: kept with the dead letter.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class QueueTopicError(QueueError):
    """A topic of the queues is missing and cannot be made, or its settings would lose messages."""
