"""An admin client with one deadline for all of its questions."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ClusterMetadata,
    ConfigResource,
    ConfigSource,
    KafkaConfig,
    KafkaError,
    KafkaException,
    ResourcePatternType,
    ResourceType,
    TopicCollection,
    end_client,
    make_admin,
)
from outbox_core.kafka.errors import NO_ANSWER, grant

_CONNECT_TIMEOUT_SECONDS: Final = 10.0
APPEAR_INTERVAL_SECONDS: Final = 0.05  # between looks at metadata in which something is missing yet
_ATTEMPT_SECONDS = 1.0
_IMPOSSIBLE_TOPIC = "?"
_T = TypeVar("_T")


class TopicHidden(KafkaUnavailable):
    """A topic that we may not see, so that its existence is unknown."""


class TopicDescription(NamedTuple):
    """The cluster's description of a topic."""

    partitions: int
    replicas: int  # of the partition with the fewest
    allowed: frozenset[str] | None  # operations that we may do, `WRITE` for example; None if the brokers do not say


class Broker(NamedTuple):
    """A broker, at the address that it advertises."""

    id: int
    host: str
    port: int

    @classmethod
    def of(cls, found: Any) -> Broker:
        """Return the broker that the client describes in one of its two ways."""
        return cls(found.id, found.host, found.port)

    @property
    def address(self) -> str:
        """The address as `bootstrap.servers` has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"broker {self.id} at {self.address}"


class _Complaints:
    """The last error of a client; a reference to the client would make a cycle."""

    def __init__(self) -> None:
        self.last = ""
        self.is_hopeless = False

    def note(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  confluent's public constant
            self.last = error.str()
        if error.code() == KafkaError._AUTHENTICATION:  # noqa: SLF001
            self.is_hopeless = True  # a wrong password does not become right by waiting


class Inquiry:
    """An admin client with one deadline for all of its questions.

    Each client has several threads and descriptors: use it as a context manager, or `close` it. Its methods raise
    KafkaUnavailable if the cluster cannot say.
    """

    def __init__(self, config: KafkaConfig, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> None:
        self.config = config
        self._servers = config.get("bootstrap.servers", "(bootstrap.servers is not set)")
        self._complaints = _Complaints()
        self._deadline = time.monotonic() + timeout_seconds
        self._is_real = False  # not known yet, or the mock cluster
        self.admin = make_admin({**config, "error_cb": self._complaints.note})

    def close(self) -> None:
        """End the client's threads and connections. Idempotent."""
        end_client(partial(self.admin.__exit__, None, None, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0.1."""
        return max(0.1, self._deadline - time.monotonic())

    def extend(self, timeout_seconds: float) -> None:
        """Give further questions so long from now on."""
        self._deadline = time.monotonic() + timeout_seconds

    @property
    def is_late(self) -> bool:
        """True once the deadline has passed."""
        return time.monotonic() >= self._deadline

    def wait_for(self, answer: Future[_T], subject: str = "") -> _T:
        """Return an answer's result.

        Raises:
            KafkaUnavailable: if there is none a second after the deadline, which the client itself should keep: that
                second is one for all answers.
            KafkaException: if the cluster refuses.
        """
        try:
            return answer.result(max(0.0, self._deadline + _ATTEMPT_SECONDS - time.monotonic()))
        except FutureTimeoutError:
            raise self.unavailable(f"no answer{subject and f' about {subject}'}") from None

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return the metadata of one topic, or of all; asking for one may create it."""
        arguments = () if topic is None else (topic,)
        while True:
            try:
                return self.admin.list_topics(*arguments, timeout=min(_ATTEMPT_SECONDS, self.remaining))
            except KafkaException as error:
                self.admin.poll(0)
                if self._complaints.is_hopeless or self.is_late:
                    raise self.unavailable(error.args[0].str()) from None

    def cluster(self) -> ClusterMetadata:
        """Return brokers and controller, without the topics, of which there may be thousands."""
        return self.metadata(_IMPOSSIBLE_TOPIC)

    def partitions(self, topic: str) -> int:
        """Return a topic's number of partitions without creating it: 0 if it does not exist.

        Raises:
            TopicHidden: if we may not see the topic.
        """
        while True:
            # By name: a list of all topics may lag behind, omits hidden ones, and is long. The mock cluster knows lists
            # only; a topic that it is asked for appears.
            found = self._describe(topic) if self.can_create() else self._listed(topic)
            if isinstance(found, int):
                return found
            if found.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise TopicHidden(f"topic {topic!r} may not be seen: {found.str()}; {grant('DESCRIBE', self.config)}")
            if self.is_late:
                raise KafkaUnavailable(f"topic {topic!r} cannot be described: {found.str()}")
            time.sleep(APPEAR_INTERVAL_SECONDS)

    def _listed(self, topic: str) -> int | KafkaError:
        listed = self.metadata().topics.get(topic)
        if listed is None:
            return 0
        return len(listed.partitions) if listed.error is None else listed.error

    def _describe(self, topic: str) -> int | KafkaError:
        """Return a topic's number of partitions, asked for by name: 0 if it does not exist, or the error."""
        asked = self.admin.describe_topics(TopicCollection([topic]), request_timeout=self.remaining)[topic]
        try:
            return len(self.wait_for(asked).partitions)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            is_absent = cause.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION}
            error.__traceback__ = None  # kept by the future it came from, it keeps this frame and all its callers alive
            return 0 if is_absent else cause
        except KafkaUnavailable:
            return KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001  confluent's public constant

    def can_create(self) -> bool:
        """Tell whether a broker takes requests to create topics: all but librdkafka's mock cluster do."""
        if not self._is_real:  # the mock names a controller that is not there; brokers that are fenced name none
            cluster = self.cluster()
            named = cluster.controller_id
            self._is_real = named < 0 or not cluster.brokers or named in cluster.brokers
        return self._is_real

    def settings_of(self, name: str, kind: Any = ConfigResource.Type.TOPIC) -> dict[str, str]:
        """Return the settings of a topic, or a broker, or raise KafkaException if we may not read them."""
        return {setting: str(entry.value) for setting, entry in self._describe_settings(name, kind).items()}

    def settings_and_given(self, topic: str) -> tuple[dict[str, str], bool]:
        """Return the settings of a topic, and if any was given to itself, or raise KafkaException as `settings_of`."""
        described = self._describe_settings(topic, ConfigResource.Type.TOPIC)
        own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        values = {setting: str(entry.value) for setting, entry in described.items()}
        return values, any(entry.source == own for entry in described.values())

    def _describe_settings(self, name: str, kind: Any) -> dict[str, Any]:
        resource = ConfigResource(kind, name)
        answer = self.admin.describe_configs([resource], request_timeout=self.remaining)[resource]
        return self.wait_for(answer)

    def describe(self, topic: str) -> TopicDescription | None:
        """Describe a topic, with our rights on it; None if it does not exist or is hidden from us."""
        asked = self.admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True, request_timeout=self.remaining
        )[topic]
        try:
            found = self.wait_for(asked, f"topic {topic!r}")
        except KafkaException as error:
            if error.args[0].code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}:
                return None
            raise KafkaUnavailable(f"topic {topic!r} cannot be described: {error.args[0].str()}") from None
        replicas = min((len(partition.replicas) for partition in found.partitions), default=0)
        return TopicDescription(len(found.partitions), replicas, _names(found.authorized_operations))

    def leaders(self, topics: Collection[str]) -> dict[tuple[str, int], Broker | None]:
        """Return the broker that Kafka lists as the leader of each partition of some topics, None where it lists none.

        Topics that do not exist, or are hidden from us, are left out.
        """
        return self._described_leaders(topics) if self.can_create() else self._listed_leaders(topics)

    def _described_leaders(self, topics: Collection[str]) -> dict[tuple[str, int], Broker | None]:
        found: dict[tuple[str, int], Broker | None] = {}
        names = TopicCollection(sorted(set(topics)))
        asked = self.admin.describe_topics(names, request_timeout=self.remaining) if topics else {}
        for topic, answer in asked.items():
            try:
                described = self.wait_for(answer, f"topic {topic!r}")
            except KafkaException as error:
                if error.args[0].code() in NO_ANSWER:
                    raise self.unavailable(error.args[0].str()) from None
                error.__traceback__ = None  # as in _describe
                continue
            for part in described.partitions:
                has_leader = part.leader is not None and part.leader.id >= 0
                found[topic, part.id] = Broker.of(part.leader) if has_leader else None
        return found

    def _listed_leaders(self, topics: Collection[str]) -> dict[tuple[str, int], Broker | None]:
        cluster = self.metadata()
        brokers = {broker.id: Broker.of(broker) for broker in cluster.brokers.values()}
        return {
            (topic, part.id): brokers.get(part.leader)
            for topic in topics
            if topic in cluster.topics
            for part in cluster.topics[topic].partitions.values()
        }

    def knows_group(self, group_id: str) -> bool:
        """Return True if a consumer group has members, or had some lately; see `member_ids`."""
        group = self._group(group_id)
        return group is not None and group.state.name != "DEAD"  # as brokers before 4.0 say of one that is not there

    def member_ids(self, group_id: str) -> frozenset[str]:
        """Return the IDs of the members of a consumer group, none if Kafka knows no such group.

        Raises:
            KafkaUnavailable: if Kafka does not say; needs DESCRIBE on the group, which comes with READ.
        """
        group = self._group(group_id)
        return frozenset() if group is None else frozenset(one.member_id for one in group.members)

    def _group(self, group_id: str) -> Any:
        asked = self.admin.describe_consumer_groups([group_id], request_timeout=self.remaining)[group_id]
        try:
            return self.wait_for(asked, f"group {group_id!r}")
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            error.__traceback__ = None  # as in _describe
            if cause.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return None
            if cause.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                remedy = grant("DESCRIBE", self.config, f"group {group_id!r}")
                raise KafkaUnavailable(f"group {group_id!r} may not be described: {cause.str()}; {remedy}") from None
            raise KafkaUnavailable(f"group {group_id!r} cannot be described: {cause.str()}") from None

    def writers(self, topic: str) -> frozenset[str] | None:
        """Return the principals that ACLs let write to a topic, None if the cluster has or shows no ACLs."""
        any_one: Any = None  # as librdkafka has it
        every = AclBindingFilter(
            *(ResourceType.TOPIC, any_one, ResourcePatternType.ANY, any_one, any_one),
            *(AclOperation.ANY, AclPermissionType.ANY),
        )
        try:
            found = self.wait_for(self.admin.describe_acls(every, request_timeout=self.remaining))
        except (KafkaException, KafkaUnavailable):
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

    def unavailable(self, reason: str) -> KafkaUnavailable:
        """Return the error for a missing answer, with librdkafka's last error or else the reason."""
        return KafkaUnavailable(
            f"cannot reach Kafka at bootstrap.servers={self._servers}: {self._complaints.last or reason}"
        )


def _names(operations: Any) -> frozenset[str] | None:
    """Return the names of operations; ALL implies the others."""
    if operations is None:
        return None
    names = {operation.name for operation in operations}
    return frozenset(AclOperation.__members__ if "ALL" in names else names)


def group_members(config: KafkaConfig, group_id: str, *, timeout_seconds: float) -> frozenset[str] | None:
    """Return the IDs of the members of a consumer group as `member_ids` does, None if Kafka does not say."""
    try:
        with Inquiry(config, timeout_seconds) as inquiry:
            return inquiry.member_ids(group_id)
    except KafkaUnavailable:
        return None


def check_connection(config: KafkaConfig, *, timeout_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> None:
    """Raise KafkaUnavailable if the cluster does not answer."""
    with Inquiry(config, timeout_seconds) as inquiry:
        inquiry.cluster()
