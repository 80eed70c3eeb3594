"""The decision on a failed record, for both deliveries; pure.

    it failed in a batch, with a code that a record may be to blame for --> try it alone
    it failed alone, with such a code -----> hold it, with its key, or make it a dead letter
    we may not write to its topic ---------> hold the topic
    any other error -----------------------> back off its partition, or its topic; try that again by one record
    the producer is broken ----------------> mark everything again, with a new producer

Without a writable table of holds, a record that would be held is backed off with its key. A dead letter is held
already: it stays so, and its hold tells the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_core.harvest.failures.backoffs import Destination, destination_of_its_own
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import TOO_LARGE, ErrorKind, kind_of
from outbox_core.kafka.messages import DeadLetter, Failure
from outbox_core.stores.interface import NewHold, StoredRecord

_LARGEST_PARTITION: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry of the record, alone."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold of the record, or of its topic: see `new_hold`."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A backoff of the failure's destination: see `destination_of`."""


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark of everything, with a new producer."""


Decision = Retry | Hold | Backoff | Remark


def decide(failure: Failure, *, alone: bool, can_hold: bool) -> Decision:
    """Return the decision on a failure's record, `alone` if no other record can be to blame."""
    kind = failure.kind
    if kind is ErrorKind.FATAL:
        return Remark()
    if kind is ErrorKind.POISON and not alone:
        return Retry()
    if kind in (ErrorKind.POISON, ErrorKind.UNAUTHORIZED) and (can_hold or isinstance(failure.record, DeadLetter)):
        return Hold()
    return Backoff()


def destination_of(failure: Failure) -> Destination:
    """Return the destination to back off after a failure: the record's own if no other record is concerned."""
    record, partition = failure.record, failure.partition
    if failure.kind is ErrorKind.POISON:
        return destination_of_its_own(record)
    if failure.kind in (ErrorKind.UNKNOWN_TOPIC, ErrorKind.UNAUTHORIZED) or isinstance(record, DeadLetter):
        return record.topic, None
    if partition is None:  # it was never on its way
        return destination_of_its_own(record)
    return record.topic, partition if partition >= 0 else None


def new_hold(failure: Failure, grant_write: str, *, dead_letter: bool, limits: str = "") -> NewHold:
    """Return the hold of a record that failed alone, or of its topic if we may not write to it.

    `limits` tells those of topic and client to which a record that is too large has to be compared.
    """
    record, error = failure.record, failure.error
    if kind_of(error) is ErrorKind.UNAUTHORIZED:
        return NewHold(record.topic, None, None, "not authorized", f"{error.str()}; {grant_write}")
    told = f"{_described(failure)}{limits}" if error.code() in TOO_LARGE else _described(failure)
    return NewHold(record.topic, record.key, record.id, "refused", told, dead_letter, record.create_time)


def size_limits(of_topic: int | None, of_client: int) -> str:
    """Return the two limits of a message in bytes, for an error; the topic's is None if it is not known.

    A limit is for the batch, with its header and the record's `outbox-id`: the very bytes of the row do not suffice.
    """
    topic = "" if of_topic is None else f"={of_topic}"
    needed = "must allow it and 1 KiB more"
    return f"; the topic's max.message.bytes{topic} and this client's message.max.bytes={of_client} {needed}"


def why_no_dead_letter(error: KafkaError, grant_write: str, max_message_bytes: int) -> str:
    """Return the reason for which a dead letter stays held that the dead-letter topic refused."""
    advice = f"; {grant_write}" if kind_of(error) is ErrorKind.UNAUTHORIZED else ""
    if error.code() in TOO_LARGE:
        advice = size_limits(None, max_message_bytes)
    return f"the dead-letter topic refused it: {error.str()}{advice}"


def too_large_for(record: StoredRecord) -> KafkaError:
    """Return the error of a record that is larger than its topic allows."""
    return KafkaError(
        KafkaError.MSG_SIZE_TOO_LARGE, f"too large for the max.message.bytes of topic {record.topic}: it was not sent"
    )


def _described(failure: Failure) -> str:
    record, text, code = failure.record, failure.error.str(), failure.error.code()
    if code in TOO_LARGE:
        sizes = {
            "kafka_key": _bytes_of(record.key),
            "kafka_value": _bytes_of(record.value),
            "kafka_header_keys": sum(map(_bytes_of, record.header_keys or ())),
            "kafka_header_values": sum(map(_bytes_of, record.header_values or ())),
        }
        largest = max(sizes, key=lambda column: sizes[column])
        return f"{largest}: {text} ({sizes[largest]} of its {sum(sizes.values())} bytes)"
    if code == KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  its public name
        return f"kafka_partition: {text}: {record.partition}"
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
