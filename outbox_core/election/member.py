"""The member of the group: joins it, owns the partition or waits for it; `Ownership` decides about leadership.

All of it runs on one thread, which must never wait for long. Only an event handler can hold it up; the lease still ends
on time, because its users compare its deadline.

A member reports trouble that an operator can mend (`GroupHealth`) and tries on; only at the start is it an error.

**Who cannot lead, leaves.** The group's coordinator gives the partition by group heartbeats alone, so a member may own
it and not reach the broker that has it, or reach that in one direction only. An owner that has not led for two sessions
leaves the group and stays out (`absence`); so does who is told to `step_down`, whether it owns the partition or not.
While out it reads on: its `Predecessor` and its health know of leaders as a standby's do.

- *No two lead*: the ownership ends before the group is left, in the order of every hand-over: the work in flight ends
  (`LeaderRevoked`), the lease is dropped, the resignation is written, and only then does the coordinator hear of it. An
  owner that could not lead has no lease, and its resignation, if it gets through, tells no more than that.
- *Order and exactly once* rest on that hand-over and on the successor's wait, as ever; nothing else is told to anybody.
- *The count begins with the partition, or with the end of the last lease*, never with the last heartbeat heard: who
  gets the partition after long silence has two sessions of its own.
- *A deposed owner whose rival's heartbeats it hears stays*: somebody leads, and the claim of the next owner would only
  depose that one. Such a rival is a stranger to the group, or is about to learn from the coordinator that it has lost
  the partition. A rival that made a claim and writes no heartbeats is none.

**Clients that know an old leader alone.** librdkafka asks who leads a partition of a broker that it is connected to.
That may be one alone: a leader of the leader topic that the cluster has lost, which answers that it leads, for as long
as the client lives. A new client begins with any broker. So who has heard no leader for long reads, writes and joins by
new clients.

**A topic made anew**, after it was deleted say, does not show who led on the old one and may still have a lease, cut
off from all brokers. So whoever meets one takes a leader to have been alive just now. A member knows it by offsets that
begin again: it may itself have been suspended while others led. A process that starts knows it by the group, which
Kafka remembers while the topic shows no leader of it.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from outbox_core.election.absence import AbilityQuestion, Absence, Look, SteppedDown, UnableToLead
from outbox_core.election.connection_log import ConnectionLog, is_lasting, refusal, why_refused
from outbox_core.election.group_health import GroupHealth
from outbox_core.election.lease import Leadership, now
from outbox_core.election.messages import Claim, Signal, encode, encode_look
from outbox_core.election.observer import Observer, signal_in
from outbox_core.election.protocol import Ownership, Predecessor
from outbox_core.errors import KafkaUnavailable, LeaderTopicError, OutboxError
from outbox_core.events import Event, EventHandler, LeaderRevoked
from outbox_core.kafka.admin import Inquiry
from outbox_core.kafka.clients import (
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
    end_client,
    make_consumer,
    make_producer,
)
from outbox_core.kafka.errors import PURGED

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_LONGEST_WAIT_SECONDS = 0.05  # how late a request to stop may be noticed
_END_OFFSET_TIMEOUT_SECONDS = 1.0
_FIRST_WRITE_SECONDS = 5.0
_RESIGN_SECONDS = 1.0
_SESSIONS_UNABLE = 2  # longer than any hand-over, with the wait for an earlier lease
_LOOK_BACK = 1000  # messages before a member's first: more than what some groups write in the time of a lease
_LONG_AGO_SECONDS = 600.0  # longer than any lease, and than clocks of machines are apart


class ClientBroken(OutboxError):
    """The group's Kafka client has failed for good; another one may not."""


class Member:
    """One life as a member of the group. Used by one thread; `leadership` may be read by any."""

    def __init__(
        self, config: NeliConfig, width: int, notify: EventHandler, barrier: Callable[[Leadership], None]
    ) -> None:
        self._config = config
        self._place = TopicPartition(config.topic, config.role % width)
        self._notify = notify  # must not raise
        self._barrier = barrier  # called before a hand-over, to wait for work elsewhere
        self._ownership: Ownership | None = None
        self.is_handing_over = False  # then the lease may still run, and no work may begin
        self.has_joined = False  # an error of the group may pass from then on
        self._able_at = now()  # the last time when it led for long, or had no partition to lead by
        self._led_since: float | None = None
        self._absence: Absence | None = None
        self._left_at = 0.0
        self._connection = ConnectionLog(config)
        self._connection.on_width(width)
        self._health = GroupHealth(config, self._connection)
        self._predecessor = Predecessor(config.heartbeat_timeout.total_seconds())
        self._joined_at = 0  # the offset of the message that this member wrote first
        self._is_anew = False  # the topic may be, while the group is not: no claim was read before that message yet
        self._position = OFFSET_END  # of the next message to read, as owner or beside it
        self._observer = self._make_observer()
        self._producer = self._make_producer()
        self._consumer = self._make_consumer()

    @property
    def leadership(self) -> Leadership | None:
        """The lease, valid or just over; None without one."""
        ownership = self._ownership
        return ownership.leadership if ownership is not None else None

    @property
    def trouble(self) -> str | None:
        """The reason why this member is out of the group, or why that has no leader (`GroupHealth`), or None."""
        absence = self._absence
        if absence is None:
            return self._health.trouble
        return (
            f"left leader group {self._config.group_id!r} for {now() - self._left_at:.0f} s: {absence.reason}; "
            f"comes back when {absence.condition}"
        )

    @property
    def is_out(self) -> bool:
        """True while it is out of the group, and another member leads, if it can."""
        return self._absence is not None

    @property
    def hears_leader(self) -> bool:
        """True if a leader's heartbeat was read within the time of a lease."""
        return self._health.heard_at > now() - self._config.heartbeat_timeout.total_seconds()

    @property
    def silent_seconds(self) -> float:
        """Seconds since Kafka answered last."""
        return self._health.silent_seconds

    def join(self) -> None:
        """Ask to be let into the group, or raise LeaderTopicError if the leader topic refuses our messages for good."""
        self._look()
        self._is_anew = self._position == 0 and self._is_group_known()
        self._subscribe()

    def _is_group_known(self) -> bool:
        try:
            with Inquiry(self._config.kafka) as inquiry:
                return inquiry.knows_group(self._config.group_id)
        except KafkaUnavailable:
            return True

    def succeeds(self) -> None:
        """Note, before `join`, that this process was in the group already: what speaks against it now may pass."""
        self.has_joined = self._health.has_heard = True

    def _make_observer(self) -> Observer:
        return Observer(self._config, self._place, self._observe, self._on_error)

    def _make_producer(self) -> Producer:
        return make_producer(self._config.producer_settings())

    def _make_consumer(self) -> Consumer:
        return make_consumer(self._config.consumer_settings() | {"error_cb": self._connection.on_error})

    def _subscribe(self) -> None:
        handlers = {"on_assign": self._on_assign, "on_revoke": self._on_revoke, "on_lost": self._on_lost}
        self._consumer.subscribe([self._config.topic], **handlers)

    def run_once(self) -> None:
        """Write the signal that is due, and read one message or wait a moment for it.

        Raises ClientBroken if its client has failed, and another OutboxError if this member can never lead: the group
        or the topic refuses it.
        """
        if self._absence is not None:
            self._stay_out(self._absence)
            return
        self._write()
        # Any question makes librdkafka's main thread look whether a group heartbeat or a join is due. Left alone it
        # looks every 500 ms, whatever `heartbeat.interval.ms` says: a standby took up to 850 ms to learn of a
        # hand-over, and group heartbeats came too late for the session timeout to be trusted.
        self._consumer.assignment()
        wait = _LONGEST_WAIT_SECONDS if self._ownership is None else self._ownership.wait_seconds(now())
        message = self._consumer.poll(min(_LONGEST_WAIT_SECONDS, wait))
        self._producer.poll(0)
        if self._ownership is None:
            self._observer.poll(self._position)
        if message is None:
            self._on_caught_up()
        elif (error := message.error()) is not None:
            self._on_error(error)
        else:
            self._read(message)
        self._health.probe(self._producer)
        self._leave_if_unable()
        if self._ownership is None and self._absence is None and self._health.may_rejoin():
            # The client divides the partitions by what one broker knows. If that did not know a new leader topic yet,
            # no member has its partition, and Kafka finds the group in order. Or the request to join was lost with its
            # connection: the client waits for its answer for `max.poll.interval.ms`, so another client has to ask.
            logger.info("%s: no leader is heard; joins %s anew", self._config.name, self._config.group_id)
            self._renew_beside_group()
            self._join_anew()

    def _join_anew(self) -> None:
        """Join the group by a new client."""
        try:
            another = self._make_consumer()
        except KafkaUnavailable:  # what it needs is away, with Kafka perhaps
            self._consumer.unsubscribe()
        else:
            self._consumer.close()
            self._consumer = another
        self._subscribe()

    def _renew_beside_group(self) -> None:
        """Read and write by new clients."""
        try:
            producer, observer = self._make_producer(), self._make_observer()
        except KafkaUnavailable:
            return
        self._forget_unsent()
        for close in (self._producer.close, self._observer.close):
            end_client(close)
        self._producer, self._observer = producer, observer

    def step_down(self, reason: str, is_able: Callable[[], bool]) -> None:
        """Hand leadership over, if held, and stay out of the group until `is_able`, or until nobody leads.

        Out of the group already, it stays out for this reason instead.
        """
        question = AbilityQuestion(f"neli-{self._config.group_id}-able", is_able)
        self._leave(SteppedDown(reason, self._session, question))

    @property
    def _session(self) -> float:
        return self._config.session_timeout.total_seconds()

    def _leave_if_unable(self) -> None:
        ownership, at = self._ownership, now()
        leads = ownership is not None and ownership.leadership is not None
        self._led_since = (self._led_since or at) if leads else None
        # A lease that ends by itself as soon as it begins is none to work by.
        leads_for_long = self._led_since is not None and at - self._led_since >= self._session
        if ownership is None or leads_for_long or ownership.hears_rival:
            self._able_at = at
        elif leads:
            return
        elif at - self._able_at > _SESSIONS_UNABLE * self._session:
            cause = self._health.last_error
            reason = f"it had the partition and could not lead for {at - self._able_at:.0f} s"
            reason += f" ({cause})" if cause else ""
            lease = self._config.heartbeat_timeout.total_seconds()
            self._leave(UnableToLead(reason, self._session, lease, self._send_look))

    def _leave(self, absence: Absence) -> None:
        """Leave the group for a time, after a hand-over, so that the coordinator gives the partition to another.

        Out of the group already, only the reason changes.
        """
        before, name, group = self._absence, self._config.name, self._config.group_id
        told = name, group, absence.reason, absence.condition
        if before is not None:
            if before.condition != absence.condition:
                logger.warning("%s stays out of leader group %s: %s; comes back when %s", *told)
            before.end()
        else:
            logger.warning("%s leaves leader group %s: %s; comes back when %s", *told)
            self._hand_over()
            self._consumer.unsubscribe()  # which the next polls carry out
            self._left_at = now()
        absence.begins(self._left_at)
        self._absence = absence

    def _stay_out(self, absence: Absence) -> None:
        """Read beside the group, and join it again when there is a reason."""
        message = self._consumer.poll(_LONGEST_WAIT_SECONDS)
        if message is not None and (error := message.error()) is not None:
            self._on_error(error)
        self._producer.poll(0)
        self._observer.poll(self._position)
        self._health.probe(self._producer)
        news = absence.news(now(), self._health.heard_at)
        if news:
            logger.info(
                "%s joins leader group %s again after %.0f s: %s",
                *(self._config.name, self._config.group_id, now() - self._left_at, news),
            )
            self._end_absence()
            self._join_anew()

    def _end_absence(self) -> None:
        if self._absence is not None:
            self._absence.end()
        self._absence = None
        self._able_at = now()
        self._health.joined()

    def close(self) -> None:
        """Hand leadership over, if held, and leave the group."""
        self._hand_over()
        self._end_absence()
        # Without a partition librdkafka's close alone would not leave the group.
        for step in (self._consumer.unsubscribe, self._consumer.close, self._observer.close):
            with suppress(KafkaException, RuntimeError):
                step()
        del self._producer

    def lose(self, reason: str) -> None:
        """Give leadership up without a hand-over."""
        ownership = self._ownership
        fenced = None if ownership is None else ownership.end(reason)
        self._end_ownership()
        self._notify_of(fenced)

    def _write(self) -> None:
        ownership = self._ownership
        if ownership is None:
            return
        self._notify_of(ownership.expire(now()))
        signal = ownership.next_signal(now())
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
                self._health.on_refused(error.args[0])
            self._producer.poll(0)

    def _look(self) -> None:
        """Write a look, again while that fails in passing, and read from some messages before it on.

        Raises LeaderTopicError if it is refused for good.
        """
        give_up_at = now() + _FIRST_WRITE_SECONDS
        while now() < give_up_at:
            error, offset = self._write_through(encode_look(self._config.name, self._config.contest), give_up_at)
            if error is not None and is_lasting(error):
                raise LeaderTopicError(why_refused(error, self._config))
            if error is None and offset is not None:
                self._joined_at, self._position = offset, max(0, offset - _LOOK_BACK)
                return
            time.sleep(_LONGEST_WAIT_SECONDS)

    def _send_look(self, look: Look, *, anew: bool) -> None:
        """Write a look without waiting for it; one that is refused is an answer, too."""
        if anew:
            self._renew_beside_group()

        def note(error: KafkaError | None, message: Message) -> None:
            self._on_delivery(error, message)
            if error is None:
                look.acknowledged(message.offset())

        self._forget_unsent()
        value = encode_look(self._config.name, self._config.contest)
        with suppress(BufferError):
            try:
                self._producer.produce(self._place.topic, value, partition=self._place.partition, on_delivery=note)
            except KafkaException as error:
                self._health.on_refused(error.args[0])

    def _write_through(self, value: bytes, give_up_at: float) -> tuple[KafkaError | None, int | None]:
        """Write a message and wait until Kafka has it; return the error, or its offset."""
        outcome: list[tuple[KafkaError | None, int | None]] = []
        try:
            self._producer.produce(
                self._place.topic,
                value,
                partition=self._place.partition,
                on_delivery=lambda error, message: outcome.append((error, message.offset())),
            )
        except KafkaException as error:  # the topic was deleted, say
            return error.args[0], None
        except BufferError:
            return None, None
        while not outcome and now() < give_up_at:
            self._producer.poll(_LONGEST_WAIT_SECONDS)
        self._forget_unsent()
        return outcome[0] if outcome else (None, None)

    def _observe(self, message: Message) -> None:
        """Take in a message beside the partition's owner."""
        if self._absence is not None:
            self._absence.read(message.offset() or 0)
        signal = self._signal(message)
        if signal is None or self._config.contest.includes(signal.contest):
            self._predecessor.observe(self._position - 1, signal, now())

    def _signal(self, message: Message) -> Signal | None:
        """Return the signal of the next message, None for noise."""
        signal, offset = signal_in(message), message.offset() or 0
        if self._position < 0:
            self._predecessor.suspect(now())  # what lies before it is not read
        elif offset < self._position:
            self._joined_at = 0  # the topic was made anew: its offsets begin again
            self._able_at = now()  # and everybody claims anew, so nobody else would lead sooner
            self._predecessor.suspect(now())  # perhaps more than once, if we were suspended, and somebody led between
        self._position = offset + 1
        if offset >= self._joined_at:
            if self._is_anew:
                self._is_anew = False
                self._predecessor.suspect(now())
            self._health.on_signal(signal)
            return signal
        is_old = message.timestamp()[1] < (time.time() - _LONG_AGO_SECONDS) * 1000
        if is_old or (signal is not None and self._config.contest.includes(signal.contest)):
            self._is_anew = False
        return None if is_old else signal  # of a leader that is gone for certain

    def _read(self, message: Message) -> None:
        self._connection.on_ok()
        ownership = self._ownership
        if ownership is None or message.partition() != self._place.partition:
            return
        signal = self._signal(message)
        offset = self._position - 1
        self._notify_of(ownership.observe(offset, signal, now()))
        _, end = self._consumer.get_watermark_offsets(self._place, cached=True)
        if offset + 1 >= end:  # on a topic that others share there may always be something to read
            self._on_caught_up()

    def _on_caught_up(self) -> None:
        if self._ownership is not None:
            self._ownership.on_caught_up(now())

    def _notify_of(self, event: Event | None) -> None:
        if event is not None:
            self._notify(event)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.has_joined = True
        mine = [place for place in partitions if place.partition == self._place.partition]
        others = [TopicPartition(place.topic, place.partition, OFFSET_END) for place in partitions if place not in mine]
        consumer.incremental_assign([self._next(place) for place in mine] + others)
        if others:
            consumer.pause(others)
            self._connection.on_width(1 + max(place.partition for place in partitions))
        if mine and self._absence is None:  # else it was on its way when we left, and is revoked next
            logger.debug("%s owns %s[%d]", self._config.name, self._place.topic, self._place.partition)
            self._observer.pause()
            self._ownership = Ownership(
                self._config.name,
                self._predecessor,
                timeout=self._config.heartbeat_timeout.total_seconds(),
                interval=self._config.heartbeat_interval.total_seconds(),
                contest=self._config.contest,
            )
            self._write()

    def _next(self, place: TopicPartition) -> TopicPartition:
        """Return the partition with the offset to read on from: the claim written next is read for certain."""
        if self._position >= 0:
            return TopicPartition(place.topic, place.partition, self._position)
        try:
            _, end = self._consumer.get_watermark_offsets(place, timeout=_END_OFFSET_TIMEOUT_SECONDS)
        except KafkaException:
            end = OFFSET_END  # as it is when reading begins: perhaps after the claim, which is then repeated
        return TopicPartition(place.topic, place.partition, end)

    def _on_revoke(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        if any(place.partition == self._place.partition for place in partitions):
            self._hand_over()

    def _on_lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        if any(place.partition == self._place.partition for place in partitions):
            self.lose("the partition was lost: the group has gone on without us")

    def _hand_over(self) -> None:
        """Wait for the work in flight; the partition stays ours, and the lease can be read as it runs out."""
        ownership = self._ownership
        if ownership is None:
            return
        self._notify_of(ownership.expire(now()))
        lease = ownership.leadership
        if lease is not None:
            self._barrier(lease)
            self.is_handing_over = True
            self._notify(LeaderRevoked(lease.leader_id, lease.term))
            self.is_handing_over = False
        self._end_ownership()
        resignation = ownership.resignation(now())
        if resignation is not None:
            self._write_through(encode(resignation), now() + _RESIGN_SECONDS)

    def _end_ownership(self) -> None:
        self._ownership = None
        self._forget_unsent()
        self._health.forget_refusal()

    def _forget_unsent(self) -> None:
        """Drop messages that wait for the broker: a late claim would depose a successor for nothing."""
        self._producer.purge(blocking=False)
        self._producer.poll(0)

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self._health.on_accepted()
        elif error.code() not in PURGED:
            self._health.on_refused(error)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._MAX_POLL_EXCEEDED:  # noqa: SLF001  confluent's public constant
            logger.warning("%s blocked for longer than max.poll.interval.ms and left the group", self._config.name)
            return
        refused = refusal(error, self._config)
        if refused is not None and not self.has_joined:
            raise refused
        if error.fatal():
            broken = ClientBroken if self.has_joined else OutboxError
            raise broken(f"leader group {self._config.group_id!r}: the Kafka client gave up: {error.str()}")
        self._connection.on_hindrance(str(refused or error.str()))
