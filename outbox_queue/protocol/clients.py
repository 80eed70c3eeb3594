"""The librdkafka settings of every Kafka client of a queue; `QueueConfig.kafka` may not change their protocol part.

Idempotent producers deliver messages and markers in order and once, a message to any partition, a marker to the one
that its producer names. No client commits offsets by itself; groups use librdkafka's default assignors, as kafka-mq-go
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox_queue.config import QueueConfig, milliseconds

TRACKER_GROUP = "kafka-mq-redelivery"
PARTITIONER = {"partitioner": "murmur2_random"}  # Go's: one partition for a queue's markers of Go and Python
UNTIL_FLUSH_MS = 100  # linger of producers that are flushed after each batch: a request for each partition is enough

_MOST_QUEUED_MESSAGES = 100_000
_LARGEST_BATCH_BYTES = 1_000_000  # librdkafka's default
_SOCKET_TIMEOUT_MS = 10_000  # until a connection is made anew that something between dropped without a word
_METADATA_INTERVAL_MS = 30_000  # librdkafka would read nothing of a new partition for five minutes
_SESSION_TIMEOUT_MS = 10_000  # librdkafka's 45 s would be most of a redelivery_timeout
# Members poll every second, unless Kafka lets one wait for a delivery, up to its timeout: the group must not take that
# one for dead. The client waits as long for an answer to its request to join before it asks again: with librdkafka's 5
# minutes, an answer that was lost with its connection would cost those.
_MAX_POLL_INTERVAL_MS = 45_000


def group_of(queue: str) -> str:
    """Return the consumer group of a queue."""
    return f"kafka-mq-{queue}"


def common_settings(config: QueueConfig) -> dict[str, Any]:
    """Return the settings of all clients, which are enough for an admin client."""
    return {
        "reconnect.backoff.max.ms": 1000,
        "topic.metadata.refresh.interval.ms": _METADATA_INTERVAL_MS,
        "socket.timeout.ms": min(_SOCKET_TIMEOUT_MS, milliseconds(config.transaction_timeout)),
        **config.kafka,
        "bootstrap.servers": config.bootstrap_servers,
    }


def producer_settings(config: QueueConfig, *, linger_ms: float = 5) -> dict[str, Any]:
    """Return settings of an idempotent producer that reports only failed deliveries."""
    return {
        "linger.ms": linger_ms,
        "queue.buffering.max.messages": _MOST_QUEUED_MESSAGES,
        # Topics limit a batch, not a record: it would be refused as a whole, and as often as it is tried.
        "batch.size": min(_LARGEST_BATCH_BYTES, config.max_message_bytes),
        **common_settings(config),
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "random",
        "delivery.report.only.error": True,
        "delivery.timeout.ms": milliseconds(config.delivery_timeout),
        "message.max.bytes": config.max_message_bytes,
    }


def transactional_settings(config: QueueConfig, transactional_id: str) -> dict[str, Any]:
    """Return settings of a transactional producer; an open transaction holds up readers, so its timeouts are short."""
    timeout = milliseconds(config.transaction_timeout)
    return {
        **producer_settings(config, linger_ms=UNTIL_FLUSH_MS),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout,
        "delivery.timeout.ms": min(milliseconds(config.delivery_timeout), timeout * 4 // 5),
    }


def consumer_settings(config: QueueConfig, group: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings of a consumer that reads committed records, and commits only explicitly."""
    times = {"session.timeout.ms": _SESSION_TIMEOUT_MS}
    if not times.keys() & config.kafka.keys():  # librdkafka refuses a session that is longer
        times["max.poll.interval.ms"] = max(_MAX_POLL_INTERVAL_MS, milliseconds(config.delivery_timeout * 1.5))
    return {
        **times,
        **common_settings(config),
        **(extra or {}),
        "group.id": group,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
    }
