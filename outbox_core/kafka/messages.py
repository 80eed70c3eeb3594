"""Kafka messages made of stored records, and the headers of received messages."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from typing import Any, Final, NamedTuple

from outbox_core.claims.claims import CLAIM_HEADER, ClaimStore, claim_of, collect
from outbox_core.kafka.clients import KafkaError, Message
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.stores.interface import StoredRecord

_ANY_PARTITION: Final = -1
_MOST_HEADERS: Final = 100_000  # that a consumer of librdkafka reads, the id header among them
_PARTITION_OF_EMPTY_KEY: Final = 0  # the choice of librdkafka's `consistent`, too

ID_HEADER = "outbox-id"
ORIGIN_HEADER = "outbox-original-topic"
ORIGIN_PARTITION_HEADER = "outbox-original-partition"
ERROR_HEADER = "outbox-error"
"""Headers of a dead letter: where it was to go, and why it did not arrive there."""
# No set: a name that is an array cannot be looked for there.
_LETTER_HEADERS = (ORIGIN_HEADER, ORIGIN_PARTITION_HEADER, ERROR_HEADER)


# Not `message.headers()`: a hot call of a method is specialised, and then the exception is not looked for.
_ask_for_headers = methodcaller("headers")


class UnreadableHeaders(list[tuple[str, bytes | None]]):
    """The headers of a record with a header name that is not UTF-8: empty, as the client decodes none of them."""


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    """Return a record's headers, in their order; an empty `UnreadableHeaders` if the client cannot decode them.

    For a header name that is not UTF-8, confluent-kafka's `Message.headers()` returns a list with NULL in it and an
    exception set: SystemError at best, and a crash of the interpreter where the call is specialised or repeated. After
    this function it is safe.
    """
    try:
        headers: Any = _ask_for_headers(message)
    except (SystemError, UnicodeDecodeError):
        headers = UnreadableHeaders()
        message.set_headers(headers)  # in the place of a list that has NULL in it
    return [] if headers is None else headers


def bring_back(message: Message, store: ClaimStore | None) -> None:
    """Put a payload that is in a claim store into its record; errors are those of `collect`."""
    headers = headers_of(message)
    if any(name == CLAIM_HEADER for name, _ in headers):
        name = claim_of(headers, message.value())
        if name is not None:
            message.set_value(collect(store, name))


class DeadLetter(StoredRecord):
    """A held record on its way to the dead-letter topic, made by the harvester and never by a store."""

    __slots__ = ()


class Failure(NamedTuple):
    """A record that was not delivered, as far as the producer knows."""

    record: StoredRecord
    error: KafkaError
    alone: bool = False  # the error is the record's own, not its batch's
    partition: int | None = None  # -1 if not known yet, None if the record was never sent

    @property
    def kind(self) -> ErrorKind:
        """The kind of the error, for this record."""
        # A missing partition is the fault of a record that names it; else the topic was deleted, or has fewer now.
        names_none = self.record.partition == _ANY_PARTITION and self.error.code() == KafkaError._UNKNOWN_PARTITION  # noqa: SLF001
        return ErrorKind.UNKNOWN_TOPIC if names_none else kind_of(self.error)


def message_headers(record: StoredRecord, id_header: str, id_prefix: bytes) -> list[tuple[str, Any]]:
    """Return the record's own headers, and the one that tells repeats apart: `<outbox name>:<id>`.

    Leaves out the record's own header of that name, as an inbox would take another record's id from it. The record is
    not held: a consumer that forwards the headers it read writes such records honestly. Raises ValueError, naming the
    column, if names and values are no headers.
    """
    keys, values = record.header_keys, record.header_values
    headers: list[tuple[str, Any]] = []
    if keys or values:
        headers = _own_headers(keys or (), values or ())
        forged = {ID_HEADER, id_header or ID_HEADER}  # an empty name is one that a row may have
        if not forged.isdisjoint(keys or ()):
            headers = [header for header in headers if header[0] not in forged]
    if id_header:
        headers.append((id_header, b"%b%d" % (id_prefix, record.id)))
    return headers


def _own_headers(keys: Sequence[str], values: Sequence[bytes | str | None]) -> list[tuple[str, Any]]:
    if len(keys) >= _MOST_HEADERS:
        raise ValueError(f"kafka_header_keys: {len(keys):,} names; of so many headers librdkafka's consumers read none")
    try:
        "".join(keys)  # a name that is NULL, or an array, would be sent as Python writes it
        return list(zip(keys, values, strict=True))
    except TypeError:
        raise ValueError("kafka_header_keys: not every name is a text") from None
    except ValueError:
        counts = f"{len(keys)} names and {len(values)} values"
        raise ValueError(f"kafka_header_keys, kafka_header_values: {counts}") from None


def partition_of(record: StoredRecord) -> int:
    """Return the partition to send a record to, -1 if its key decides, or raise ValueError for an illegal one."""
    partition = record.partition
    if partition >= 0:
        return partition
    if partition != _ANY_PARTITION:
        raise ValueError(f"kafka_partition: there is no partition {partition}; NULL lets the key decide")
    # librdkafka spreads records with an empty key over all partitions, which would lose their order.
    return _PARTITION_OF_EMPTY_KEY if record.key == "" else _ANY_PARTITION


def dead_letter(record: StoredRecord, topic: str, error: str) -> DeadLetter:
    """Return the record for the dead-letter topic, with its destination and its error in headers."""
    _, origin, _, _, keys, values, partition, _ = record
    # Not strict: that there are not as many values as names may be what is wrong with it.
    own = zip(keys or (), values or (), strict=False)
    # Without its own of those names, which could claim another origin.
    headers: list[tuple[str, Any]] = [header for header in own if header[0] not in _LETTER_HEADERS]
    headers.append((ORIGIN_HEADER, origin))
    if partition >= 0:
        headers.append((ORIGIN_PARTITION_HEADER, str(partition)))
    headers.append((ERROR_HEADER, error))
    names, texts = [name for name, _ in headers], [value for _, value in headers]
    return DeadLetter(record.id, topic, record.key, record.value, names, texts, _ANY_PARTITION, record.create_time)
