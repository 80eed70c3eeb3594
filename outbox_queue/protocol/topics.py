"""The three topics: made if they are missing, and checked before use.

The message topic and the dead letter topic serve all queues. The marker topic gets its timestamps from the broker
(`LogAppendTime`): the trackers' deadline clock follows them, and with `CreateTime` it would follow the fastest consumer
clock. Settings that would lose messages are an error; other bad settings are logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from outbox_core.config.durations import format_duration
from outbox_core.kafka.topics import TopicKind, ensure_topic, topic_settings
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.errors import QueueTopicError
from outbox_queue.protocol.clients import common_settings

_log = logging.getLogger(__name__)

LOG_APPEND_TIME = "LogAppendTime"
_UNLIMITED = -1
_PARTITIONS = 8
_BATCH_OVERHEAD = 1000  # more than a batch and a record have besides key, value and headers
_LARGEST_DEAD_LETTER = 16 * 2**20  # other producers write messages that are too large for a start marker


class Topics(NamedTuple):
    """Numbers of partitions, and problems as they were logged."""

    message_partitions: int
    marker_partitions: int
    problems: tuple[str, ...]


def ensure_topics(config: QueueConfig) -> Topics:
    """Make missing topics, and check the others (`QueueTopicError`, `KafkaUnavailable`)."""
    message_partitions = _ensure_message_topic(config)
    marker_partitions = _ensure(config, "marker topic", config.marker_topic, config.marker_partitions)
    _ensure(config, "dead letter topic", config.dead_letters, config.message_partitions or _PARTITIONS)
    problems = _report(config, (config.message_topic, config.marker_topic, config.dead_letters))
    return Topics(message_partitions, marker_partitions, problems)


def ensure_message_topic(config: QueueConfig) -> int:
    """Make or check the message topic alone, as producers have no rights on others; return its number of partitions."""
    partitions = _ensure_message_topic(config)
    _report(config, (config.message_topic,))
    return partitions


def _ensure_message_topic(config: QueueConfig) -> int:
    wanted = config.message_partitions
    message_partitions = _ensure(config, "message topic", config.message_topic, wanted or _PARTITIONS)
    if wanted is not None and message_partitions < wanted:
        raise QueueTopicError(
            f"message topic {config.message_topic!r} has {message_partitions} partitions, and message_partitions is "
            f"{wanted}: stashed messages are sent to so many; set it to {message_partitions}, or "
            "add partitions to the topic"
        )
    return message_partitions


def _ensure(config: QueueConfig, name: str, topic: str, partitions: int) -> int:
    largest = config.max_message_bytes + _BATCH_OVERHEAD
    settings = {"max.message.bytes": str(largest), "cleanup.policy": "delete"}
    if topic == config.marker_topic:
        retention = str(milliseconds(config.marker_retention))
        settings |= {"message.timestamp.type": LOG_APPEND_TIME, "retention.ms": retention}
    elif topic == config.dead_letters:
        settings["cleanup.policy"] = "compact"  # dead letters never expire; a tombstone removes one
        settings["max.message.bytes"] = str(max(largest, _LARGEST_DEAD_LETTER))
    kind = TopicKind(name, settings, QueueTopicError, partitions, config.replication_factor)
    return ensure_topic(common_settings(config), kind, topic)


def _report(config: QueueConfig, topics: Sequence[str]) -> tuple[str, ...]:
    problems = tuple(_problems(config, topics))
    for problem in problems:
        _log.warning("%s", problem)
    return problems


def _problems(config: QueueConfig, topics: Sequence[str]) -> list[str]:
    problems = []
    for topic in topics:
        settings = topic_settings(common_settings(config), topic)
        if settings is None:
            problems.append(f"topic {topic!r}: its settings cannot be read, and were not checked")
            continue
        if int(settings["max.message.bytes"]) < config.max_message_bytes:
            raise QueueTopicError(
                f"topic {topic!r} takes records of {settings['max.message.bytes']} bytes (max.message.bytes), and "
                f"max_message_bytes is {config.max_message_bytes}: lower it, or raise the topic's"
            )
        if topic == config.dead_letters:
            problems += _dead_letter_problems(topic, settings)
            continue
        if "compact" in settings["cleanup.policy"]:
            lost = "start markers" if topic == config.marker_topic else "all messages of a queue but the last"
            raise QueueTopicError(
                f"topic {topic!r} has cleanup.policy={settings['cleanup.policy']}: compaction would remove {lost}; "
                "set it to delete"
            )
        if topic == config.marker_topic:
            problems += _marker_problems(config, settings)
    return problems


def _dead_letter_problems(topic: str, settings: dict[str, str]) -> list[str]:
    policy = settings["cleanup.policy"]
    if policy == "compact" or int(settings["retention.ms"]) == _retention_bytes(settings) == _UNLIMITED:
        return []
    problem = f"dead letter topic {topic!r} has cleanup.policy={policy} and a retention, so dead letters expire"
    return [f"{problem}; set it to compact"]


def _retention_bytes(settings: dict[str, str]) -> int:
    return int(settings.get("retention.bytes", _UNLIMITED))


def _marker_problems(config: QueueConfig, settings: dict[str, str]) -> list[str]:
    topic = config.marker_topic
    problems = []
    if settings["message.timestamp.type"] != LOG_APPEND_TIME:
        problems.append(
            f"marker topic {topic!r} has message.timestamp.type={settings['message.timestamp.type']}: redelivery goes "
            f"by the clocks of consumers, and is early or late by their error; set it to {LOG_APPEND_TIME}"
        )
    size = _retention_bytes(settings)
    if size != _UNLIMITED:
        problems.append(
            f"marker topic {topic!r} keeps {size} bytes of markers in a partition (retention.bytes): after a burst a "
            "new tracker might not find start markers; set it to -1"
        )
    retention = int(settings["retention.ms"])
    longest = max(config.max_processing_time, config.max_delay, config.redelivery_timeout)
    if retention != _UNLIMITED and retention < 2 * milliseconds(longest):
        problems.append(
            f"marker topic {topic!r} keeps markers for {retention} ms, less than twice the longest time that a message "
            f"may be in progress or delayed ({format_duration(longest)}): a new tracker might not find its start "
            "marker; raise retention.ms, or lower max_processing_time and max_delay"
        )
    return problems
