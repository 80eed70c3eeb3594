"""What the group member is told about the cluster: news for the log, said once, or the end of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox_core.election.leadership import now
from outbox_core.errors import GroupRefused, InvalidConfig, LeaderTopicError, OutboxError
from outbox_core.kafka import Consumer, KafkaError, KafkaException

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

TOPIC_FORBIDDEN = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}

_PROBE_SECONDS = 0.05
_PROBE_INTERVAL_SECONDS = 1.0


class Connection:
    """Logs once when the cluster goes away and once when it is back; librdkafka reconnects by itself.

    Args:
        name: Of the process, for the log.
        topic: Asked for to see whether the cluster is back.
    """

    def __init__(self, name: str, topic: str) -> None:
        self._name = name
        self._topic = topic
        self._is_lost = False
        self._complaint = ""
        self._probe_at = 0.0

    def complain(self, error: KafkaError) -> None:
        """Take note of an error of the client; called for each attempt to connect."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            if not self._is_lost:
                self._complaint = error.str()
            return
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "%s: no Kafka broker can be reached (%s); trying on", self._name, self._complaint or error.str()
            )

    def trouble(self, error: KafkaError) -> None:
        """Take note of an error in the place of a message."""
        if error.str() != self._complaint:
            self._complaint = error.str()
            logger.warning("%s: leader election is hindered: %s; trying on", self._name, error.str())

    def look(self, consumer: Consumer) -> None:
        """See now and then whether a lost cluster is back."""
        if not self._is_lost or now() < self._probe_at:
            return
        try:
            consumer.list_topics(self._topic, timeout=_PROBE_SECONDS)
        except KafkaException:
            self._probe_at = now() + _PROBE_INTERVAL_SECONDS
        else:
            self.well()

    def well(self) -> None:
        """Take note that the cluster answers."""
        if self._is_lost:
            logger.info("%s: Kafka is back", self._name)
        self._is_lost = False
        self._complaint = ""


def refuse_if_permanent(error: KafkaError, config: NeliConfig) -> None:
    """Raise what a consumer's error means if trying on cannot help.

    Raises:
        GroupRefused: other assignors in the group, or no right to join it.
        LeaderTopicError: no right to read the leader topic.
        InvalidConfig: a session timeout outside the broker's bounds.
        OutboxError: the client gave up.
    """
    if error.code() in TOPIC_FORBIDDEN:
        raise forbidden_topic(config.topic, error)
    _refuse_group(error, f"leader group {config.group_id!r}", config)
    if error.fatal():
        raise OutboxError(f"leader group {config.group_id!r}: the Kafka client gave up: {error.str()}")


def forbidden_topic(topic: str, error: KafkaError) -> LeaderTopicError:
    """The error for a leader topic that may not be read or written."""
    return LeaderTopicError(f"leader topic {topic!r} cannot be used: {error.str()}; grant READ and WRITE on it")


def _refuse_group(error: KafkaError, group: str, config: NeliConfig) -> None:
    match error.code():
        case KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            raise GroupRefused(
                f"{group} has members with other assignors than cooperative-sticky (goharvest's, perhaps); "
                "choose another group_id"
            )
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise GroupRefused(f"{group} cannot be joined: {error.str()}; grant READ on the group")
        case KafkaError.GROUP_MAX_SIZE_REACHED | KafkaError.INVALID_GROUP_ID:
            raise GroupRefused(f"{group} cannot be joined: {error.str()}")
        case KafkaError.INVALID_SESSION_TIMEOUT:
            raise InvalidConfig(
                f"session.timeout.ms: the broker refuses {config.session_timeout.total_seconds():g} s; its bounds are "
                "group.min.session.timeout.ms and group.max.session.timeout.ms"
            )
