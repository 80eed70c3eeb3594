"""The cluster as the group member sees it: log lines for changes of state, and errors for lasting refusals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox_core.election.lease import now
from outbox_core.errors import GroupRefused, InvalidConfig, LeaderTopicError, OutboxError
from outbox_core.kafka.clients import KafkaError, KafkaException, Producer
from outbox_core.kafka.errors import TOPIC_FORBIDDEN, grant

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_PROBE_SECONDS = 0.5
_PROBE_INTERVAL_SECONDS = 1.0


class ConnectionLog:
    """Log lines when the cluster goes away and when it is back."""

    def __init__(self, config: NeliConfig) -> None:
        self._name = config.name
        self._topic = config.topic
        # A probe holds up the heartbeats.
        self._probe_seconds = min(_PROBE_SECONDS, config.heartbeat_timeout.total_seconds() / 5)
        self._is_lost = False
        self._probe_at = 0.0
        self.answered_at = now()
        self.last_error = ""  # since the last answer

    def on_error(self, error: KafkaError) -> None:
        """Note an error of the client, which reports one for each attempt to connect."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            if not self._is_lost:
                self.last_error = error.str()
            return
        if not self._is_lost:
            self._is_lost = True
            reason = self.last_error or error.str()
            logger.warning("%s: no Kafka broker can be reached (%s); trying on", self._name, reason)

    def on_hindrance(self, reason: str) -> None:
        """Note an error that came instead of a message."""
        if reason != self.last_error:
            self.last_error = reason
            logger.warning("%s: leader election is hindered: %s; trying on", self._name, reason)

    def probe(self, producer: Producer, *, in_doubt: bool) -> None:
        """Ask the cluster for metadata now and then while it is lost or `in_doubt`."""
        if not (self._is_lost or in_doubt) or now() < self._probe_at:
            return
        try:
            # Not the consumer: a broker answers it only after the fetch under way, which may take longer than a probe.
            found = producer.list_topics(self._topic, timeout=self._probe_seconds).topics[self._topic]
        except KafkaException as error:
            self.last_error = self.last_error or error.args[0].str()
        else:
            self.on_answer()
            if self._is_lost:
                logger.info("%s: Kafka is back", self._name)
                self._is_lost = False
                self.last_error = ""
            if found.error is not None:
                self.on_hindrance(f"leader topic {self._topic!r}: {found.error.str()}")
        self._probe_at = now() + _PROBE_INTERVAL_SECONDS

    def on_ok(self) -> None:
        """Note that the cluster did what it was asked."""
        self.on_answer()
        if not self._is_lost:  # else it is a message that had come before
            self.last_error = ""

    def on_answer(self) -> None:
        """Note that the cluster answers."""
        self.answered_at = now()


def refusal(error: KafkaError, config: NeliConfig) -> OutboxError | None:
    """Return a consumer's error as GroupRefused, LeaderTopicError or InvalidConfig, None if it may pass by itself."""
    group = f"leader group {config.group_id!r}"
    match error.code():
        case code if code in TOPIC_FORBIDDEN:
            return LeaderTopicError(why_refused(error, config))
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


_ADVICE = {
    KafkaError.INVALID_RECORD: "it must have cleanup.policy=delete, as its messages have no key",
    KafkaError.POLICY_VIOLATION: "the brokers' policy must let messages of about 300 bytes without a key pass",
    KafkaError.MSG_SIZE_TOO_LARGE: "its max.message.bytes must be 4096 at least",
    KafkaError.INVALID_MSG_SIZE: "its max.message.bytes and segment.bytes must be 4096 at least",
}


def is_lasting(error: KafkaError) -> bool:
    """Tell whether the leader topic will refuse our messages until an operator acts."""
    return error.code() in TOPIC_FORBIDDEN or error.code() in _ADVICE


def why_refused(error: KafkaError, config: NeliConfig) -> str:
    """Return why the leader topic refuses us, with the remedy."""
    is_right = error.code() in TOPIC_FORBIDDEN
    advice = grant("READ and WRITE", config.kafka) if is_right else _ADVICE.get(error.code(), "")
    return f"leader topic {config.topic!r} cannot be used: {error.str()}" + (f"; {advice}" if advice else "")
