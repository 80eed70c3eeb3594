"""Refused records in words: which column is to blame, its size, and the limits that it has to be compared with."""

from __future__ import annotations

from typing import Final

from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import TOO_LARGE, ErrorKind, kind_of
from outbox_core.kafka.messages import Failure
from outbox_core.stores.interface import StoredRecord

_LARGEST_PARTITION: Final = 2**31 - 1


def size_limits(of_topic: int | None, of_client: int) -> str:
    """Return the two limits of a message in bytes, for an error; the topic's is None if it is not known.

    A limit is for the batch, with its header and the record's `outbox-id`: the very bytes of the row do not suffice.
    """
    topic = "" if of_topic is None else f"={of_topic}"
    needed = "must allow it and 1 KiB more"
    return f"; the topic's max.message.bytes{topic} and this client's message.max.bytes={of_client} {needed}"


def why_no_dead_letter(error: KafkaError, grant_write: str, max_message_bytes: int) -> str:
    """Return the reason for which a dead letter stays held that the dead-letter topic refused."""
    right = f"; {grant_write}" if kind_of(error) is ErrorKind.UNAUTHORIZED else ""
    advice = size_limits(None, max_message_bytes) if error.code() in TOO_LARGE else right
    return f"the dead-letter topic refused it: {error.str()}{advice}"


def too_large_for(record: StoredRecord) -> KafkaError:
    """Return the error of a record that is larger than its topic allows."""
    return KafkaError(
        KafkaError.MSG_SIZE_TOO_LARGE, f"too large for the max.message.bytes of topic {record.topic}: it was not sent"
    )


def refusal_of(failure: Failure, limits: str = "") -> str:
    """Return the reason for which a record was refused: its column, the error, and, if it is too large, `limits`."""
    record, text, code = failure.record, failure.error.str(), failure.error.code()
    if code in TOO_LARGE:
        sizes = {
            "kafka_key": _bytes_of(record.key),
            "kafka_value": _bytes_of(record.value),
            "kafka_header_keys": sum(map(_bytes_of, record.header_keys or ())),
            "kafka_header_values": sum(map(_bytes_of, record.header_values or ())),
        }
        largest = max(sizes, key=lambda column: sizes[column])
        return f"{largest}: {text} ({sizes[largest]} of its {sum(sizes.values())} bytes){limits}"
    if code == KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  its public name
        return f"kafka_partition: {text}: {record.partition}"
    if code == KafkaError.INVALID_RECORD and record.key is None:
        return f"kafka_key: {text}: NULL, which a compacted topic does not take"
    if code == KafkaError.TOPIC_EXCEPTION:
        return f"kafka_topic: {text}"
    if code == KafkaError._INVALID_ARG and not text.startswith("kafka_"):  # noqa: SLF001
        return f"{_odd_column(record)}: {text}"
    return text


def _bytes_of(part: bytes | str | None) -> int:
    """Return about the bytes that it has in Kafka."""
    return len(part.encode() if isinstance(part, str) else part or b"")


def _odd_column(record: StoredRecord) -> str:
    if not isinstance(record.topic, str):
        return "kafka_topic"
    if not isinstance(record.key, str | None):
        return "kafka_key"
    if not isinstance(record.value, str | bytes | None):
        return "kafka_value"
    if not all(isinstance(value, str | bytes | None) for value in record.header_values or ()):
        return "kafka_header_values"
    return "kafka_partition" if record.partition > _LARGEST_PARTITION else "the row is no message"
