"""Who leads, as the leader topic tells anybody who reads its end: the highest claim there is.

Tasks of a relay run on machines that take no part in the election. Each looks once, after it has fenced its
transactional.id; see `takeover.py` for why that is enough.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from outbox_core.election.claims import Claim, Heartbeat, decode
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import Consumer, KafkaError, KafkaException, TopicPartition, make_consumer

_LOOK_BACK = 64  # the leader's heartbeats name its claim; this many are some seconds of them
_TIMEOUT_SECONDS = 30.0


def highest_claim(kafka: Mapping[str, Any], topic: str) -> int:
    """The number of the highest claim that the end of a leader topic tells of, -1 if it tells of none.

    Args:
        kafka: librdkafka settings of the cluster.
        topic: the leader topic, of one partition.

    Raises:
        KafkaUnavailable: if it cannot be read.
    """
    consumer = make_consumer(
        {
            **{name: value for name, value in kafka.items() if name != "group.instance.id"},
            "group.id": "kafka-outbox-claims",  # required by the client; no group is joined
            "isolation.level": "read_uncommitted",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        return _read(consumer, topic, time.monotonic() + _TIMEOUT_SECONDS)
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, give_up_at: float) -> int:
    low, high = _watermarks(consumer, topic, give_up_at)
    if low >= high:
        return -1
    consumer.assign([TopicPartition(topic, 0, max(low, high - _LOOK_BACK))])
    highest = -1
    while time.monotonic() < give_up_at:
        message = consumer.poll(0.1)
        if message is None:
            continue
        offset = message.offset() or 0
        error = message.error()
        if error is None:
            value = message.value()
            match decode(value if isinstance(value, bytes) else None):
                case Claim():
                    highest = max(highest, offset)
                case Heartbeat(claim=claim) if claim < offset:
                    highest = max(highest, claim)
            if offset >= high - 1:
                return highest
        elif error.code() == KafkaError._PARTITION_EOF and offset >= high:  # noqa: SLF001
            return highest
    raise KafkaUnavailable(f"leader topic {topic!r} was not read to its end in time")


def _watermarks(consumer: Consumer, topic: str, give_up_at: float) -> tuple[int, int]:
    while True:
        try:
            return consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=5.0, cached=False)
        except KafkaException as error:
            if time.monotonic() > give_up_at:
                raise KafkaUnavailable(f"leader topic {topic!r} cannot be read: {error.args[0].str()}") from None
            time.sleep(0.1)
