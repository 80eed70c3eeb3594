"""The preparation of a record for its table: the last step before its column values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypedDict

from outbox_core import tracing
from outbox_core.claims.claims import CLAIM_HEADER, ClaimCheck, ClaimStore
from outbox_core.errors import InvalidConfig, InvalidRecord
from outbox_core.formats.serializer import Serializer
from outbox_core.record import BY_OUTBOX, OutboxRecord
from outbox_core.schema import TableName


class FormatOptions(TypedDict, total=False):
    """Options of an outbox about its records' values; `Preparation` explains them."""

    serializer: Serializer | None
    serializers: Mapping[str, Serializer | None] | None
    claim_check_above: int | None
    claim_store: ClaimStore | None


class Preparation:
    """The preparation of one outbox's records. Immutable; any thread may use it, if its serializers allow that.

    Args:
        serializer: makes bytes or text of each value but None, unless the record has a serializer of its own; None for
            the rules of `OutboxRecord.value`.
        serializers: the same for single topics, by name.
        claim_check_above: the most bytes that a serialized value may have in its record; larger ones go to
            `claim_store`, and a header names them (`outbox_core.claims`). None for no limit.
        claim_store: a store of payloads, which its consumers need too.
        insert_claim: the adapter's function of (connection, table, name, payload), for a store that is a table of the
            outbox's own database.

    Raises:
        InvalidConfig: if a serializer cannot be called, or one of the last two is given without the other.
    """

    __slots__ = ("_claim_check", "_insert_claim", "_is_plain", "_serializer", "_serializers")

    def __init__(
        self,
        *,
        serializer: Serializer | None = None,
        serializers: Mapping[str, Serializer | None] | None = None,
        claim_check_above: int | None = None,
        claim_store: ClaimStore | None = None,
        insert_claim: Callable[[Any, TableName, str, bytes], object] | None = None,
    ) -> None:
        self._insert_claim = insert_claim
        self._serializers = MappingProxyType(dict(serializers or {}))
        self._serializer = serializer
        self._claim_check = ClaimCheck.of(claim_store, claim_check_above)
        self._is_plain = serializer is None and not self._serializers and self._claim_check is None
        for name, given in (("serializer", serializer), *self._serializers.items()):
            if given is not None and not callable(given):
                raise InvalidConfig(f"serializers: that of {name!r} is {given!r:.200}, expected a function or None")

    def prepare(self, record: OutboxRecord, connection: object = None) -> OutboxRecord:
        """Return the record as it is written: serialized, and with the context of its `create` span.

        `connection` is the one on which it will be written, for `insert_claim`.

        Raises:
            InvalidRecord: if it is no record, or left its value to the outbox, which has no serializer for the topic.
            SerializationFailed: if a serializer fails, naming topic, field and cause.
            ClaimStoreFailed: if a large payload could not be written to the claim store.
        """
        spans = tracing.active()
        if spans is None and self._is_plain and getattr(record, "serializer", None) is None:
            return record  # the way of most: what is no record is refused with its column values
        if not isinstance(record, OutboxRecord):
            raise InvalidRecord(f"expected an OutboxRecord, got {type(record).__name__}")
        if spans is None:
            return self._encode(record, connection)
        return spans.create(record, partial(self._encode, connection=connection))

    def _encode(self, record: OutboxRecord, connection: object) -> OutboxRecord:
        serialized = self._serialize(record)
        if self._claim_check is None:
            return serialized
        table = getattr(self._claim_check.store, "insert_into", None)
        put = None
        if table is not None and connection is not None and self._insert_claim is not None:
            put = partial(self._insert_claim, connection, table)
        name = self._claim_check.deposit(record.topic, serialized.value, put)
        return serialized if name is None else serialized.claimed((CLAIM_HEADER, name))

    def _serialize(self, record: OutboxRecord) -> OutboxRecord:
        if record.serializer is not None and record.serializer != BY_OUTBOX:
            return record
        serializer = self._serializers.get(record.topic, self._serializer)
        if serializer is not None:
            return record.serialized(serializer)
        if record.serializer is not None and record.value is not None:
            raise InvalidRecord(f"value: its serializer is 'outbox', which has none for topic {record.topic!r}")
        return record
