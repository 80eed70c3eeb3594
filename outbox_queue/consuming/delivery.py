"""A message in progress in this process, as reader, buffer, acknowledgements and `Message` share it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from outbox_queue.protocol.headers import Header, place_text


class ReceivedMessage(NamedTuple):
    """A record of the message topic, read as a message."""

    queue: str  # name of its queue
    payload: bytes  # the record's value
    headers: tuple[Header, ...]  # the user's
    attempt: int  # number of this attempt, 1 for the first
    max_attempts: int | None  # None for no limit
    place: tuple[int, int]  # partition and offset of this copy
    origin: tuple[int, int]  # partition and offset of the first copy
    enqueued_at_ms: int  # when the first copy was sent

    @property
    def id(self) -> str:
        """`partition-offset` of the first copy."""
        return place_text(self.origin)


class State(Enum):
    """State of a message in this process; all but IN_PROGRESS are settled."""

    IN_PROGRESS = "in progress"
    ACKNOWLEDGED = "acknowledged"
    NACKED = "given back"
    REJECTED = "rejected"
    INTERRUPTED = "interrupted"


@dataclass(slots=True, eq=False)
class Delivery:
    """A message from its start marker on. Times are seconds of `election.now`.

    That clock goes on while the machine sleeps, as trackers do: they may redeliver the message from `deadline` on,
    which changes with `state` under the lock of `AckHandler`. `received_at` is the entry into the buffer, then the
    exit. A `marker_partition` of -1 leaves it to the partitioner.
    """

    message: ReceivedMessage
    marker_partition: int
    marker_key: bytes
    deadline: float
    keep_alive_until: float = float("inf")
    received_at: float = 0.0
    state: State = State.IN_PROGRESS
