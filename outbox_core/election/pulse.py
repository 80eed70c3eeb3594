"""The member of the group: joins it, owns the partition or waits for it, and lets a `Tenure` decide what that means.

Everything here happens on one thread, which must never wait for long: it writes heartbeats without waiting for their
delivery, reads with a short time-out, and wakes up when a lease ends although nothing arrives. Only an event handler
can hold it up; the lease is then over on time all the same, because everybody who asks compares its deadline.

What an operator can mend ends no member that has once been in order: it tries on, and tells of its trouble (`Vigil`).
Only at the start is it an error.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from outbox_core.election.claims import Claim, decode, encode, encode_look
from outbox_core.election.connection import Connection, is_lasting, refusal, why_refused
from outbox_core.election.leadership import Leadership, now
from outbox_core.election.tenure import Tenure
from outbox_core.election.vigil import Vigil
from outbox_core.election.watch import Watch
from outbox_core.errors import LeaderTopicError, OutboxError
from outbox_core.events import Event, EventHandler, LeaderRevoked
from outbox_core.kafka import (
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    make_consumer,
    make_producer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_LONGEST_WAIT_SECONDS = 0.05  # how late a request to stop may be noticed
_END_OFFSET_TIMEOUT_SECONDS = 1.0
_FIRST_WRITE_SECONDS = 5.0
_WITHDRAWN = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001  confluent's public constants


class Pulse:
    """One life as a member of the group. Used by one thread; `leadership` may be read by any.

    Args:
        config: The settings.
        width: Number of partitions of the leader topic.
        notify: Told every leadership event; must not raise.
        barrier: Called with the lease before a hand-over, to wait for work that goes on elsewhere.
    """

    def __init__(
        self, config: NeliConfig, width: int, notify: EventHandler, barrier: Callable[[Leadership], None]
    ) -> None:
        self._config = config
        self._place = TopicPartition(config.topic, config.role % width)
        self._notify = notify
        self._barrier = barrier
        self._tenure: Tenure | None = None
        self._is_handing_over = False
        self._has_joined = False
        self._connection = Connection(config)
        self._vigil = Vigil(config, self._connection)
        self._watch = Watch(config, self._place, self._vigil.heard, self._on_error)
        self._producer = make_producer(config.producer_settings())
        self._consumer: Consumer = make_consumer(config.consumer_settings() | {"error_cb": self._connection.complain})

    @property
    def leadership(self) -> Leadership | None:
        """The lease, valid or just over."""
        tenure = self._tenure
        return tenure.leadership if tenure is not None else None

    @property
    def is_handing_over(self) -> bool:
        """Whether LeaderRevoked is being told: the lease may still run, and nothing new is to begin under it."""
        return self._is_handing_over

    @property
    def trouble(self) -> str | None:
        """What keeps the group from having a leader, or None; see `Vigil`."""
        return self._vigil.trouble

    def join(self) -> None:
        """Ask to be let into the group, having seen that the leader topic takes messages of ours.

        Raises:
            LeaderTopicError: it does not, and will not unless somebody mends it.
        """
        error = self._try_to_write()
        if error is not None and is_lasting(error):
            raise LeaderTopicError(why_refused(error, self._config))
        self._consumer.subscribe(
            [self._config.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def turn(self) -> None:
        """Write what is due, read one message or wait a moment for it.

        Raises:
            OutboxError: if this member can never lead: the group or the topic refuses it.
        """
        self._write()
        self._wake_client()
        message = self._consumer.poll(self._patience())
        self._producer.poll(0)
        if self._tenure is None:
            self._watch.read()
        if message is None:
            self._quiet()
        elif (error := message.error()) is not None:
            self._on_error(error)
        else:
            self._read(message)
        self._vigil.look(self._producer)

    def close(self) -> None:
        """Hand leadership over, if held, and leave the group."""
        self._hand_over()
        with suppress(KafkaException, RuntimeError):
            self._consumer.close()
        with suppress(KafkaException, RuntimeError):
            self._watch.close()
        del self._producer

    def lose(self, reason: str) -> None:
        """Give leadership up without a hand-over."""
        tenure = self._tenure
        fenced = tenure.lose(reason) if tenure is not None else None
        self._end_tenure()
        if fenced is not None:
            self._notify(fenced)

    def _wake_client(self) -> None:
        """Ask librdkafka something, as that makes its main thread look whether a group heartbeat or a join is due.

        Left alone it looks every 500 ms, whatever `heartbeat.interval.ms` says: a standby took up to 850 ms to learn of
        a hand-over, and group heartbeats came too late for the session timeout to be trusted.
        """
        self._consumer.assignment()

    def _write(self) -> None:
        tenure = self._tenure
        if tenure is None:
            return
        self._tell(tenure.expire(now()))
        signal = tenure.next_signal(now())
        if signal is None:
            return
        if isinstance(signal, Claim):
            self._forget_unsent()
        with suppress(BufferError):  # then this one is lost, as many are on the way
            try:
                self._producer.produce(
                    self._place.topic, encode(signal), partition=self._place.partition, on_delivery=self._on_delivery
                )
            except KafkaException as error:
                self._vigil.refused(error.args[0])
            self._producer.poll(0)

    def _try_to_write(self) -> KafkaError | None:
        """Write a look, again while that fails in passing; return what the last one failed with, None if it did not."""
        look = encode_look(self._config.name, self._config.contest)
        outcome: list[KafkaError | None] = []
        give_up_at = now() + _FIRST_WRITE_SECONDS
        while now() < give_up_at:
            self._producer.produce(
                self._place.topic,
                look,
                partition=self._place.partition,
                on_delivery=lambda error, _: outcome.append(error),
            )
            asked_before = len(outcome)
            while len(outcome) == asked_before and now() < give_up_at:
                self._producer.poll(_LONGEST_WAIT_SECONDS)
            if outcome and (outcome[-1] is None or is_lasting(outcome[-1])):
                break
            time.sleep(_LONGEST_WAIT_SECONDS)
        self._forget_unsent()
        return outcome[-1] if outcome else None

    def _read(self, message: Message) -> None:
        self._connection.well()
        tenure = self._tenure
        if tenure is None or message.partition() != self._place.partition:
            return
        value = message.value()
        signal = decode(value if isinstance(value, bytes) else None)
        self._vigil.heard(signal)
        offset = message.offset() or 0
        self._tell(tenure.observe(offset, signal, now()))
        _, end = self._consumer.get_watermark_offsets(self._place, cached=True)
        if offset + 1 >= end:  # on a topic that others share there may always be something to read
            self._quiet()

    def _quiet(self) -> None:
        if self._tenure is not None:
            self._tenure.quiet(now())

    def _tell(self, event: Event | None) -> None:
        if event is not None:
            self._notify(event)

    def _patience(self) -> float:
        if self._tenure is None:
            return _LONGEST_WAIT_SECONDS
        return min(_LONGEST_WAIT_SECONDS, self._tenure.attention_in(now()))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._has_joined = True
        mine = [place for place in partitions if place.partition == self._place.partition]
        others = [TopicPartition(place.topic, place.partition, OFFSET_END) for place in partitions if place not in mine]
        consumer.incremental_assign([self._at_end(place) for place in mine] + others)
        if others:
            consumer.pause(others)
        if mine:
            logger.debug("%s owns %s", self._config.name, self._label)
            self._watch.rest()
            self._tenure = Tenure(
                self._config.name,
                timeout=self._config.heartbeat_timeout.total_seconds(),
                interval=self._config.heartbeat_interval.total_seconds(),
                contest=self._config.contest,
            )
            self._write()

    def _at_end(self, place: TopicPartition) -> TopicPartition:
        """The partition with its present end, so that the claim written next is read for certain.

        If the broker does not say in time, the end as it is when reading begins: it may be after the claim, which is
        then repeated.
        """
        try:
            _, end = self._consumer.get_watermark_offsets(place, timeout=_END_OFFSET_TIMEOUT_SECONDS)
        except KafkaException:
            end = OFFSET_END
        return TopicPartition(place.topic, place.partition, end)

    def _on_revoke(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        if any(place.partition == self._place.partition for place in partitions):
            self._hand_over()

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        if any(place.partition == self._place.partition for place in partitions):
            self.lose("the partition was lost: the group has gone on without us")

    def _hand_over(self) -> None:
        """Wait for the work in flight. The partition stays ours meanwhile, and the lease can be read as it runs out."""
        tenure = self._tenure
        if tenure is None:
            return
        self._tell(tenure.expire(now()))
        lease = tenure.leadership
        if lease is not None:
            self._barrier(lease)
            self._is_handing_over = True
            self._notify(LeaderRevoked(lease.leader_id))
            self._is_handing_over = False
        self._end_tenure()

    def _end_tenure(self) -> None:
        self._tenure = None
        self._forget_unsent()
        self._vigil.ends_tenure()

    def _forget_unsent(self) -> None:
        """Drop what waits for the broker: a late claim would depose a successor for nothing."""
        self._producer.purge(blocking=False)
        self._producer.poll(0)

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self._vigil.accepted()
        elif error.code() not in _WITHDRAWN:
            self._vigil.refused(error)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._MAX_POLL_EXCEEDED:  # noqa: SLF001  confluent's public constant
            logger.warning("%s blocked for longer than max.poll.interval.ms and left the group", self._config.name)
            return
        refused = refusal(error, self._config)
        if refused is not None and not self._has_joined:
            raise refused
        if error.fatal():
            raise OutboxError(f"leader group {self._config.group_id!r}: the Kafka client gave up: {error.str()}")
        self._connection.hindered(str(refused or error.str()))

    @property
    def _label(self) -> str:
        return f"{self._place.topic}[{self._place.partition}]"
