"""The librdkafka settings of every Kafka client of a queue.

Each client that takes part in a protocol step asks for what that step needs, and for nothing that users may set
otherwise (`QueueConfig.kafka` is checked for that):

- messages and markers are delivered by idempotent producers, in order and once, and lost by no single broker;
- a message goes to any partition, however many messages its queue has; a marker to the partition its producer names;
- no client commits offsets by itself;
- queue groups and the trackers' group use the assignors that librdkafka has by default, as kafka-mq-go does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox_queue.config import QueueConfig, milliseconds

TRACKER_GROUP = "kafka-mq-redelivery"
_MOST_QUEUED_MESSAGES = 100_000
_SESSION_TIMEOUT_MS = 10_000
"""How long the partitions of a dead member wait for another; librdkafka's 45 s would be most of a redelivery."""


def group_of(queue: str) -> str:
    """The consumer group of a queue."""
    return f"kafka-mq-{queue}"


def common_settings(config: QueueConfig) -> dict[str, Any]:
    """What all clients have, and all that an admin client needs."""
    return {"reconnect.backoff.max.ms": 1000, **config.kafka, "bootstrap.servers": config.bootstrap_servers}


def producer_settings(config: QueueConfig, *, linger_ms: float = 5) -> dict[str, Any]:
    """An idempotent producer that reports only what could not be delivered.

    Args:
        config: of the queue.
        linger_ms: how long it waits for a batch to fill, unless the user has set that.
    """
    return {
        "linger.ms": linger_ms,
        "queue.buffering.max.messages": _MOST_QUEUED_MESSAGES,
        **common_settings(config),
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "random",
        "delivery.report.only.error": True,
        "delivery.timeout.ms": milliseconds(config.delivery_timeout),
        "message.max.bytes": config.max_message_bytes,
    }


def transactional_settings(config: QueueConfig, transactional_id: str) -> dict[str, Any]:
    """A transactional producer; its timeouts are short, since an open transaction holds up the readers of its topic."""
    timeout = milliseconds(config.transaction_timeout)
    return {
        **producer_settings(config, linger_ms=0),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout,
        "delivery.timeout.ms": min(milliseconds(config.delivery_timeout), timeout * 4 // 5),
    }


def consumer_settings(config: QueueConfig, group: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A consumer that reads what is committed and commits only what it is told to.

    Args:
        config: of the queue.
        group: the group's id.
        extra: further properties.
    """
    return {
        "session.timeout.ms": _SESSION_TIMEOUT_MS,
        **common_settings(config),
        **(extra or {}),
        "group.id": group,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
    }
