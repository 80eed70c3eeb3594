"""The settings of librdkafka that the harvester needs, and those it cannot work with.

Any property is passed through untouched, except where a record could be lost (`acks`, idempotence, transactions,
suppressed delivery reports: refused) or sent by a process that no longer leads (`delivery.timeout.ms`: capped).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

KafkaSettings = Mapping[str, Any]

SERVERS = ("bootstrap.servers", "metadata.broker.list")
_FOREIGN_SCHEME = re.compile(r"(?:^|,)\s*(?!(?:plaintext|ssl|sasl_plaintext|sasl_ssl)://)[\w+.-]+://", re.IGNORECASE)
_ACKS = ("acks", "request.required.acks")
_DELIVERY_TIMEOUT = ("delivery.timeout.ms", "message.timeout.ms")
_LINGER = ("linger.ms", "queue.buffering.max.ms")
_PARTITIONER = "partitioner"
_MAX_POLL_INTERVAL = "max.poll.interval.ms"
_LIBRDKAFKA_MAX_POLL_INTERVAL = 300_000
_QUEUE_LENGTH = "queue.buffering.max.messages"
_LIBRDKAFKA_QUEUE_LENGTH = 100_000
_COMPRESSION = ("compression.type", "compression.codec")
_MAX_MESSAGE_BYTES = "message.max.bytes"
_BATCH_BYTES = ("batch.size", _MAX_MESSAGE_BYTES)
_LIBRDKAFKA_BYTES = 1_000_000  # its default for both
# Ours for message.max.bytes, as a dead-letter topic takes it: so the topic's own limit decides, and raising that is
# enough. It bounds what a row can have the harvester read.
_MESSAGE_BYTES = 16 * 2**20
_TRUE = ("true", "t", "1")
_LEASE_SHARE_FOR_SENDING = 0.6

GO_CLIENT_PREFIX = "go."
"""Settings of Go's Kafka client that are not librdkafka's."""


class Refusal(NamedTuple):
    """A property that the harvester cannot work with."""

    name: str
    why: str


EMPTY_SERVERS = "is empty; write for example `localhost:9092`"


class BatchSettings(NamedTuple):
    """The largest batch of the producer, in bytes before any compression."""

    largest: int
    is_compressed: bool


def is_blank(servers: str) -> bool:
    """Tell whether a list of servers names none, as in a template not filled in: clients would look for ever."""
    return not servers.replace(",", "").strip()


def refused_settings(settings: KafkaSettings) -> Iterator[Refusal]:
    """Yield properties that no client understands, or with which the producer could lose records."""
    for name, value in settings.items():
        if value is None:
            yield Refusal(name, "has no value")
        elif isinstance(value, Mapping | list | tuple | set):
            yield Refusal(name, "must be a single value; write librdkafka's properties with dots, lists with commas")
        elif name in SERVERS and is_blank(str(value)):
            yield Refusal(name, EMPTY_SERVERS)
        elif name in SERVERS and _FOREIGN_SCHEME.search(str(value)):
            yield Refusal(name, "must be `host:port`, without a scheme; security.protocol says how to connect")
    yield from _losing_settings({name: value for name, value in settings.items() if value is not None})


def _losing_settings(settings: KafkaSettings) -> Iterator[Refusal]:
    for name in _ACKS:
        if str(settings.get(name, "all")).lower() not in ("all", "-1"):
            yield Refusal(name, "must be `all`: with fewer acknowledgements a record that was removed may be lost")
    if str(settings.get("enable.idempotence", "true")).lower() not in _TRUE:
        yield Refusal("enable.idempotence", "must be true: without it a retry can change the order of records")
    if settings.get("transactional.id"):
        yield Refusal(
            "transactional.id", "must not be set here: write delivery: exactly-once, and transactional_id if need be"
        )
    if str(settings.get("delivery.report.only.error", "false")).lower() in _TRUE:
        yield Refusal("delivery.report.only.error", "must be false: only reported records are removed")
    if str(settings.get(_PARTITIONER, "consistent_random")).lower() == "random":
        yield Refusal(_PARTITIONER, "must not be `random`: it spreads the records of a key, which ends their order")
    for name in _DELIVERY_TIMEOUT + _LINGER:
        if name in settings and _milliseconds(settings[name]) is None:
            yield Refusal(name, "must be a number of milliseconds, 0 or more")
    length = settings.get(_QUEUE_LENGTH, 1)
    if not str(length).isdecimal():
        yield Refusal(_QUEUE_LENGTH, "must be a number of messages, 0 or more")


def longest_delivery_timeout(heartbeat_timeout: timedelta) -> timedelta:
    """Return the longest delivery timeout: a send ends before a lease that was fresh when it began."""
    return heartbeat_timeout * _LEASE_SHARE_FOR_SENDING


def wanted_delivery_timeout(base: KafkaSettings, producer: KafkaSettings) -> timedelta | None:
    """Return the user's delivery timeout, the producer's own first; librdkafka's 0 means for ever."""
    for settings in (producer, base):
        for name in _DELIVERY_TIMEOUT:
            if name in settings:
                milliseconds = _milliseconds(settings[name])
                return timedelta(milliseconds=milliseconds) if milliseconds else timedelta.max
    return None


def batch_settings(settings: KafkaSettings) -> BatchSettings:
    """Return the settings of batches, without those that are no numbers, which librdkafka refuses."""
    sizes = [settings.get(name, _LIBRDKAFKA_BYTES) for name in _BATCH_BYTES]
    largest = min((int(size) for size in map(str, sizes) if size.isdecimal()), default=_LIBRDKAFKA_BYTES)
    codec = next((str(settings[name]).lower() for name in _COMPRESSION if name in settings), "none")
    return BatchSettings(largest, codec != "none")


def max_poll_interval(settings: KafkaSettings) -> timedelta:
    """Return the limit of a hand-over, after which the group takes the leader for dead."""
    return timedelta(milliseconds=_milliseconds(settings.get(_MAX_POLL_INTERVAL, "")) or _LIBRDKAFKA_MAX_POLL_INTERVAL)


def linger(settings: KafkaSettings) -> timedelta:
    """Return the time for which the producer waits for a batch to fill."""
    for name in _LINGER:
        if name in settings:
            return timedelta(milliseconds=_milliseconds(settings[name]) or 0)
    return timedelta(0)


def max_message_bytes(settings: KafkaSettings) -> int:
    """Return the limit of a message, in bytes."""
    value = str(settings.get(_MAX_MESSAGE_BYTES, ""))
    return int(value) if value.isdecimal() else _MESSAGE_BYTES


def build_producer_settings(
    settings: KafkaSettings, *, name: str, delivery_timeout: timedelta, max_in_flight_records: int
) -> dict[str, Any]:
    """Return the settings of the publishing producer, from the merged ones of the user."""
    kept = {key: value for key, value in settings.items() if key not in _DELIVERY_TIMEOUT + _ACKS}
    queue_length = int(kept.get(_QUEUE_LENGTH, _LIBRDKAFKA_QUEUE_LENGTH))
    if not any(key in kept for key in _LINGER):
        kept["linger.ms"] = 5
    kept.setdefault("client.id", name)
    kept.setdefault(_MAX_MESSAGE_BYTES, _MESSAGE_BYTES)
    kept.setdefault("reconnect.backoff.max.ms", 1000)  # be back soon after the broker is
    return {
        **kept,
        "enable.idempotence": True,
        "acks": "all",
        "delivery.timeout.ms": max(1, delivery_timeout // timedelta(milliseconds=1)),
        # Never a full queue: as many again as may be in flight. 0 is librdkafka's "no limit".
        _QUEUE_LENGTH: max(queue_length, 2 * max_in_flight_records) if queue_length else 0,
    }


def _milliseconds(value: object) -> float | None:
    try:
        milliseconds = float(str(value))
    except ValueError:
        return None
    return milliseconds if 0 <= milliseconds <= 2**31 else None
