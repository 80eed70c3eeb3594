"""The tracking topic: where each transaction leaves its manifest, and where a new term finds the last one.

The topic is compacted, so that the last manifest never expires. Each partition belongs to a single transactional.id:
another producer's open transaction would hide the manifest behind the last stable offset. A harvester's topic has one
partition; a relay's (`outbox_spark`) has one for each of its shards.

`last_manifest` may only be called after `init_transactions()`. Until then the predecessor's transaction may still be
open, and whatever is read is not the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.manifest import Manifest
from outbox_core.kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition, make_consumer

_FIRST_STEP = 64
_STEP_FACTOR = 16
_POLL_SECONDS = 0.1
_WATERMARK_SECONDS = 5.0


class ManifestNotRead(Exception):
    """The end of the tracking topic was not reached: the broker is away, or another transaction is open there."""


def last_manifest(
    kafka: Mapping[str, Any],
    topic: str,
    transactional_id: str,
    outbox: str,
    *,
    give_up: Callable[[], bool],
    partition: int = 0,
) -> Manifest | None:
    """The manifest of the last committed transaction, or None if there never was one.

    Args:
        kafka: librdkafka settings of the cluster.
        topic: the tracking topic.
        transactional_id: whose manifests they must be; the records' key.
        outbox: identity of the outbox, which the manifest must name.
        give_up: asked now and then; when true, `ManifestNotRead` is raised.
        partition: which partition belongs to this transactional.id.

    Raises:
        TrackingTopicError: if the topic holds something else, or another outbox's manifest.
        ManifestNotRead: if the end was not reached.
    """
    reader = _Reader(kafka, topic, partition, give_up)
    try:
        message = reader.last_committed()
    except KafkaException as error:
        raise ManifestNotRead(error.args[0].str()) from None
    finally:
        reader.close()
    if message is None:
        return None
    key, value = message.key(), message.value()
    if key != transactional_id.encode():
        raise TrackingTopicError(
            f"tracking topic {topic!r} is used by another transactional.id ({key!r}); every outbox needs its own"
        )
    manifest = Manifest.decode(value or b"")
    if manifest.outbox != outbox:
        raise TrackingTopicError(
            f"tracking topic {topic!r} belongs to the outbox {manifest.outbox}, not to {outbox}; "
            "set another tracking_topic, or delete this one if the outbox has been renamed and its harvester stopped"
        )
    return manifest


class _Reader:
    """Reads the only partition of the topic from the end backwards, in growing steps.

    Offsets have holes (transaction markers, aborted and compacted records), so a record's offset cannot be computed
    from the end: a stretch before the end is read, and a longer one if there was nothing in it.
    """

    def __init__(self, kafka: Mapping[str, Any], topic: str, partition: int, give_up: Callable[[], bool]) -> None:
        self._topic = topic
        self._partition = partition
        self._give_up = give_up
        self._settings = {
            **{name: value for name, value in kafka.items() if name != "group.instance.id"},
            "group.id": "outbox-tracking-reader",  # required by the client; no group is joined, nothing is committed
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 10,  # at the end of the topic nothing more comes: do not wait for it
        }
        self._consumer = make_consumer({**self._settings, "isolation.level": "read_committed"})

    def close(self) -> None:
        self._consumer.close()

    def last_committed(self) -> Message | None:
        low, high = self._watermarks()
        step = _FIRST_STEP
        while True:
            start = max(low, high - step)
            message = self._last_between(start, high)
            if message is not None or start == low:
                return message
            step *= _STEP_FACTOR

    def _watermarks(self) -> tuple[int, int]:
        """First offset and end of the partition, with open transactions, which a read_committed client leaves out."""
        consumer: Consumer = make_consumer({**self._settings, "isolation.level": "read_uncommitted"})
        try:
            while not self._give_up():
                try:
                    return consumer.get_watermark_offsets(
                        TopicPartition(self._topic, self._partition), timeout=_WATERMARK_SECONDS, cached=False
                    )
                except KafkaException as error:
                    if not error.args[0].retriable() and error.args[0].code() not in _PASSING:
                        raise
        finally:
            consumer.close()
        raise ManifestNotRead("the cluster did not answer in time")

    def _last_between(self, start: int, end: int) -> Message | None:
        """The last committed record from `start` on, once everything before `end` has been seen."""
        if start >= end:
            return None
        self._consumer.assign([TopicPartition(self._topic, self._partition, start)])
        last = None
        while not self._give_up():
            message = self._consumer.poll(_POLL_SECONDS)
            if message is None:
                continue
            error = message.error()
            if error is None:
                last = message
            elif error.code() in _FORBIDDEN:
                raise TrackingTopicError(f"cannot read tracking topic {self._topic!r}: {error.str()}; grant READ on it")
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001  confluent's public constant
                if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
                    raise ManifestNotRead(error.str())
            elif (message.offset() or 0) >= end:
                return last
        raise ManifestNotRead("the end of the tracking topic was not reached in time")


_FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)

_PASSING = frozenset(
    {
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
