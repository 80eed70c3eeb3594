"""The preparation of a record for its table: the last step before its column values."""

from __future__ import annotations

from outbox_core import tracing
from outbox_core.errors import InvalidRecord
from outbox_core.record import OutboxRecord


class Preparation:
    """The preparation of one outbox's records. Immutable; any thread may use it."""

    __slots__ = ()

    def prepare(self, record: OutboxRecord) -> OutboxRecord:
        """Return the record as it is written: with the context of its `create` span, if there is tracing.

        Raises:
            InvalidRecord: if it is no record.
        """
        if not isinstance(record, OutboxRecord):
            raise InvalidRecord(f"expected an OutboxRecord, got {type(record).__name__}")
        spans = tracing.active()
        return self._encode(record) if spans is None else spans.create(record, self._encode)

    def _encode(self, record: OutboxRecord) -> OutboxRecord:
        return record
