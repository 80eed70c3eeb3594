"""The errors of queues; all derive from OutboxError."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outbox_core.errors import OutboxError


class QueueError(OutboxError):
    """The root of the errors of queues."""


class InvalidMessage(QueueError, ValueError):
    """A payload, header, delay or queue name cannot be sent; nothing was."""


class MessageTooLarge(InvalidMessage):
    """A message whose start marker would be larger than the marker topic takes."""


class SendFailed(QueueError):
    """Messages were not delivered to Kafka, or are not known to be.

    Attributes:
        failures: the reasons, with the number of messages of each.
        undelivered: payloads that are certainly not in Kafka, to send again; of very many only the first.
        unconfirmed: number of messages neither delivered nor refused in time, which may be in Kafka.
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
    """Raised by a handler of `queue.run`: make this message a dead letter with a reason, whatever attempts are left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class QueueTopicError(QueueError):
    """A topic of the queues is missing and cannot be made, or its settings would lose messages."""


def refuse_forked(made: object, pid: int) -> None:
    """Refuse to use what another process made (`QueueError`): the threads of its Kafka client are not in this one."""
    if os.getpid() != pid:
        raise QueueError(f"{made!r} was made in process {pid} before this one was forked; make one in each process")
