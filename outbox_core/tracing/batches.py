"""The `send` spans of one producer: each record is noted when it is handed over and when its outcome is known.

A batch is what the harvester hands over at one time, or one transaction. It has one span, or several where it has more
records with a creation context than a span takes links (`MOST_LINKS`): tracers drop what is beyond that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox_core.stores.interface import StoredRecord
from outbox_core.tracing.spans import ERROR_TYPE, MESSAGE_ID, Attributes, SentBatch, Spans, now_ns

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MOST_LINKS = 128
"""The links that a span has at most by default (`OTEL_SPAN_LINK_COUNT_LIMIT`)."""


@dataclass(slots=True)
class _Batch:
    """Records under way whose span is yet to be made."""

    name: object
    began_ns: int
    topics: set[str] = field(default_factory=set)
    count: int = 0
    pending: int = 0
    origins: list[tuple[SpanContext, Attributes]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class SendBatches:
    """The batches of a producer. Used by the thread that sends and hears of deliveries."""

    def __init__(self, spans: Spans, outbox_name: str) -> None:
        self._spans = spans
        self._outbox_name = outbox_name
        self._current: _Batch | None = None
        self._under_way: dict[int, tuple[_Batch, Attributes]] = {}

    def handed_over(self, record: StoredRecord, batch: object, began_ns: int | None = None) -> None:
        """Note a record that belongs to a batch, which is named by anything that differs from the last one's name.

        `began_ns` is when the batch began, in nanoseconds since 1970; None for now.
        """
        current = self._current
        if current is None or current.name != batch or len(current.origins) >= MOST_LINKS:
            current = self._current = _Batch(batch, began_ns or now_ns())
        attributes: Attributes = {MESSAGE_ID: f"{self._outbox_name}:{record.id}"}
        origin = self._spans.origin(list(zip(record.header_keys or (), record.header_values or (), strict=False)))
        if origin is not None:
            current.origins.append((origin, attributes))
        current.topics.add(record.topic)
        current.count += 1
        current.pending += 1
        self._under_way[record.id] = current, attributes

    def arrived(self, record: StoredRecord) -> None:
        """Note that a record is in Kafka."""
        self._concluded(record.id, None)

    def failed(self, record: StoredRecord, error: str) -> None:
        """Note that a record was refused, or was not delivered; `error` is the name of Kafka's error."""
        self._concluded(record.id, error)

    def end(self, error: str | None = None) -> None:
        """Note the outcome of all records under way: that they arrived, or an error."""
        for identity in list(self._under_way):
            self._concluded(identity, error)

    def _concluded(self, identity: int, error: str | None) -> None:
        batch, attributes = self._under_way.pop(identity, (None, {}))
        if batch is None:
            return
        if error is not None:
            batch.errors[error] += 1
            attributes[ERROR_TYPE] = error
        batch.pending -= 1
        if not batch.pending:
            if self._current is batch:
                self._current = None
            self._make_span(batch)

    def _make_span(self, batch: _Batch) -> None:
        failures = {name: f"{number} of {batch.count} records: {name}" for name, number in batch.errors.items()}
        topics = frozenset(batch.topics)
        self._spans.sent(SentBatch(batch.began_ns, now_ns(), topics, batch.count, batch.origins, failures))
