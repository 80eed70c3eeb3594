"""The preparation of a record for its table: the last step before its column values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict

from outbox_core import tracing
from outbox_core.errors import InvalidConfig, InvalidRecord
from outbox_core.formats.serializer import Serializer
from outbox_core.record import BY_OUTBOX, OutboxRecord


class FormatOptions(TypedDict, total=False):
    """Options of an outbox about its records' values; `Preparation` explains them."""

    serializer: Serializer | None
    serializers: Mapping[str, Serializer | None] | None


class Preparation:
    """The preparation of one outbox's records. Immutable; any thread may use it, if its serializers allow that.

    Args:
        serializer: makes bytes or text of each value but None, unless the record has a serializer of its own; None for
            the rules of `OutboxRecord.value`.
        serializers: the same for single topics, by name.

    Raises:
        InvalidConfig: if a serializer cannot be called.
    """

    __slots__ = ("_serializer", "_serializers")

    def __init__(
        self,
        *,
        serializer: Serializer | None = None,
        serializers: Mapping[str, Serializer | None] | None = None,
    ) -> None:
        self._serializers = MappingProxyType(dict(serializers or {}))
        self._serializer = serializer
        for name, given in (("serializer", serializer), *self._serializers.items()):
            if given is not None and not callable(given):
                raise InvalidConfig(f"serializers: that of {name!r} is {given!r:.200}, expected a function or None")

    def prepare(self, record: OutboxRecord) -> OutboxRecord:
        """Return the record as it is written: serialized, and with the context of its `create` span.

        Raises:
            InvalidRecord: if it is no record, or left its value to the outbox, which has no serializer for the topic.
            SerializationFailed: if a serializer fails, naming topic, field and cause.
        """
        if not isinstance(record, OutboxRecord):
            raise InvalidRecord(f"expected an OutboxRecord, got {type(record).__name__}")
        spans = tracing.active()
        return self._encode(record) if spans is None else spans.create(record, self._encode)

    def _encode(self, record: OutboxRecord) -> OutboxRecord:
        if record.serializer is not None and record.serializer != BY_OUTBOX:
            return record
        serializer = self._serializers.get(record.topic, self._serializer)
        if serializer is not None:
            return record.serialized(serializer)
        if record.serializer is not None and record.value is not None:
            raise InvalidRecord(f"value: its serializer is 'outbox', which has none for topic {record.topic!r}")
        return record
