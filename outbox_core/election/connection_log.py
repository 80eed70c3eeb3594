"""The cluster as the group member sees it: log lines for changes of state, and errors for lasting refusals."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from outbox_core.election.lease import now
from outbox_core.errors import GroupRefused, InvalidConfig, LeaderTopicError, OutboxError
from outbox_core.kafka.clients import KafkaError, KafkaException, Producer
from outbox_core.kafka.errors import NO_SUCH_PARTITION, TOPIC_FORBIDDEN, grant
from outbox_core.kafka.topics import ensure_leader_topic

if TYPE_CHECKING:
    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_PROBE_SECONDS = 0.5
_PROBE_INTERVAL_SECONDS = 1.0
_SILENT_PROBES = 2
_MOST_TOLD = 50


class ConnectionLog:
    """Log lines when the cluster goes away and when it is back."""

    def __init__(self, config: NeliConfig) -> None:
        self._name = config.name
        self._topic = config.topic
        # A probe holds up the heartbeats.
        self._probe_seconds = min(_PROBE_SECONDS, config.heartbeat_timeout.total_seconds() / 5)
        self._config = config
        self._suspicion = ""  # of the member's client, which counts brokers that it does not talk to as down
        self._is_lost = False
        self._failed_probes = 0  # in a row
        self._probe_at = 0.0
        self._width = 1  # of the leader topic, as far as the log tells
        self._maker: threading.Thread | None = None  # of the leader topic
        self._why_unmade = ""  # by that thread
        self.answered_at = now()
        self.last_error = ""  # since the last answer
        self._told: set[str] = set()  # the hindrances since then

    def on_error(self, error: KafkaError) -> None:
        """Note an error of the client, which reports one for each attempt to connect."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            if not self._is_lost:
                self.last_error = error.str()
            return
        self._suspicion = error.str()

    def on_hindrance(self, reason: str) -> None:
        """Note an error that came instead of a message."""
        self.last_error = reason
        if reason not in self._told:  # two may take turns
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told.add(reason)
            logger.warning("%s: leader election is hindered: %s; trying on", self._name, reason)

    def probe(self, producer: Producer, *, in_doubt: bool) -> None:
        """Ask the cluster for metadata now and then while it is suspected to be lost, or `in_doubt`."""
        if not (self._suspicion or in_doubt) or now() < self._probe_at:
            return
        try:
            # Not the consumer: a broker answers it only after the fetch under way, which may take longer than a probe.
            found = producer.list_topics(self._topic, timeout=self._probe_seconds).topics[self._topic]
        except KafkaException as error:
            self.last_error = self.last_error or error.args[0].str()
            self._on_silence()
        else:
            self.on_answer()
            self._on_found(found.error, len(found.partitions))
        self._probe_at = now() + _PROBE_INTERVAL_SECONDS

    def _on_silence(self) -> None:
        self._failed_probes += 1
        # One probe may have gone to the one broker that does not answer.
        if self._suspicion and not self._is_lost and self._failed_probes >= _SILENT_PROBES:
            self._is_lost = True
            logger.warning("%s: no Kafka broker can be reached (%s); trying on", self._name, self.last_error)

    def _on_found(self, error: KafkaError | None, partitions: int) -> None:
        self._suspicion, self._failed_probes = "", 0
        if self._is_lost:
            logger.info("%s: Kafka is back", self._name)
            self._is_lost = False
            self._forget_errors()
        if error is None:
            self.on_width(partitions)
            return
        is_missing = error.code() in NO_SUCH_PARTITION
        why_unmade = self._why_unmade if is_missing else ""
        self.on_hindrance(why_unmade or f"leader topic {self._topic!r}: {error.str()}")
        if is_missing:
            self.on_missing_topic()

    def on_missing_topic(self) -> None:
        """Have the leader topic made anew, on a thread of its own: heartbeats must not wait for that.

        Nobody else does, or the brokers do it by themselves, with more partitions.
        """
        if self._maker is None or not self._maker.is_alive():
            self._maker = threading.Thread(target=self._make_topic, name=f"neli-{self._topic}-topic", daemon=True)
            self._maker.start()

    def _make_topic(self) -> None:
        try:
            ensure_leader_topic(self._config.kafka, self._topic)
        except OutboxError as error:
            self._why_unmade = str(error)
        else:
            self._why_unmade = ""

    def on_width(self, partitions: int) -> None:
        """Note the leader topic's number of partitions, and warn of more than one."""
        if partitions > self._width:
            logger.warning(
                "leader topic %r has %d partitions: every process that joins or leaves may move leadership; give it "
                "one partition (if nothing else uses it, delete it: it is made anew, and a leader is elected anew)",
                self._topic,
                partitions,
            )
        self._width = max(1, partitions)

    def on_ok(self) -> None:
        """Note that the cluster did what it was asked."""
        self.on_answer()
        if not self._is_lost:  # else it is a message that had come before
            self._forget_errors()

    def _forget_errors(self) -> None:
        self.last_error = ""
        self._told.clear()

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
