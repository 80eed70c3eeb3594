"""`confluent_kafka.Consumer` as the loop of `consume` uses it: offsets to store, to commit and to go back to.

What the application has stored is committed now and then, when partitions are revoked, and at the end. A member that
does not poll for `max.poll.interval.ms` leaves its group, and is told at the next poll.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tests.simulation import queue_kafka
from tests.simulation.clients import Message, Place

_NOBODY: Place = ("", -1)


class Consumer(queue_kafka.Consumer):
    """A member of a group whose application settles records one by one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._stored: dict[Place, int] = {}
        self._polled_at = self.process.monotonic()
        self._is_polling = False
        self._longest = float(settings.get("max.poll.interval.ms", 300_000)) / 1000
        self._must_tell_idle = False
        if settings.get("enable.auto.commit", True):
            self._interval = float(settings.get("auto.commit.interval.ms", 5000)) / 1000
            self.process.after(self._interval, self._commit_now_and_then)

    def consumer_group_metadata(self) -> bytes:
        """Return it serialised, as librdkafka does: the generation, the group, the member."""
        group, name, generation = self.who
        return b"CGMDv2:" + generation.to_bytes(4, signed=True) + b"\0".join((group.encode(), name.encode(), b""))

    @property
    def is_idle(self) -> bool:
        """True if the application has not polled for longer than `max.poll.interval.ms`."""
        is_idle = not self._is_polling and self.process.monotonic() - self._polled_at > self._longest
        self._must_tell_idle = self._must_tell_idle or is_idle
        return is_idle

    def poll(self, timeout: float = -1) -> Message | None:
        """See `clients.Consumer.poll`."""
        self._is_polling = True
        try:
            if self._must_tell_idle:
                self._must_tell_idle = False
                error = KafkaError(KafkaError._MAX_POLL_EXCEEDED, "application maximum poll interval exceeded")
                return Message(_NOBODY, 0, error=error)
            return super().poll(timeout)
        finally:
            self._is_polling, self._polled_at = False, self.process.monotonic()

    def seek(self, at: TopicPartition) -> None:
        """Go on from an offset."""
        self._check_assigned(at)
        self.cluster.reached("set back")
        self._positions[at.topic, at.partition] = at.offset
        self._start_again()

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Have offsets committed by the client."""
        if self.settings.get("enable.auto.offset.store", True):
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "it stores by itself"))
        for each in _offsets(message, offsets):
            self._check_assigned(each)
            self._stored[each.topic, each.partition] = each.offset

    def commit(
        self,
        *,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[TopicPartition]:
        """Commit the offset after a record, or what is stored."""
        given = _offsets(message, offsets)
        if not given:
            given = [TopicPartition(*place, offset) for place, offset in self._stored.items()]
            self._stored.clear()
        if not given:
            raise KafkaException(KafkaError(KafkaError._NO_OFFSET, "no offset stored"))
        return super().commit(offsets=given, asynchronous=asynchronous)

    def unassign(self) -> None:
        self._commit_stored()
        super().unassign()

    def close(self) -> None:
        self._commit_stored()
        super().close()

    def _commit_now_and_then(self) -> None:
        if not self.is_closed:
            self._commit_stored()
            self.process.after(self._interval, self._commit_now_and_then)

    def _commit_stored(self) -> None:
        stored, self._stored = self._stored, {}
        if stored and self.settings.get("enable.auto.commit", True):
            self.cluster.reached("stored offsets committed")
            self._send_commit(stored, lambda _: None, 0)

    def _check_assigned(self, at: TopicPartition) -> None:
        if (at.topic, at.partition) not in self._places:
            raise KafkaException(KafkaError(KafkaError._STATE, "the partition is not assigned"))


def _offsets(message: Message | None, offsets: list[TopicPartition] | None) -> list[TopicPartition]:
    if message is not None:
        return [TopicPartition(message.topic(), message.partition(), (message.offset() or 0) + 1)]
    return list(offsets or ())
