"""The only importer of confluent_kafka: client factories, connection checks and topic administration.

Settings are librdkafka's own, passed through untouched; a wrong one is reported by the name the user wrote.
librdkafka's log lines go to the logger `outbox_core.kafka` at DEBUG: it repeats itself at every connection attempt,
and what matters to an operator is logged once per change of state by the parts that use the clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from outbox_core.errors import (
    DeadLetterTopicError,
    InvalidConfig,
    KafkaUnavailable,
    LeaderTopicError,
    OutboxError,
    ProcessExhausted,
    TrackingTopicError,
)

if TYPE_CHECKING:
    from confluent_kafka.admin._metadata import ClusterMetadata

__all__ = [
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
    "Consumer",
    "Inquiry",
    "KafkaConfig",
    "KafkaError",
    "KafkaException",
    "Message",
    "Producer",
    "TopicHidden",
    "TopicKind",
    "TopicLimits",
    "TopicLook",
    "TopicPartition",
    "TransactionsRefused",
    "UnreadableHeaders",
    "check_connection",
    "check_transactional_id",
    "ensure_dead_letter_topic",
    "ensure_leader_topic",
    "ensure_topic",
    "ensure_tracking_topic",
    "explained",
    "forbidden_topics",
    "grant",
    "headers_of",
    "make_admin",
    "make_consumer",
    "make_producer",
    "partition_count",
    "principal_of",
    "topic_exists",
    "topic_settings",
    "why_unreadable",
]

KafkaConfig = Mapping[str, Any]

_DISCARD_SECONDS = 2.0
_NO_TRANSACTION_LASTS_MS = 2**31 - 1
_DISCARD_POLL_SECONDS = 0.01
_CONNECT_TIMEOUT_SECONDS = 10.0
_ATTEMPT_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_APPEAR_INTERVAL_SECONDS = 0.05
_LEADER_TOPIC_SETTINGS = {
    # Only the last claim and the heartbeats of the last seconds are ever read.
    "cleanup.policy": "delete",
    "retention.ms": "3600000",
    "segment.ms": "3600000",
}

_DEAD_LETTER_TOPIC_SETTINGS = {
    # Somebody has to look at each: none expires by itself. It takes what the brokers' default refuses in other topics.
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "max.message.bytes": str(16 * 2**20),
}
_TRACKING_TOPIC_SETTINGS = {
    # Only the last manifest is ever read, and it must never expire. Manifests come in quickly: compact often.
    "cleanup.policy": "compact",
    "segment.bytes": str(16 * 2**20),
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
}

_AUTHORIZATION_FAILED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_SASL_DEFAULT = "GSSAPI"
_ANONYMOUS = "User:ANONYMOUS"

_NOTICE = 5  # of syslog's levels

_client_log = logging.getLogger(__name__)


class _DebugLogger(logging.LoggerAdapter[logging.Logger]):
    """Lowers every librdkafka log line to DEBUG."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        del level
        super().log(logging.DEBUG, msg, *args, **kwargs)


# Not `message.headers()`: a hot call of a method is specialised, and then the exception is not looked for.
_ask_for_headers = methodcaller("headers")


class UnreadableHeaders(list[tuple[str, bytes | None]]):
    """The headers of a record that has a header name which is not UTF-8: none of them can be read, so it is empty."""


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    """Return a record's headers, in their order; an empty `UnreadableHeaders` if the client cannot decode them.

    Any producer may write a header name that is not UTF-8. confluent-kafka's `Message.headers()` then returns a list
    with NULL in it and an exception set: SystemError at best, and a crash of the interpreter where the call has been
    specialised, or is made again. After this function it can be called.
    """
    try:
        headers: Any = _ask_for_headers(message)
    except (SystemError, UnicodeDecodeError):
        headers = UnreadableHeaders()
        message.set_headers(headers)  # in the place of a list that has NULL in it
    return [] if headers is None else headers


def make_producer(config: KafkaConfig) -> Producer:
    """A producer from librdkafka settings. Raises InvalidConfig for a setting librdkafka refuses."""
    producer: Producer = _make(Producer, config)
    return producer


def discard(producer: Producer) -> None:
    """Take back whatever a producer still has, before it is thrown away.

    librdkafka 2.16 corrupts its memory when a fenced transactional producer is destroyed with messages in it.
    """
    with suppress(KafkaException):
        producer.purge()
    end = time.monotonic() + _DISCARD_SECONDS
    while len(producer) and time.monotonic() < end:
        with suppress(KafkaException):  # a broken producer says so once more
            producer.poll(_DISCARD_POLL_SECONDS)


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
        cause: KafkaError = error.args[0]
        if cause.code() == KafkaError._CRIT_SYS_RESOURCE:  # noqa: SLF001  confluent's public constant
            raise ProcessExhausted(
                f"a Kafka client cannot be made: {cause.str()}; raise the process's limits"
            ) from None
        raise InvalidConfig(f"Kafka settings: {cause.str()}") from None
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"Kafka settings: {error}") from None


def _ignore_client_error(error: KafkaError) -> None:
    """Client-wide errors are informational: librdkafka recovers, and each caller sees its own failures."""
    _client_log.debug("librdkafka: %s", error)


def principal_of(config: KafkaConfig) -> str:
    """Return whom Kafka takes a client for, as far as its settings tell; never a secret.

    What a broker makes of a certificate (`ssl.principal.mapping.rules`) or of a token, only the broker knows: then it
    is said how the client authenticates.

    Args:
        config: librdkafka settings.
    """
    protocol = str(config.get("security.protocol", "plaintext")).lower()
    if protocol.startswith("sasl"):
        mechanism = str(config.get("sasl.mechanisms") or config.get("sasl.mechanism") or _SASL_DEFAULT).upper()
        if mechanism == "GSSAPI":
            return f"the Kerberos principal {config.get('sasl.kerberos.principal', 'kafkaclient')}"
        if mechanism == "OAUTHBEARER":
            client = config.get("sasl.oauthbearer.client.id")
            return "the subject of its OAUTHBEARER token" + (f" (client {client})" if client else "")
        return f"User:{config.get('sasl.username', '')}"
    if protocol == "ssl":
        for name in ("ssl.certificate.location", "ssl.keystore.location"):
            if config.get(name):
                return f"the subject of the certificate in {config[name]} ({name})"
        if config.get("ssl.certificate.pem"):
            return "the subject of the certificate in ssl.certificate.pem"
    return _ANONYMOUS


def grant(rights: str, config: KafkaConfig, on: str = "it") -> str:
    """Say what to do about missing rights: which, on what, and for whom.

    Args:
        rights: such as `READ and WRITE`.
        config: librdkafka settings of the client that needs them.
        on: the topic, group or transactional.id.
    """
    return f"grant {rights} on {on} to {principal_of(config)}"


def explained(error: KafkaError, config: KafkaConfig) -> str:
    """Return an error's text, and if a right is missing, whose."""
    return f"{error.str()}, as {principal_of(config)}" if error.code() in _AUTHORIZATION_FAILED else error.str()


def why_unreadable(error: KafkaError, config: KafkaConfig, topic: str, group: str = "") -> str:
    """Return the text of a consumer's error, and if a right is missing, what to grant."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return f"{error.str()}; {grant('READ', config, f'topic {topic!r}')}"
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and group:
        return f"{error.str()}; {grant('READ', config, f'group {group!r}')}"
    return explained(error, config)


class TopicHidden(KafkaUnavailable):
    """A topic may not be seen: whether it is there is not known."""


class TransactionsRefused(OutboxError):
    """A transactional.id may not be used."""


class TopicLook(NamedTuple):
    """What a cluster tells of a topic to a client of ours.

    Attributes:
        partitions: how many there are.
        replicas: of the partition that has the fewest.
        allowed: what we may do, `WRITE` for example; None if the brokers do not say.
    """

    partitions: int
    replicas: int
    allowed: frozenset[str] | None


class TopicKind(NamedTuple):
    """A topic that is made if it is missing.

    Attributes:
        name: what it is, for errors.
        settings: Kafka's, for when it is made.
        error: raised if it is missing and cannot be made, or cannot be used.
        partitions: for when it is made.
        replication_factor: for when it is made; -1 for the cluster's own.
    """

    name: str
    settings: Mapping[str, str]
    error: type[OutboxError]
    partitions: int = 1
    replication_factor: int = -1


class _Complaints:
    """What librdkafka complained of. It does not know the client, which holds it: they would keep each other alive."""

    def __init__(self) -> None:
        self.last = ""
        self.is_hopeless = False

    def note(self, error: KafkaError) -> None:
        """Take note of an error of the client; called by librdkafka."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            self.last = error.str()
        if error.code() == KafkaError._AUTHENTICATION:  # noqa: SLF001
            self.is_hopeless = True  # a wrong password does not become right by waiting


class Inquiry:
    """An admin client with a deadline, which knows what librdkafka complained of while it waited.

    A client has a thread for each broker and some more, and as many descriptors: use it as a context manager, or
    `close` it.

    Args:
        config: librdkafka settings.
        timeout_seconds: For everything that is asked, together.
    """

    def __init__(self, config: KafkaConfig, timeout_seconds: float) -> None:
        self.config = config
        self._servers = config.get("bootstrap.servers", "(bootstrap.servers is not set)")
        self._complaints = _Complaints()
        self._deadline = time.monotonic() + timeout_seconds
        self.admin = make_admin({**config, "error_cb": self._complaints.note})

    def close(self) -> None:
        """End the client's threads and connections, whoever still refers to it. Idempotent."""
        self.admin.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                if self._complaints.is_hopeless or self.is_late:
                    raise self.unavailable(error.args[0].str()) from None

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic, 0 if it is not there. It does not appear by that.

        The list of topics is what one broker knows: it may lag behind, and it leaves out what may not be seen. So a
        topic that is not in it is asked for by name as well.

        Raises:
            TopicHidden: if it may not be seen.
            KafkaUnavailable: if the cluster cannot say.
        """
        while True:
            cluster = self.metadata()
            listed = cluster.topics.get(topic)
            if listed is not None and listed.error is None:
                return len(listed.partitions)
            error = listed.error if listed is not None else None
            if error is None or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                named = self._describe(topic) if _takes_requests(cluster) else 0  # else asking makes it appear
                if isinstance(named, int):
                    return named
                error = named
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise TopicHidden(f"topic {topic!r} may not be seen: {error.str()}; {grant('DESCRIBE', self.config)}")
            if self.is_late:
                raise KafkaUnavailable(f"topic {topic!r} cannot be described: {error.str()}")
            time.sleep(_APPEAR_INTERVAL_SECONDS)

    def _describe(self, topic: str) -> int | KafkaError:
        """Ask for a topic by name; return its number of partitions, 0 if it is not there, or why that is not known."""
        asked = self.admin.describe_topics(TopicCollection([topic]), request_timeout=self.remaining)[topic]
        try:
            return len(asked.result(self.remaining + _ATTEMPT_SECONDS).partitions)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            is_absent = cause.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION}
            error.__traceback__ = None  # kept by the future it came from, it keeps this frame and all its callers alive
            return 0 if is_absent else cause
        except FutureTimeoutError:
            return KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001  confluent's public constant

    def can_create(self) -> bool:
        """Whether a broker takes requests to create topics."""
        return _takes_requests(self.metadata())

    def topic_settings(self, topic: str) -> dict[str, str]:
        """A topic's settings.

        Raises:
            KafkaException: if they may not be read.
            TimeoutError: if there is no answer.
        """
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        answer = self.admin.describe_configs([resource], request_timeout=self.remaining)[resource]
        return {name: str(entry.value) for name, entry in answer.result(self.remaining + _ATTEMPT_SECONDS).items()}

    def look_at(self, topic: str) -> TopicLook | None:
        """Ask for a topic by name, with what we may do there; None if it is not there, or may not be seen.

        Raises:
            KafkaUnavailable: if the cluster cannot say.
        """
        asked = self.admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True, request_timeout=self.remaining
        )[topic]
        try:
            found = asked.result(self.remaining + _ATTEMPT_SECONDS)
        except FutureTimeoutError:
            raise self.unavailable(f"no answer about topic {topic!r}") from None
        except KafkaException as error:
            if error.args[0].code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}:
                return None
            raise KafkaUnavailable(f"topic {topic!r} cannot be described: {error.args[0].str()}") from None
        replicas = min((len(partition.replicas) for partition in found.partitions), default=0)
        return TopicLook(len(found.partitions), replicas, _names(found.authorized_operations))

    def writers(self, topic: str) -> frozenset[str] | None:
        """Tell which principals ACLs allow to write to a topic; None if ACLs may not be seen, or there are none."""
        any_one: Any = None  # as librdkafka has it
        every = AclBindingFilter(
            *(ResourceType.TOPIC, any_one, ResourcePatternType.ANY, any_one, any_one),
            *(AclOperation.ANY, AclPermissionType.ANY),
        )
        try:
            found = self.admin.describe_acls(every, request_timeout=self.remaining).result(self.remaining)
        except (KafkaException, FutureTimeoutError):
            return None
        return frozenset(
            acl.principal
            for acl in found
            if acl.permission_type == AclPermissionType.ALLOW
            and acl.operation in {AclOperation.WRITE, AclOperation.ALL}
            and (
                topic.startswith(acl.name)
                if acl.resource_pattern_type == ResourcePatternType.PREFIXED
                else acl.name in {topic, "*"}
            )
        )

    def topic_setting(self, topic: str, name: str) -> str:
        """One of the tracking topic's settings.

        Raises:
            TrackingTopicError: if it may not be read.
        """
        try:
            return self.topic_settings(topic)[name]
        except (KafkaException, FutureTimeoutError) as error:
            reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
            needed = grant("DESCRIBE_CONFIGS", self.config)
            raise TrackingTopicError(
                f"cannot read the settings of tracking topic {topic!r}: {reason}; {needed}"
            ) from None

    def unavailable(self, reason: str) -> KafkaUnavailable:
        """The error for an answer that did not come: with what librdkafka complained of, else with the reason."""
        return KafkaUnavailable(
            f"cannot reach Kafka at bootstrap.servers={self._servers}: {self._complaints.last or reason}"
        )


def _names(operations: Any) -> frozenset[str] | None:
    """What we may do, by its names; what implies others with these."""
    if operations is None:
        return None
    names = {operation.name for operation in operations}
    return frozenset(AclOperation.__members__ if "ALL" in names else names)


def check_transactional_id(config: KafkaConfig, transactional_id: str, *, timeout_seconds: float) -> None:
    """See whether a transactional.id may be used, without using it: whoever does is not fenced.

    A coordinator looks at rights first, at the transaction's time-out next, and gives an epoch only then. So it is
    asked with a time-out of 24 days, which no broker accepts (`transaction.max.timeout.ms`, 15 minutes by default).

    Raises:
        TransactionsRefused: saying what was refused.
        KafkaUnavailable: if there was no answer.
    """
    settings = {**config, "transactional.id": transactional_id, "transaction.timeout.ms": _NO_TRANSACTION_LASTS_MS}
    producer = make_producer(settings)
    try:
        producer.init_transactions(timeout_seconds)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return
        if cause.retriable():
            raise KafkaUnavailable(f"no answer about transactional.id {transactional_id!r}: {cause.str()}") from None
        raise TransactionsRefused(explained(cause, config)) from None
    finally:
        discard(producer)


def _takes_requests(cluster: ClusterMetadata) -> bool:
    """Whether it has a controller; the mock cluster names one that is not there."""
    return cluster.controller_id < 0 or cluster.controller_id in cluster.brokers


def check_connection(config: KafkaConfig, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> None:
    """See whether the cluster answers.

    Raises:
        KafkaUnavailable: naming the bootstrap servers and what librdkafka said last.
    """
    with Inquiry(config, timeout_seconds) as inquiry:
        inquiry.metadata()


def ensure_leader_topic(config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> int:
    """Make the leader topic with one partition if it is missing; return its number of partitions.

    A broker that cannot create topics on request (librdkafka's mock cluster) is asked for it by name, which makes it
    appear there.

    Raises:
        LeaderTopicError: if it is missing and cannot be made, or cannot be described, or is compacted.
        KafkaUnavailable: if the cluster does not answer.
    """
    with Inquiry(config, timeout_seconds) as inquiry:
        partitions = _ensure(inquiry, _LEADER_TOPIC, topic)
        if inquiry.can_create():
            _refuse_compaction(inquiry, topic)
        return partitions


def _refuse_compaction(inquiry: Inquiry, topic: str) -> None:
    """See that a leader topic takes messages without a key. Who may not read its settings finds out by writing."""
    with suppress(KafkaException, FutureTimeoutError):
        policy = inquiry.topic_settings(topic)["cleanup.policy"]
        if "compact" in policy:
            raise LeaderTopicError(
                f"leader topic {topic!r} has cleanup.policy={policy}, so it refuses the leader's messages, which have "
                "no key; set it to delete, or name another leaderTopic (leader_topic)"
            )


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
    with Inquiry(config, timeout_seconds) as inquiry:
        _ensure_tracking_topic(inquiry, topic, width)


def _ensure_tracking_topic(inquiry: Inquiry, topic: str, width: int) -> None:
    if not inquiry.can_create():
        raise TrackingTopicError("this Kafka cluster is a mock without transactions; exactly once needs a real broker")
    partitions = _ensure(inquiry, _TRACKING_TOPIC._replace(partitions=width), topic)
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


def ensure_dead_letter_topic(
    config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS
) -> None:
    """Make the dead-letter topic if it is missing. One that is there is taken as it is, however many partitions it has.

    Raises:
        DeadLetterTopicError: if it is missing and cannot be made, or cannot be described.
        KafkaUnavailable: if the cluster does not answer.
    """
    with Inquiry(config, timeout_seconds) as inquiry:
        _ensure(inquiry, _DEAD_LETTER_TOPIC, topic)


def forbidden_topics(
    config: KafkaConfig, topics: set[str], *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS
) -> set[str]:
    """Those of the topics to which we may not write, as far as the cluster tells."""
    with Inquiry(config, timeout_seconds) as inquiry:
        return _forbidden_topics(inquiry.admin, topics, timeout_seconds)


def _forbidden_topics(admin: AdminClient, topics: set[str], timeout_seconds: float) -> set[str]:
    asked = admin.describe_topics(
        TopicCollection(sorted(topics)), include_authorized_operations=True, request_timeout=timeout_seconds
    )
    forbidden = set()
    for topic, answer in asked.items():
        try:
            allowed = answer.result(timeout_seconds + _ATTEMPT_SECONDS).authorized_operations
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                forbidden.add(topic)
        except FutureTimeoutError:
            continue
        else:
            if allowed is not None and not {AclOperation.WRITE, AclOperation.ALL} & set(allowed):
                forbidden.add(topic)
    return forbidden


def ensure_topic(
    config: KafkaConfig, kind: TopicKind, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS
) -> int:
    """Make a topic if it is missing; return its number of partitions.

    Raises:
        OutboxError: `kind.error` if it is missing and cannot be made, or cannot be described.
        KafkaUnavailable: if the cluster does not answer.
    """
    with Inquiry(config, timeout_seconds) as inquiry:
        return _ensure(inquiry, kind, topic)


def topic_settings(
    config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS
) -> dict[str, str] | None:
    """A topic's settings; None if they may not be read, or if the broker has none to show.

    Raises:
        KafkaUnavailable: if the cluster does not answer.
    """
    with Inquiry(config, timeout_seconds) as inquiry:
        if not inquiry.can_create():
            return None
        try:
            return inquiry.topic_settings(topic)
        except (KafkaException, FutureTimeoutError):
            return None


class TopicLimits:
    """Asks for `max.message.bytes` of topics, with an admin client of its own that is made when it is first needed.

    Args:
        config: librdkafka settings.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin: AdminClient | None = None

    def close(self) -> None:
        """End the client's threads and connections."""
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.__exit__(None, None, None)

    def ask(self, topics: Collection[str]) -> dict[str, Future[int | None]]:
        """Ask, and do not wait.

        Returns:
            By topic what will be known of it: the limit, None if the broker shows none, or KafkaException if the topic
            is not there, or may not be described.
        """
        if self._admin is None:
            self._admin = make_admin(self._config)
        resources = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        answers = self._admin.describe_configs(resources, request_timeout=_ANSWER_SECONDS)
        return {resource.name: _limit_in(answer) for resource, answer in answers.items()}


def _limit_in(answer: Future[Any]) -> Future[int | None]:
    """The one setting, out of an answer with all of them."""
    limit: Future[int | None] = Future()

    def pick(answered: Future[Any]) -> None:
        error = answered.exception()
        if error is not None:
            limit.set_exception(error)
            return
        entry = answered.result().get("max.message.bytes")
        value = str(entry.value) if entry is not None else ""
        limit.set_result(int(value) if value.isdecimal() else None)

    answer.add_done_callback(pick)
    return limit


def partition_count(config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> int:
    """How many partitions a topic has, 0 if it is not there; it does not appear by that.

    Raises:
        TopicHidden: if it may not be seen, which says nothing about whether it is there.
        KafkaUnavailable: if the cluster does not answer.
    """
    with Inquiry(config, timeout_seconds) as inquiry:
        return inquiry.partitions(topic)


def topic_exists(config: KafkaConfig, topic: str, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> bool:
    """Whether a topic is there, without making it appear.

    Raises:
        TopicHidden: if it may not be seen, which says nothing about whether it is there.
        KafkaUnavailable: if the cluster does not answer.
    """
    return partition_count(config, topic, timeout_seconds=timeout_seconds) > 0


_LEADER_TOPIC = TopicKind("leader topic", _LEADER_TOPIC_SETTINGS, LeaderTopicError)
_TRACKING_TOPIC = TopicKind("tracking topic", _TRACKING_TOPIC_SETTINGS, TrackingTopicError)


_DEAD_LETTER_TOPIC = TopicKind("dead-letter topic", _DEAD_LETTER_TOPIC_SETTINGS, DeadLetterTopicError)


def _ensure(inquiry: Inquiry, kind: TopicKind, topic: str) -> int:
    """Make a topic if it is missing; return its number of partitions."""
    with suppress(TopicHidden):  # what it is used for is refused below, and that says which rights are missing
        partitions = inquiry.partitions(topic)
        if partitions:
            return partitions
    if inquiry.can_create():
        _create(inquiry, kind, topic)
    return _partitions_once_there(inquiry, kind, topic)


def _create(inquiry: Inquiry, kind: TopicKind, topic: str) -> None:
    new_topic = NewTopic(
        topic,
        num_partitions=kind.partitions,
        replication_factor=kind.replication_factor,
        config=dict(kind.settings),
    )
    answer = inquiry.admin.create_topics([new_topic], request_timeout=inquiry.remaining)[topic]
    try:
        answer.result(inquiry.remaining + _ATTEMPT_SECONDS)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.code() not in {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError._UNSUPPORTED_FEATURE}:  # noqa: SLF001
            raise _cannot_make(inquiry, kind, topic, cause.str()) from None
    except FutureTimeoutError:
        raise _cannot_make(inquiry, kind, topic, "no answer") from None


def _counted(partitions: int) -> str:
    return "one partition" if partitions == 1 else f"{partitions} partitions"


def _cannot_make(inquiry: Inquiry, kind: TopicKind, topic: str, reason: str) -> OutboxError:
    return kind.error(
        f"{kind.name} {topic!r} does not exist and cannot be made: {reason}; "
        f"create it with {_counted(kind.partitions)}, or {grant('CREATE', inquiry.config)}"
    )


def _widen(inquiry: Inquiry, kind: TopicKind, topic: str, width: int) -> None:
    """Give a topic more partitions, and wait until they are known."""
    answer = inquiry.admin.create_partitions([NewPartitions(topic, width)], request_timeout=inquiry.remaining)[topic]
    try:
        answer.result(inquiry.remaining + _ATTEMPT_SECONDS)
    except (KafkaException, FutureTimeoutError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
        raise kind.error(
            f"{kind.name} {topic!r} cannot be given {width} partitions: {reason}; do it, or "
            f"{grant('ALTER', inquiry.config)}"
        ) from None
    while inquiry.partitions(topic) < width and not inquiry.is_late:
        time.sleep(_APPEAR_INTERVAL_SECONDS)


def _partitions_once_there(inquiry: Inquiry, kind: TopicKind, topic: str) -> int:
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
            needed = grant("DESCRIBE, READ and WRITE", inquiry.config)
            raise kind.error(f"{kind.name} {topic!r} cannot be used: {reason}; {needed}")
        time.sleep(_APPEAR_INTERVAL_SECONDS)
