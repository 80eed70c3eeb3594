"""What a standby reads: the leader topic, without owning its partition, to know whether anybody leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outbox_core.election.claims import Signal, decode
from outbox_core.kafka import OFFSET_END, Consumer, KafkaError, TopicPartition, make_consumer

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig

_MOST_AT_ONCE = 1000


class Watch:
    """Reads what is written from now on, while it is wanted. Used by one thread, and never waits.

    Args:
        config: The settings.
        place: The partition of the leader topic.
        heard: Told every message, None for noise.
        failed: Told every error in the place of a message.
    """

    def __init__(
        self,
        config: NeliConfig,
        place: TopicPartition,
        heard: Callable[[Signal | None], None],
        failed: Callable[[KafkaError], None],
    ) -> None:
        self._config = config
        self._place = TopicPartition(place.topic, place.partition, OFFSET_END)
        self._heard = heard
        self._failed = failed
        self._consumer: Consumer | None = None  # made when first wanted: who leads at once never needs it
        self._is_reading = False

    def read(self) -> None:
        """Tell what there is."""
        if self._consumer is None:
            self._consumer = make_consumer(self._config.consumer_settings())  # joins nothing
        if not self._is_reading:
            self._consumer.assign([self._place])
            self._is_reading = True
        for _ in range(_MOST_AT_ONCE):
            message = self._consumer.poll(0)
            if message is None:
                return
            if (error := message.error()) is not None:
                self._failed(error)
                return
            value = message.value()
            self._heard(decode(value if isinstance(value, bytes) else None))

    def rest(self) -> None:
        """Read nothing for the time being."""
        if self._consumer is not None and self._is_reading:
            self._consumer.unassign()
        self._is_reading = False

    def close(self) -> None:
        """Read no more."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = None
