"""The outbox's own topics, their settings and creation, and questions about others.

Without an answer from the cluster the functions raise KafkaUnavailable, except `forbidden_topics`, which leaves a topic
out. Those that make a topic raise its kind's error, with the remedy, if it cannot be made, described or used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from outbox_core.errors import DeadLetterTopicError, KafkaUnavailable, LeaderTopicError, OutboxError, TrackingTopicError
from outbox_core.kafka.admin import APPEAR_INTERVAL_SECONDS, Inquiry, TopicHidden
from outbox_core.kafka.clients import (
    AclOperation,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    KafkaConfig,
    KafkaError,
    KafkaException,
    NewPartitions,
    NewTopic,
    TopicCollection,
    make_admin,
)
from outbox_core.kafka.errors import NO_ANSWER, NO_SUCH_PARTITION, grant

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_FENCED_INTERVAL_SECONDS = 0.5
_LEADER_TOPIC_SETTINGS = {
    # Only the last claim and the heartbeats of the last seconds are ever read.
    "cleanup.policy": "delete",
    "retention.ms": "3600000",
    "segment.ms": "3600000",
}
_DEAD_LETTER_TOPIC_SETTINGS = {
    # Dead letters wait for an operator: none expires by itself. The brokers' default would refuse large ones.
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
    "max.message.bytes": str(2**20),  # for a manifest of 50,000 rows, whatever the brokers' default
}


class TopicKind(NamedTuple):
    """A kind of topic that is created if it is missing."""

    name: str
    settings: Mapping[str, str]
    error: type[OutboxError]
    partitions: int = 1
    replication_factor: int = -1  # the cluster's own


_LEADER_TOPIC = TopicKind("leader topic", _LEADER_TOPIC_SETTINGS, LeaderTopicError)
_TRACKING_TOPIC = TopicKind("tracking topic", _TRACKING_TOPIC_SETTINGS, TrackingTopicError)
_DEAD_LETTER_TOPIC = TopicKind("dead-letter topic", _DEAD_LETTER_TOPIC_SETTINGS, DeadLetterTopicError)


def ensure_leader_topic(config: KafkaConfig, topic: str) -> int:
    """Make the leader topic with one partition if it is missing, and return its number of partitions."""
    with Inquiry(config) as inquiry:
        partitions = _ensure(inquiry, _LEADER_TOPIC, topic)
        if inquiry.can_create():  # librdkafka's mock cluster cannot; asking for a topic by name makes it appear there
            _refuse_compaction(inquiry, topic)
        return partitions


def _refuse_compaction(inquiry: Inquiry, topic: str) -> None:
    # Without the right to read the settings, writing shows it.
    with suppress(KafkaException, KafkaUnavailable):
        policy = _settings_once_there(inquiry, topic)[0]["cleanup.policy"]
        if "compact" in policy:
            raise LeaderTopicError(
                f"leader topic {topic!r} has cleanup.policy={policy}, so it refuses the leader's messages, which have "
                "no key; set it to delete, or name another leaderTopic (leader_topic)"
            )


def ensure_tracking_topic(
    config: KafkaConfig, topic: str, is_ours: Callable[[], bool] = lambda: False, *, width: int = 1
) -> None:
    """Make the tracking topic of exactly-once delivery if it is missing, and check its settings.

    `width` is the number of transactional.ids, each with a partition of its own: 1 for a harvester, one for each of a
    relay's shards. A relay's topic with fewer partitions gets more.

    A producer asks for a topic that was deleted, and a broker may make it by itself, with its own defaults. Such a
    topic, to which nobody gave settings, gets ours if `is_ours` tells that nobody else uses it. It may have more
    partitions than it needs: all but the first stay empty.
    """
    with Inquiry(config) as inquiry:
        if not inquiry.can_create():
            raise TrackingTopicError("this cluster is a mock without transactions; exactly once needs a real broker")
        partitions = _ensure(inquiry, _TRACKING_TOPIC._replace(partitions=width), topic)
        if partitions < width:
            _widen(inquiry, _TRACKING_TOPIC, topic, width)
        try:
            settings, has_own = _settings_once_there(inquiry, topic)
        except KafkaException as error:
            needed = grant("DESCRIBE_CONFIGS", config)
            why = f"cannot read the settings of tracking topic {topic!r}: {_reason(inquiry, error)}; {needed}"
            raise TrackingTopicError(why) from None
        policy, is_too_wide = settings["cleanup.policy"], width == 1 and has_spare_partitions(partitions, settings)
        if (policy != "compact" or is_too_wide) and not has_own and is_ours():
            _give_settings(inquiry, _TRACKING_TOPIC, topic, partitions)
            return
    if is_too_wide:
        why = f"tracking topic {topic!r} has {partitions} partitions, expected 1; name another tracking_topic"
        cure = "if this one was in use: after a drain in at-least-once delivery, which settles the last transaction"
        raise TrackingTopicError(f"{why} ({cure})")
    if policy != "compact":
        raise TrackingTopicError(
            f"tracking topic {topic!r} has cleanup.policy={policy}, expected compact: the last manifest must not "
            "expire; set it to compact"
        )


def has_spare_partitions(partitions: int, settings: Mapping[str, str]) -> bool:
    """Tell whether a harvester's tracking topic has several partitions, and no settings of ours: it may be another's.

    With our settings it is ours, made by a broker, or widened since; only its first partition is used.
    """
    return partitions > 1 and not settings.items() >= _TRACKING_TOPIC_SETTINGS.items()


def _give_settings(inquiry: Inquiry, kind: TopicKind, topic: str, partitions: int) -> None:
    """Give a topic that a broker has made the settings of its kind."""
    inquiry.extend(_ANSWER_SECONDS)  # somebody has looked into the topic meanwhile
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in kind.settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    made = f"{kind.name} {topic!r} was made by a broker, with {partitions} partition(s) and the brokers' settings"
    try:
        asked = inquiry.admin.incremental_alter_configs([resource], request_timeout=inquiry.remaining)
        inquiry.wait_for(asked[resource])
    except KafkaException as error:
        policy = kind.settings["cleanup.policy"]
        raise kind.error(
            f"{made}, and cannot be given its own: {_reason(inquiry, error)}; set its cleanup.policy to {policy}, or "
            f"{grant('ALTER_CONFIGS', inquiry.config)}"
        ) from None
    _log.warning("%s; it has its own settings now. Was it deleted? That may have repeated records", made)


def ensure_dead_letter_topic(config: KafkaConfig, topic: str) -> None:
    """Make the dead-letter topic if it is missing; an existing one may have any number of partitions."""
    ensure_topic(config, _DEAD_LETTER_TOPIC, topic)


def ensure_topic(config: KafkaConfig, kind: TopicKind, topic: str) -> int:
    """Make a topic if it is missing, and return its number of partitions."""
    with Inquiry(config) as inquiry:
        return _ensure(inquiry, kind, topic)


def forbidden_topics(config: KafkaConfig, topics: set[str]) -> set[str]:
    """Return the topics to which the cluster says that we may not write."""
    forbidden = set()
    with Inquiry(config) as inquiry:
        asked = inquiry.admin.describe_topics(
            TopicCollection(sorted(topics)), include_authorized_operations=True, request_timeout=inquiry.remaining
        )
        for topic, answer in asked.items():
            try:
                allowed = inquiry.wait_for(answer).authorized_operations
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    forbidden.add(topic)
            except KafkaUnavailable:
                continue
            else:
                if allowed is not None and not {AclOperation.WRITE, AclOperation.ALL} & set(allowed):
                    forbidden.add(topic)
    return forbidden


def topic_settings(config: KafkaConfig, topic: str) -> dict[str, str] | None:
    """Return the settings of a topic that exists; None if we may not read them, or the broker shows none."""
    with Inquiry(config) as inquiry:
        if not inquiry.can_create():
            return None
        try:
            return _settings_once_there(inquiry, topic)[0]
        except (KafkaException, KafkaUnavailable):
            return None


def partition_count(config: KafkaConfig, topic: str) -> int:
    """Return a topic's number of partitions, 0 if it does not exist, or raise TopicHidden if we may not see it."""
    with Inquiry(config) as inquiry:
        return inquiry.partitions(topic)


def _ensure(inquiry: Inquiry, kind: TopicKind, topic: str) -> int:
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
    while True:
        answer = inquiry.admin.create_topics([new_topic], request_timeout=inquiry.remaining)[topic]
        try:
            inquiry.wait_for(answer)
        except KafkaException as error:
            code = error.args[0].code()
            if code in {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError._UNSUPPORTED_FEATURE}:  # noqa: SLF001
                return
            if code == KafkaError.INVALID_REPLICATION_FACTOR and not inquiry.is_late:
                time.sleep(_FENCED_INTERVAL_SECONDS)  # brokers that have just started do not count for a moment
                continue
            counted = "one partition" if kind.partitions == 1 else f"{kind.partitions} partitions"
            raise kind.error(
                f"{kind.name} {topic!r} does not exist and cannot be made: {_reason(inquiry, error)}; "
                f"create it with {counted}, or {grant('CREATE', inquiry.config)}"
            ) from None
        else:
            return


def _reason(inquiry: Inquiry, error: KafkaException) -> str:
    """Return why the cluster refuses something, or raise KafkaUnavailable if it did not answer."""
    if error.args[0].code() in NO_ANSWER:
        raise inquiry.unavailable("no answer") from None
    reason: str = error.args[0].str()
    return reason


def _widen(inquiry: Inquiry, kind: TopicKind, topic: str, width: int) -> None:
    """Give a topic more partitions, and wait until the metadata show them."""
    answer = inquiry.admin.create_partitions([NewPartitions(topic, width)], request_timeout=inquiry.remaining)[topic]
    try:
        inquiry.wait_for(answer)
    except KafkaException as error:
        raise kind.error(
            f"{kind.name} {topic!r} cannot be given {width} partitions: {_reason(inquiry, error)}; do it, or "
            f"{grant('ALTER', inquiry.config)}"
        ) from None
    while inquiry.partitions(topic) < width and not inquiry.is_late:
        time.sleep(APPEAR_INTERVAL_SECONDS)


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
        if not is_new:
            needed = grant("DESCRIBE, READ and WRITE", inquiry.config)
            raise kind.error(f"{kind.name} {topic!r} cannot be used: {reason}; {needed}")
        if inquiry.is_late:
            raise KafkaUnavailable(f"{kind.name} {topic!r} was made, and cannot be used yet: {reason}")
        time.sleep(APPEAR_INTERVAL_SECONDS)


def _settings_once_there(inquiry: Inquiry, topic: str) -> tuple[dict[str, str], bool]:
    """Return the settings of a topic that exists, as `Inquiry.settings_and_given` does, and raise as that.

    The question goes to any broker, and one may not have heard of a topic that was made just now.
    """
    while True:
        try:
            return inquiry.settings_and_given(topic)
        except KafkaException as error:
            if error.args[0].code() not in NO_SUCH_PARTITION:
                raise
            if inquiry.is_late:
                why = f"the settings of topic {topic!r} cannot be read yet: {error.args[0].str()}"
                raise KafkaUnavailable(why) from None
            error.__traceback__ = None  # kept by the future it came from, it keeps this frame and all its callers alive
        time.sleep(APPEAR_INTERVAL_SECONDS)


class TopicLimits:
    """The `max.message.bytes` of topics, from an admin client of its own, made at the first question."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin: AdminClient | None = None

    def close(self) -> None:
        """End the client's threads and connections."""
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.__exit__(None, None, None)

    def ask(self, topics: Collection[str]) -> dict[str, Future[int | None]]:
        """Ask without waiting: the futures hold a limit, None if the broker shows none, or KafkaException.

        There are none if no client can be made now.
        """
        if self._admin is None:
            try:
                self._admin = make_admin(self._config)
            except KafkaUnavailable:  # without limits batches have the usual size
                return {}
        resources = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        answers = self._admin.describe_configs(resources, request_timeout=_ANSWER_SECONDS)
        return {resource.name: _limit_in(answer) for resource, answer in answers.items()}


def _limit_in(answer: Future[Any]) -> Future[int | None]:
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
