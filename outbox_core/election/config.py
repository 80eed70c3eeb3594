"""Settings of an elector, validated once, and the client settings that follow from them.

No successor may be elected while a cut-off leader's lease still runs. The broker gives the partition away
`session.timeout.ms` after the last group heartbeat it got, which may be `heartbeat.interval.ms` older than the
heartbeat that last renewed the lease. So a session lasts at least the lease, that interval and a margin for delays
together.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from outbox_core.election.messages import LONGEST_GROUP, LONGEST_OUTBOX, Contest
from outbox_core.errors import InvalidConfig
from outbox_core.topic_names import must_be_legal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_core.config import HarvestConfig

_SESSION_MARGIN = timedelta(seconds=0.5)
_SHORTEST_SESSION = timedelta(seconds=6)  # the least that brokers accept by default
_SHORTEST_HEARTBEAT_TIMEOUT = timedelta(seconds=0.5)
_GROUP_HEARTBEAT = timedelta(milliseconds=200)
_LONGEST_GROUP_HEARTBEAT = timedelta(milliseconds=500)
_MAX_POLL_INTERVAL = timedelta(minutes=5)
_LONGEST_SOCKET_TIMEOUT_MS = 300_000  # librdkafka's

_ONLY_VALUE = {
    "group.protocol": ("classic", "the session timeout must be the client's to choose"),
    "partition.assignment.strategy": ("cooperative-sticky", "members that join must not move leadership"),
}
_PRODUCER_OWN = {
    "transactional.id",
    "enable.idempotence",
    "enable.gapless.guarantee",
    "acks",
    "request.required.acks",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "linger.ms",
    "queue.buffering.max.ms",
    "retries",
    "message.send.max.retries",
    "request.timeout.ms",
}
_GROUP_ONLY = {
    "group.id",
    "group.protocol",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NeliConfig:
    """The settings of an elector.

    Attributes:
        kafka: librdkafka settings for all clients, at least `bootstrap.servers`. May set `session.timeout.ms` and
            `heartbeat.interval.ms`, within the bounds below.
        group_id: the consumer group of all processes that contend with each other.
        topic: the leader topic; empty for `<group_id>.neli`. Made with one partition if it is missing.
        name: of this process in logs and messages, for people; empty for host name and process ID.
        heartbeat_timeout: the time for which a heartbeat renews the lease; at least 0.5 s.
        min_poll_interval: heartbeats are no closer than this, unless there were fewer than five in `heartbeat_timeout`.
        role: of several leaderships on one topic: role j belongs to partition j modulo the number of partitions.
        outbox: identity of the outbox, for all members to compare; '' for none.
        server_id: of the database server that has it (`OutboxStore.server_id`), compared likewise; '' if unknown.

    Raises:
        InvalidConfig: naming the setting.
    """

    kafka: Mapping[str, Any] = field(repr=False)
    group_id: str
    topic: str = ""
    name: str = ""
    heartbeat_timeout: timedelta = timedelta(seconds=5)
    min_poll_interval: timedelta = timedelta(milliseconds=100)
    role: int = 0
    outbox: str = ""
    server_id: str = ""

    def __post_init__(self) -> None:
        if not self.group_id:
            raise InvalidConfig("group_id: must not be empty")
        if len(self.group_id) > LONGEST_GROUP:
            raise InvalidConfig(f"group_id: must have {LONGEST_GROUP} characters at most, has {len(self.group_id)}")
        object.__setattr__(self, "kafka", dict(self.kafka))
        object.__setattr__(self, "topic", self.topic or f"{self.group_id}.neli")
        object.__setattr__(self, "name", self.name or f"{socket.gethostname()}-{os.getpid()}")
        self._check_topic()
        self._check_times()
        self._check_kafka()

    @classmethod
    def of(cls, config: HarvestConfig, identity: str, server_id: str) -> Self:
        """Return the settings for the harvesters of one outbox, from its `OutboxStore.check` and `server_id`."""
        group_id, topic = config.leader_names(identity)
        return cls(
            kafka=config.neli_settings(group_id),
            group_id=group_id,
            topic=topic,
            name=config.name,
            heartbeat_timeout=config.limits.heartbeat_timeout,
            min_poll_interval=config.limits.min_poll_interval,
            outbox=identity,
            server_id=server_id,
        )

    @property
    def contest(self) -> Contest:
        """The outbox of the contest, as messages name it."""
        return Contest(self.group_id, self.outbox[:LONGEST_OUTBOX], self.server_id)

    @property
    def heartbeat_interval(self) -> timedelta:
        """Time between two heartbeats on the leader topic."""
        return min(self.heartbeat_timeout / 5, max(self.min_poll_interval, self.heartbeat_timeout / 20))

    @property
    def group_heartbeat_interval(self) -> timedelta:
        """Time between two heartbeats to the group's coordinator, `heartbeat.interval.ms`."""
        return self._milliseconds("heartbeat.interval.ms", _GROUP_HEARTBEAT)

    @property
    def session_timeout(self) -> timedelta:
        """Silence after which the coordinator gives the partition to another process, `session.timeout.ms`."""
        return self._milliseconds("session.timeout.ms", max(_SHORTEST_SESSION, self._shortest_session))

    def consumer_settings(self) -> dict[str, Any]:
        """Return librdkafka settings of the group member."""
        poll_interval = self._milliseconds("max.poll.interval.ms", max(_MAX_POLL_INTERVAL, self.session_timeout))
        defaults = {
            "socket.timeout.ms": self._socket_timeout,
            "reconnect.backoff.max.ms": 1000,
            "fetch.error.backoff.ms": 100,
        }
        owned = {
            "group.id": self.group_id,
            "group.protocol": "classic",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": _ms(self.session_timeout),
            "heartbeat.interval.ms": _ms(self.group_heartbeat_interval),
            "max.poll.interval.ms": _ms(poll_interval),
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": False,
            "auto.offset.reset": "earliest",  # a position that is gone: all that is there may concern us
            # A stranger's open transaction on the topic must not hide our heartbeats.
            "isolation.level": "read_uncommitted",
            "fetch.min.bytes": 1,
        }
        return defaults | self._kafka_without(_PRODUCER_OWN) | owned

    def producer_settings(self) -> dict[str, Any]:
        """Return librdkafka settings for heartbeats: sent at once, and once, as the next one follows soon."""
        timeout = _ms(self.heartbeat_timeout)
        defaults = {"socket.timeout.ms": self._socket_timeout, "reconnect.backoff.max.ms": 1000}
        owned = {
            "acks": "all",
            "linger.ms": 0,
            "retries": 0,
            "enable.idempotence": False,
            "allow.auto.create.topics": False,  # a topic that was deleted would come back with the brokers' defaults
            "message.timeout.ms": timeout,
            "request.timeout.ms": self._socket_timeout,
            # Brokers count a client's quota by its ID: records over it must not hold back heartbeats.
            "client.id": f"{self.kafka.get('client.id', self.name)}-election",
        }
        return defaults | self._kafka_without(_PRODUCER_OWN | _GROUP_ONLY) | owned

    @property
    def _socket_timeout(self) -> int:
        """Milliseconds after which a silent connection is replaced: as soon as the lease is gone."""
        return min(max(1000, _ms(self.heartbeat_timeout)), _LONGEST_SOCKET_TIMEOUT_MS)

    @property
    def _shortest_session(self) -> timedelta:
        return self.heartbeat_timeout + self.group_heartbeat_interval + _SESSION_MARGIN

    def _check_topic(self) -> None:
        try:
            must_be_legal(self.topic)
        except ValueError as error:
            raise InvalidConfig(f"topic: {self.topic!r} {error}") from None
        if self.role < 0:
            raise InvalidConfig(f"role: must not be negative, is {self.role}")

    def _check_times(self) -> None:
        if self.heartbeat_timeout < _SHORTEST_HEARTBEAT_TIMEOUT:
            raise InvalidConfig(
                f"heartbeat_timeout: must be at least {_SHORTEST_HEARTBEAT_TIMEOUT.total_seconds():g} s, "
                f"is {self.heartbeat_timeout.total_seconds():g} s"
            )
        if self.min_poll_interval <= timedelta(0):
            raise InvalidConfig("min_poll_interval: must be positive")
        if not timedelta(0) < self.group_heartbeat_interval <= _LONGEST_GROUP_HEARTBEAT:
            raise InvalidConfig(
                f"heartbeat.interval.ms: must be from 1 to {_ms(_LONGEST_GROUP_HEARTBEAT)}, is "
                f"{_ms(self.group_heartbeat_interval)}; a longer one delays every hand-over"
            )
        if self.session_timeout < self._shortest_session:
            raise InvalidConfig(
                f"session.timeout.ms: {_ms(self.session_timeout)} is too short for a heartbeat_timeout of "
                f"{self.heartbeat_timeout.total_seconds():g} s: with it a successor could be elected while the lease "
                f"of a leader that was cut off still runs; use at least {_ms(self._shortest_session)} "
                "(heartbeat_timeout + heartbeat.interval.ms + 500 ms)"
            )

    def _check_kafka(self) -> None:
        for name, (value, reason) in _ONLY_VALUE.items():
            given = str(self.kafka.get(name, value)).strip().lower()
            if given != value:
                raise InvalidConfig(f"{name}: must be {value} for leader election, is {given}: {reason}")
        if self.kafka.get("group.instance.id"):
            raise InvalidConfig(
                "group.instance.id: static membership is not possible for leader election, as a member that stops "
                "would keep the partition until its session ends; remove it"
            )
        if self.kafka.get("group.id", self.group_id) != self.group_id:
            raise InvalidConfig(
                f"group.id: {self.kafka['group.id']!r} contradicts group_id {self.group_id!r}; remove it"
            )

    def _milliseconds(self, name: str, default: timedelta) -> timedelta:
        """Return a duration of the Kafka settings, which may be numbers or text."""
        value = self.kafka.get(name)
        if value is None:
            return default
        try:
            return timedelta(milliseconds=int(value))
        except (TypeError, ValueError, OverflowError):
            raise InvalidConfig(f"{name}: must be a whole number of milliseconds, is {value!r}") from None

    def _kafka_without(self, names: set[str]) -> dict[str, Any]:
        return {name: value for name, value in self.kafka.items() if name not in names}


def _ms(duration: timedelta) -> int:
    return math.ceil(duration / timedelta(milliseconds=1))
