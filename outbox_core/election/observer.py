"""The leader topic as others than its owner read it: standbys, `outbox doctor`, and tasks of a relay on Spark.

A reader writes the end of the topic instead of asking for it: a broker that was cut off may tell an old end, but only
the partition's true leader acknowledges a message. A reader that has come to its own message has read every claim that
was acknowledged before it. `outbox_spark.relay.fencing` says why a relay's task needs to do so only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from outbox_core.election.lease import now
from outbox_core.election.messages import Claim, Contest, Heartbeat, Signal, decode, encode_look
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import (
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    make_consumer,
    make_producer,
)
from outbox_core.kafka.errors import explained
from outbox_core.kafka.reader import PartitionReader, reader_settings

if TYPE_CHECKING:
    from outbox_core.config import LeaderNames
    from outbox_core.election.config import NeliConfig

_MOST_AT_ONCE = 1000
_PAUSE_SECONDS = 0.02
_ENOUGH = 32  # some seconds of a leader's heartbeats
_FIRST_WINDOW = 128
_WIDER = 8
_TIMEOUT_SECONDS = 30.0


class Observer:
    """The messages of the leader topic, while they are wanted. Used by one thread, and never waits."""

    def __init__(
        self,
        config: NeliConfig,
        place: TopicPartition,
        on_message: Callable[[Message], None],
        on_error: Callable[[KafkaError], None],
    ) -> None:
        self._place = place
        self._on_message = on_message
        self._on_error = on_error
        # Made now, as where this starts an error is seen; later it would hold up the elector's thread.
        self._consumer: Consumer | None = make_consumer(config.consumer_settings())  # joins nothing
        self._is_reading = False

    def poll(self, first: int = OFFSET_END) -> None:
        """Report the next messages, if there are any: from the offset `first` on, after a pause."""
        if self._consumer is None:
            return
        if not self._is_reading:
            self._consumer.assign([TopicPartition(self._place.topic, self._place.partition, first)])
            self._is_reading = True
        for _ in range(_MOST_AT_ONCE):
            message = self._consumer.poll(0)
            if message is None:
                return
            if (error := message.error()) is not None:
                self._on_error(error)
                return
            self._on_message(message)

    def pause(self) -> None:
        """Read no messages until the next `poll`."""
        if self._consumer is not None and self._is_reading:
            self._consumer.unassign()
        self._is_reading = False

    def close(self) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = None


def signal_in(message: Message) -> Signal | None:
    """Return the signal of a message of the leader topic, None for noise."""
    value = message.value()
    return decode(value if isinstance(value, bytes) else None)


def next_heartbeat(config: NeliConfig) -> Heartbeat | None:
    """Wait for a heartbeat of the group's leader, for half of `heartbeat_timeout`; None if none came. Joins nothing."""
    heard: list[Heartbeat] = []

    def note(message: Message) -> None:
        signal = signal_in(message)
        if isinstance(signal, Heartbeat) and config.contest.includes(signal.contest):
            heard.append(signal)

    give_up_at = now() + config.heartbeat_timeout.total_seconds() / 2
    with closing(Observer(config, TopicPartition(config.topic, config.role), note, lambda _: None)) as observer:
        while not heard and now() < give_up_at:
            observer.poll()
            time.sleep(_PAUSE_SECONDS)
    return heard[0] if heard else None


def highest_claim(kafka: Mapping[str, Any], leader: LeaderNames, since: int = 0) -> int:
    """Return the number of the group's highest claim, as the end of its leader topic shows it; -1 if it shows none.

    A leader's heartbeats name its claim, and it stops as soon as it reads a higher one, so some tens of the group's
    messages suffice: read from ever further back until there are so many, but not before `since`, a claim. Writes a
    look. Raises KafkaUnavailable if the topic cannot be written or read.
    """
    common = {name: value for name, value in kafka.items() if name not in {"group.instance.id", "group.id"}}
    give_up_at = time.monotonic() + _TIMEOUT_SECONDS
    look = _write_look(common, leader, give_up_at)
    settings = reader_settings(common, "kafka-outbox-claims")
    with closing(make_consumer(settings | {"isolation.level": "read_uncommitted"})) as consumer:
        first = max(since, _beginning(consumer, leader.topic, give_up_at))
        window = _FIRST_WINDOW
        while True:
            start = max(first, look - window)
            claims = _claims(consumer, leader, start, look, give_up_at)
            if start == first or len(claims) >= _ENOUGH:
                return max(claims, default=-1)
            window *= _WIDER


def _write_look(kafka: Mapping[str, Any], leader: LeaderNames, give_up_at: float) -> int:
    producer = make_producer({**kafka, "acks": "all", "linger.ms": 0})
    outcome: list[tuple[KafkaError | None, int | None]] = []

    def note(error: KafkaError | None, message: Message) -> None:
        outcome.append((error, message.offset()))

    value = encode_look(contest=Contest(leader.group_id))
    producer.produce(leader.topic, value, partition=0, on_delivery=note)
    while not outcome and time.monotonic() < give_up_at:
        producer.poll(0.1)
    if not outcome:
        producer.purge()
        raise KafkaUnavailable(f"leader topic {leader.topic!r} cannot be written: no answer")
    [(error, offset)] = outcome
    if error is not None:
        raise KafkaUnavailable(f"leader topic {leader.topic!r} cannot be written: {explained(error, kafka)}")
    if offset is None or offset < 0:
        raise KafkaUnavailable(f"leader topic {leader.topic!r}: it is not known where a message was written")
    return offset


def _claims(consumer: Consumer, leader: LeaderNames, start: int, look: int, give_up_at: float) -> list[int]:
    """Return the claims that the group's messages make or name, from an offset up to our look."""

    def check_patience() -> None:
        if time.monotonic() >= give_up_at:
            raise KafkaUnavailable(f"leader topic {leader.topic!r} was not read to its end in time")

    claims: list[int] = []
    reader = PartitionReader(
        consumer,
        [TopicPartition(leader.topic, 0, start)],
        {(leader.topic, 0): look + 1},
        on_error=lambda *_: None,  # the time is limited
        give_up=check_patience,
    )
    contest = Contest(leader.group_id)
    for [message] in reader:
        signal, offset = signal_in(message), message.offset() or 0
        if signal is not None and contest.includes(signal.contest):
            claim = offset if isinstance(signal, Claim) else signal.claim
            if claim <= offset:  # else it is no leader's
                claims.append(claim)
    return claims


def _beginning(consumer: Consumer, topic: str, give_up_at: float) -> int:
    while True:
        try:
            low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=5.0, cached=False)
        except KafkaException as error:
            if time.monotonic() > give_up_at:
                raise KafkaUnavailable(f"leader topic {topic!r} cannot be read: {error.args[0].str()}") from None
            time.sleep(0.1)
        else:
            return low
