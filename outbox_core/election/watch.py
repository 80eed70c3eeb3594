"""The leader topic as others than its owner read it, to know whether anybody leads: a standby, and `outbox doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from outbox_core.election.claims import Heartbeat, Signal, decode
from outbox_core.election.leadership import now
from outbox_core.kafka import OFFSET_END, Consumer, KafkaError, TopicPartition, make_consumer

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig

_MOST_AT_ONCE = 1000
_PAUSE_SECONDS = 0.02


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


def next_heartbeat(config: NeliConfig) -> Heartbeat | None:
    """Wait for a heartbeat of whoever leads the group; None if it takes longer than two of ours do. Joins nothing."""
    heard: list[Heartbeat] = []

    def note(signal: Signal | None) -> None:
        if isinstance(signal, Heartbeat) and config.contest.includes(signal.contest):
            heard.append(signal)

    give_up_at = now() + config.heartbeat_timeout.total_seconds() / 2
    with closing(Watch(config, TopicPartition(config.topic, config.role), note, lambda _: None)) as watch:
        while not heard and now() < give_up_at:
            watch.read()
            time.sleep(_PAUSE_SECONDS)
    return heard[0] if heard else None
