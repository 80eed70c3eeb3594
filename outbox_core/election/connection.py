"""What the group member is told about the cluster: news for the log, said once, or the end of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox_core.election.leadership import now
from outbox_core.errors import GroupRefused, InvalidConfig, LeaderTopicError, OutboxError
from outbox_core.kafka import KafkaError, KafkaException, Producer, grant

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_TOPIC_FORBIDDEN = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}

_PROBE_SECONDS = 0.5
_PROBE_INTERVAL_SECONDS = 1.0


class Connection:
    """Logs once when the cluster goes away and once when it is back; librdkafka reconnects by itself.

    Args:
        config: The settings.

    Attributes:
        answered_at: When the cluster last answered, on the clock of `now`.
        complaint: What the client complained of since, '' for nothing.
    """

    def __init__(self, config: NeliConfig) -> None:
        self._name = config.name
        self._topic = config.topic
        # A probe holds up the heartbeats.
        self._probe_seconds = min(_PROBE_SECONDS, config.heartbeat_timeout.total_seconds() / 5)
        self._is_lost = False
        self._probe_at = 0.0
        self.answered_at = now()
        self.complaint = ""

    def complain(self, error: KafkaError) -> None:
        """Take note of an error of the client; called for each attempt to connect."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            if not self._is_lost:
                self.complaint = error.str()
            return
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "%s: no Kafka broker can be reached (%s); trying on", self._name, self.complaint or error.str()
            )

    def hindered(self, reason: str) -> None:
        """Take note of an error in the place of a message."""
        if reason != self.complaint:
            self.complaint = reason
            logger.warning("%s: leader election is hindered: %s; trying on", self._name, reason)

    def look(self, producer: Producer, *, in_doubt: bool) -> None:
        """See now and then whether the cluster answers, if it is lost or nothing has been heard for a while.

        The producer asks, as a broker answers what comes on a consumer's connection only after the fetch under way,
        which may wait for longer than a probe.
        """
        if not (self._is_lost or in_doubt) or now() < self._probe_at:
            return
        try:
            producer.list_topics(self._topic, timeout=self._probe_seconds)
        except KafkaException as error:
            self.complaint = self.complaint or error.args[0].str()
        else:
            self._is_back()
        self._probe_at = now() + _PROBE_INTERVAL_SECONDS

    def well(self) -> None:
        """Take note that the cluster does what it is asked."""
        self.answered()
        if not self._is_lost:  # else it is a message that had come before
            self.complaint = ""

    def answered(self) -> None:
        """Take note that the cluster answers."""
        self.answered_at = now()

    def _is_back(self) -> None:
        self.answered()
        if self._is_lost:
            logger.info("%s: Kafka is back", self._name)
            self._is_lost = False
            self.complaint = ""


def refusal(error: KafkaError, config: NeliConfig) -> OutboxError | None:
    """Return what a consumer's error means, if it will not pass unless somebody mends it.

    GroupRefused: other assignors in the group, or no right to join it. LeaderTopicError: no right to read the leader
    topic. InvalidConfig: a session timeout outside the broker's bounds.
    """
    if error.code() in _TOPIC_FORBIDDEN:
        return LeaderTopicError(why_refused(error, config))
    return _group_refusal(error, f"leader group {config.group_id!r}", config)


def is_lasting(error: KafkaError) -> bool:
    """Whether what the leader topic refuses will be refused again unless somebody mends it."""
    return error.code() in _TOPIC_FORBIDDEN or error.code() in _ADVICE


def why_refused(error: KafkaError, config: NeliConfig) -> str:
    """What keeps the leader topic from being written or read, and what to do."""
    is_right = error.code() in _TOPIC_FORBIDDEN
    advice = grant("READ and WRITE", config.kafka) if is_right else _ADVICE.get(error.code(), "")
    return f"leader topic {config.topic!r} cannot be used: {error.str()}" + (f"; {advice}" if advice else "")


_ADVICE = {
    KafkaError.INVALID_RECORD: "it must have cleanup.policy=delete, as its messages have no key",
    KafkaError.POLICY_VIOLATION: "the brokers' policy must let messages of about 300 bytes without a key pass",
    KafkaError.MSG_SIZE_TOO_LARGE: "its max.message.bytes must be 4096 at least",
    KafkaError.INVALID_MSG_SIZE: "its max.message.bytes and segment.bytes must be 4096 at least",
}


def _group_refusal(error: KafkaError, group: str, config: NeliConfig) -> OutboxError | None:
    match error.code():
        case KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            return GroupRefused(
                f"{group} has members of another kind, with other assignors than cooperative-sticky. If they are "
                "goharvest's, stop all its processes first; one that was killed stays in the group for up to 15 s "
                "(three heartbeatTimeouts). Do not choose another leaderGroupID (leader_group_id) while they run: "
                "both would publish the same table"
            )
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            return GroupRefused(f"{group} cannot be joined: {error.str()}; {grant('READ', config.kafka)}")
        case KafkaError.GROUP_MAX_SIZE_REACHED | KafkaError.INVALID_GROUP_ID:
            return GroupRefused(f"{group} cannot be joined: {error.str()}")
        case KafkaError.INVALID_SESSION_TIMEOUT:
            return InvalidConfig(
                f"session.timeout.ms: the broker refuses {config.session_timeout.total_seconds():g} s; its bounds are "
                "group.min.session.timeout.ms and group.max.session.timeout.ms"
            )
    return None
