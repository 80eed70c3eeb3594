"""Who leads, as the leader topic tells anybody who reads its end: the highest claim of the group.

Tasks of a relay run on machines that take no part in the election. Each looks once, after it has fenced its
transactional.id; see `takeover.py` for why that is enough.

The end of the topic is written, not asked for: a broker that was cut off and does not know yet that it no longer leads
the partition goes on telling an old end. A message of our own is acknowledged only by the partition's true leader, so
who has read up to it has read every claim that was acknowledged before it was written.

How far back? A leader writes heartbeats, which name its claim, and stops as soon as it reads a higher one. So some
tens of the group's messages before the end suffice, and nothing before our own claim matters. Groups may share the
topic: it is read from ever further back until there are so many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from outbox_core.config import LeaderNames
from outbox_core.election.claims import Claim, Contest, decode, encode_look
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    explained,
    make_consumer,
    make_producer,
)

_ENOUGH = 32  # some seconds of a leader's heartbeats
_FIRST_WINDOW = 128
_WIDER = 8
_TIMEOUT_SECONDS = 30.0


def highest_claim(kafka: Mapping[str, Any], leader: LeaderNames, since: int = 0) -> int:
    """The number of the group's highest claim that the end of its leader topic tells of, -1 if it tells of none.

    Writes a message that means nothing to anybody.

    Args:
        kafka: librdkafka settings of the cluster.
        leader: the group, and its leader topic, of one partition.
        since: a claim; it and what was written before it need not be looked at.

    Raises:
        KafkaUnavailable: if the topic cannot be written or read.
    """
    common = {name: value for name, value in kafka.items() if name not in {"group.instance.id", "group.id"}}
    give_up_at = time.monotonic() + _TIMEOUT_SECONDS
    end = _write(common, leader, give_up_at)
    consumer = make_consumer(
        {
            **common,
            "group.id": "kafka-outbox-claims",  # required by the client; no group is joined
            "isolation.level": "read_uncommitted",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        return _read_back(consumer, leader, since, end, give_up_at)
    finally:
        consumer.close()


def _write(kafka: Mapping[str, Any], leader: LeaderNames, give_up_at: float) -> int:
    """Write a look; return its offset."""
    producer = make_producer({**kafka, "acks": "all", "linger.ms": 0})
    outcome: list[tuple[KafkaError | None, int | None]] = []

    def note(error: KafkaError | None, message: Message) -> None:
        outcome.append((error, message.offset()))

    value = encode_look(contest=Contest(leader.group_id))
    producer.produce(leader.topic, value, partition=0, on_delivery=note)
    while not outcome and time.monotonic() < give_up_at:
        producer.poll(0.1)
    if not outcome:
        producer.purge()
        raise KafkaUnavailable(f"leader topic {leader.topic!r} cannot be written: no answer")
    [(error, offset)] = outcome
    if error is not None:
        raise KafkaUnavailable(f"leader topic {leader.topic!r} cannot be written: {explained(error, kafka)}")
    if offset is None:
        raise KafkaUnavailable(f"leader topic {leader.topic!r}: it is not known where a message was written")
    return offset


def _read_back(consumer: Consumer, leader: LeaderNames, since: int, end: int, give_up_at: float) -> int:
    """Read up to `end` from ever further back, until that tells enough."""
    first = max(since, _beginning(consumer, leader.topic, give_up_at))
    window = _FIRST_WINDOW
    while True:
        start = max(first, end - window)
        claims = _claims(consumer, leader, start, end, give_up_at)
        if start == first or len(claims) >= _ENOUGH:
            return max(claims, default=-1)
        window *= _WIDER


def _claims(consumer: Consumer, leader: LeaderNames, start: int, end: int, give_up_at: float) -> list[int]:
    """The claim that each message of the group between two offsets makes or names."""
    claims: list[int] = []
    if start >= end:
        return claims
    contest = Contest(leader.group_id)
    consumer.assign([TopicPartition(leader.topic, 0, start)])
    while time.monotonic() < give_up_at:
        message = consumer.poll(0.1)
        if message is None or message.error() is not None:
            continue
        offset = message.offset() or 0
        if offset >= end:
            return claims
        value = message.value()
        signal = decode(value if isinstance(value, bytes) else None)
        if signal is None or not contest.includes(signal.contest):
            continue
        claim = offset if isinstance(signal, Claim) else signal.claim
        if claim <= offset:  # else it is no leader's
            claims.append(claim)
    raise KafkaUnavailable(f"leader topic {leader.topic!r} was not read to its end in time")


def _beginning(consumer: Consumer, topic: str, give_up_at: float) -> int:
    while True:
        try:
            low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=5.0, cached=False)
        except KafkaException as error:
            if time.monotonic() > give_up_at:
                raise KafkaUnavailable(f"leader topic {topic!r} cannot be read: {error.args[0].str()}") from None
            time.sleep(0.1)
        else:
            return low
