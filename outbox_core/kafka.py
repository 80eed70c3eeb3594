"""The only importer of confluent_kafka: client factories, connection checks and topic administration.

Settings are librdkafka's own, passed through untouched; a wrong one is reported by the name the user wrote.
librdkafka's log lines go to the logger `outbox_core.kafka` at DEBUG: it repeats itself at every connection attempt,
and what matters to an operator is logged once per change of state by the parts that use the clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import (
    OFFSET_END,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewPartitions, NewTopic

from outbox_core.errors import InvalidConfig, KafkaUnavailable, LeaderTopicError, OutboxError, TrackingTopicError

if TYPE_CHECKING:
    from confluent_kafka.admin._metadata import ClusterMetadata

__all__ = [
    "OFFSET_END",
    "TIMESTAMP_NOT_AVAILABLE",
    "Consumer",
    "Inquiry",
    "KafkaConfig",
    "KafkaError",
    "KafkaException",
    "Message",
    "Producer",
    "TopicPartition",
    "check_connection",
    "ensure_leader_topic",
    "ensure_tracking_topic",
    "make_admin",
    "make_consumer",
    "make_producer",
    "partition_count",
    "topic_exists",
]

KafkaConfig = Mapping[str, Any]

_CONNECT_TIMEOUT_SECONDS = 10.0
_ATTEMPT_SECONDS = 1.0
_APPEAR_INTERVAL_SECONDS = 0.05
_LEADER_TOPIC_SETTINGS = {
    # Only the last claim and the heartbeats of the last seconds are ever read.
    "cleanup.policy": "delete",
    "retention.ms": "3600000",
    "segment.ms": "3600000",
}

_TRACKING_TOPIC_SETTINGS = {
    # Only the last manifest is ever read, and it must never expire. Manifests come in quickly: compact often.
    "cleanup.policy": "compact",
    "segment.bytes": str(16 * 2**20),
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
}

_NOTICE = 5  # of syslog's levels

_client_log = logging.getLogger(__name__)


class _DebugLogger(logging.LoggerAdapter[logging.Logger]):
    """Lowers every librdkafka log line to DEBUG."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        del level
        super().log(logging.DEBUG, msg, *args, **kwargs)


def make_producer(config: KafkaConfig) -> Producer:
    """A producer from librdkafka settings. Raises InvalidConfig for a setting librdkafka refuses."""
    producer: Producer = _make(Producer, config)
    return producer


def make_consumer(config: KafkaConfig) -> Consumer:
    """A consumer from librdkafka settings. Raises InvalidConfig for a setting librdkafka refuses."""
    consumer: Consumer = _make(Consumer, config)
    return consumer


def make_admin(config: KafkaConfig) -> AdminClient:
    """An admin client from librdkafka settings. Raises InvalidConfig for a setting librdkafka refuses."""
    admin: AdminClient = _make(AdminClient, config)
    return admin


def _make(client: Any, config: KafkaConfig) -> Any:
    settings = dict(config)
    settings.setdefault("logger", _DebugLogger(_client_log, {}))
    settings.setdefault("error_cb", _ignore_client_error)
    if client is AdminClient:
        settings.setdefault("log_level", _NOTICE)  # below, it writes a line to stderr when it is closed
    try:
        return client(settings)
    except KafkaException as error:
        raise InvalidConfig(f"Kafka settings: {error.args[0].str()}") from None
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"Kafka settings: {error}") from None


def _ignore_client_error(error: KafkaError) -> None:
    """Client-wide errors are informational: librdkafka recovers, and each caller sees its own failures."""
    _client_log.debug("librdkafka: %s", error)


class Inquiry:
    """An admin client with a deadline, which knows what librdkafka complained of while it waited.

    Args:
        config: librdkafka settings.
        timeout_seconds: For everything that is asked, together.
    """

    def __init__(self, config: KafkaConfig, timeout_seconds: float) -> None:
        self._servers = config.get("bootstrap.servers", "(bootstrap.servers is not set)")
        self._complaint = ""
        self._is_hopeless = False
        self._deadline = time.monotonic() + timeout_seconds
        self.admin = make_admin({**config, "error_cb": self._note})

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, a little more than none at least."""
        return max(0.1, self._deadline - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._deadline

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """What the cluster tells of one topic, or of all: asking for one may create it.

        Raises:
            KafkaUnavailable: naming the bootstrap servers and what librdkafka said last.
        """
        arguments = () if topic is None else (topic,)
        while True:
            try:
                return self.admin.list_topics(*arguments, timeout=min(_ATTEMPT_SECONDS, self.remaining))
            except KafkaException as error:
                self.admin.poll(0)
                if self._is_hopeless or self.is_late:
                    raise self.unavailable(error.args[0].str()) from None

    def partitions(self, topic: str) -> int:
        """Number of partitions of a topic, 0 if it is not there, or may not be seen.

        Raises:
            KafkaUnavailable: if the cluster cannot say.
        """
        while True:
            found = self.metadata().topics.get(topic)
            if found is None or (found.error and found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART):
                return 0
            if found.error is None:
                return len(found.partitions)
            if self.is_late:
                raise KafkaUnavailable(f"topic {topic!r} cannot be described: {found.error.str()}")
            time.sleep(_APPEAR_INTERVAL_SECONDS)

    def can_create(self) -> bool:
        """Whether a broker takes requests to create topics: the mock cluster names a controller that is not there."""
        cluster = self.metadata()
        return cluster.controller_id < 0 or cluster.controller_id in cluster.brokers

    def topic_setting(self, topic: str, name: str) -> str:
        """One of a topic's settings.

        Raises:
            TrackingTopicError: if it may not be read.
        """
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        answer = self.admin.describe_configs([resource], request_timeout=self.remaining)[resource]
        try:
            return str(answer.result(self.remaining + _ATTEMPT_SECONDS)[name].value)
        except (KafkaException, FutureTimeoutError) as error:
            reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
            raise TrackingTopicError(
                f"cannot read the settings of tracking topic {topic!r}: {reason}; grant DESCRIBE_CONFIGS on it"
            ) from None

    def _note(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            self._complaint = error.str()
        if error.code() == KafkaError._AUTHENTICATION:  # noqa: SLF001
            self._is_hopeless = True  # a wrong password does not become right by waiting

    def unavailable(self, reason: str) -> KafkaUnavailable:
        """The error for an answer that did not come: with what librdkafka complained of, else with the reason."""
        return KafkaUnavailable(f"cannot reach Kafka at bootstrap.servers={self._servers}: {self._complaint or reason}")


def check_connection(config: KafkaConfig, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> None:
    """See whether the cluster answers.

    Raises:
        KafkaUnavailable: naming the bootstrap servers and what librdkafka said last.
    """
    Inquiry(config, timeout_seconds).metadata()


def ensure_leader_topic(config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> int:
    """Make the leader topic with one partition if it is missing; return its number of partitions.

    A broker that cannot create topics on request (librdkafka's mock cluster) is asked for it by name, which makes it
    appear there.

    Raises:
        LeaderTopicError: if it is missing and cannot be made, or cannot be described.
        KafkaUnavailable: if the cluster does not answer.
    """
    return _ensure(Inquiry(config, timeout_seconds), _LEADER_TOPIC, topic)


def ensure_tracking_topic(
    config: KafkaConfig, topic: str, *, width: int = 1, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS
) -> None:
    """Make the tracking topic of exactly-once delivery if it is missing, and check its settings.

    Args:
        config: librdkafka settings.
        topic: its name.
        width: how many transactional.ids keep their manifests there, each on a partition of its own: 1 for a harvester,
            one for each of a relay's shards. A relay's topic gets more partitions if it has less.
        timeout_seconds: for everything together.

    Raises:
        TrackingTopicError: naming the setting that is wrong, or what keeps the topic from being made or described.
        KafkaUnavailable: if the cluster does not answer.
    """
    inquiry = Inquiry(config, timeout_seconds)
    if not inquiry.can_create():
        raise TrackingTopicError("this Kafka cluster is a mock without transactions; exactly once needs a real broker")
    partitions = _ensure(inquiry, _TRACKING_TOPIC, topic, width)
    if partitions < width:
        _widen(inquiry, _TRACKING_TOPIC, topic, width)
    elif width == 1 and partitions != 1:
        raise TrackingTopicError(
            f"tracking topic {topic!r} has {partitions} partitions, expected 1; name another tracking_topic"
        )
    policy = inquiry.topic_setting(topic, "cleanup.policy")
    if policy != "compact":
        raise TrackingTopicError(
            f"tracking topic {topic!r} has cleanup.policy={policy}, expected compact: the last manifest must not expire"
        )


def partition_count(config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> int:
    """How many partitions a topic has, 0 if it is not there; it does not appear by that.

    Raises:
        KafkaUnavailable: if the cluster does not answer.
    """
    return Inquiry(config, timeout_seconds).partitions(topic)


def topic_exists(config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> bool:
    """Whether a topic is there, without making it appear.

    Raises:
        KafkaUnavailable: if the cluster does not answer.
    """
    return Inquiry(config, timeout_seconds).partitions(topic) > 0


class _Kind(NamedTuple):
    """A topic that the harvester makes for itself."""

    name: str
    settings: dict[str, str]
    error: type[OutboxError]


_LEADER_TOPIC = _Kind("leader topic", _LEADER_TOPIC_SETTINGS, LeaderTopicError)
_TRACKING_TOPIC = _Kind("tracking topic", _TRACKING_TOPIC_SETTINGS, TrackingTopicError)


def _ensure(inquiry: Inquiry, kind: _Kind, topic: str, width: int = 1) -> int:
    """Make a topic of so many partitions if it is missing; return its number of partitions."""
    partitions = inquiry.partitions(topic)
    if partitions == 0:
        if inquiry.can_create():
            _create(inquiry, kind, topic, width)
        partitions = _partitions_once_there(inquiry, kind, topic)
    return partitions


def _create(inquiry: Inquiry, kind: _Kind, topic: str, width: int) -> None:
    new_topic = NewTopic(topic, num_partitions=width, replication_factor=-1, config=kind.settings)
    answer = inquiry.admin.create_topics([new_topic], request_timeout=inquiry.remaining)[topic]
    try:
        answer.result(inquiry.remaining + _ATTEMPT_SECONDS)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.code() not in {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError._UNSUPPORTED_FEATURE}:  # noqa: SLF001
            raise _cannot_make(kind, topic, width, cause.str()) from None
    except FutureTimeoutError:
        raise _cannot_make(kind, topic, width, "no answer") from None


def _cannot_make(kind: _Kind, topic: str, width: int, reason: str) -> OutboxError:
    return kind.error(
        f"{kind.name} {topic!r} does not exist and cannot be made: {reason}; "
        f"create it with {'one partition' if width == 1 else f'{width} partitions'}, or grant CREATE on it"
    )


def _widen(inquiry: Inquiry, kind: _Kind, topic: str, width: int) -> None:
    """Give a topic more partitions, and wait until they are known."""
    answer = inquiry.admin.create_partitions([NewPartitions(topic, width)], request_timeout=inquiry.remaining)[topic]
    try:
        answer.result(inquiry.remaining + _ATTEMPT_SECONDS)
    except (KafkaException, FutureTimeoutError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
        raise kind.error(
            f"{kind.name} {topic!r} cannot be given {width} partitions: {reason}; do it, or grant ALTER on it"
        ) from None
    while inquiry.partitions(topic) < width and not inquiry.is_late:
        time.sleep(_APPEAR_INTERVAL_SECONDS)


def _partitions_once_there(inquiry: Inquiry, kind: _Kind, topic: str) -> int:
    """Ask for the topic by name until all brokers' metadata have caught up with its creation."""
    while True:
        found = inquiry.metadata(topic).topics[topic]
        if found.error is None and found.partitions:
            return len(found.partitions)
        reason = found.error.str() if found.error is not None else "it has no partitions"
        is_new = found.error is None or found.error.code() in {
            KafkaError.LEADER_NOT_AVAILABLE,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        }
        if not is_new or inquiry.is_late:
            raise kind.error(f"{kind.name} {topic!r} cannot be used: {reason}; grant DESCRIBE, READ and WRITE")
        time.sleep(_APPEAR_INTERVAL_SECONDS)
