"""The spans of a record's life, by OpenTelemetry's semantic conventions for messaging.

| Span              | Kind     | Made by                       | Parent                        | Links |
|-------------------|----------|-------------------------------|-------------------------------|-------|
| `create <topic>`  | PRODUCER | `stash`                       | the caller's span             | |
| `send <topic>`    | CLIENT   | the harvester, for a batch    | none                          | their creations |
| `process <topic>` | CONSUMER | `consume`, queue handlers     | the caller's, or the creation | the creation |

It also counts: `messaging.client.sent.messages`, `messaging.client.consumed.messages`, and the durations
`messaging.client.operation.duration` (of a batch) and `messaging.process.duration`, by the global meter provider.

The headers are written and read by the process's global propagator, W3C Trace Context unless the application has set
another. Baggage is never written to a record, and never taken from one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.util.types import AttributeValue

from outbox_core.record import OutboxRecord
from outbox_core.tracing import INSTRUMENTATION_NAME

Attributes = dict[str, AttributeValue]
RawHeaders = Iterable[tuple[str, bytes | str | None]]

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
CONSUMER_GROUP = "messaging.consumer.group.name"
MESSAGE_COUNT = "messaging.batch.message_count"
MESSAGE_ID = "messaging.message.id"
BODY_SIZE = "messaging.message.body.size"
KEY = "messaging.kafka.message.key"
TOMBSTONE = "messaging.kafka.message.tombstone"
OFFSET = "messaging.kafka.offset"
ERROR_TYPE = "error.type"

_SCHEMA = "https://opentelemetry.io/schemas/1.30.0"
_BAGGAGE = "baggage"
_LONGEST_TEXT = 8192
"""Characters of a header's value that a propagator gets: none of the known ones needs more."""
_OF_METRICS = frozenset({SYSTEM, OPERATION_NAME, OPERATION_TYPE, DESTINATION, PARTITION, CONSUMER_GROUP, ERROR_TYPE})


def has_global_provider() -> bool:
    """Return True once the application has set a tracer provider."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class SentBatch(NamedTuple):
    """The outcome of records that were handed to Kafka together.

    Times are nanoseconds since 1970. `origins` has the creation context of each record that has one, with attributes.
    `failures` says in a few words what failed, by its error; it is empty if all arrived.
    """

    began_ns: int
    ended_ns: int
    topics: frozenset[str]
    record_count: int
    origins: Sequence[tuple[SpanContext, Attributes]]
    failures: Mapping[str, str]


class _Instruments:
    """The metrics of one meter provider, None for the global one; without one they count nothing."""

    def __init__(self, provider: MeterProvider | None) -> None:
        meter = metrics.get_meter(INSTRUMENTATION_NAME, meter_provider=provider, schema_url=_SCHEMA)
        self.sent = meter.create_counter("messaging.client.sent.messages", "{message}")
        self.consumed = meter.create_counter("messaging.client.consumed.messages", "{message}")
        self.operation = meter.create_histogram("messaging.client.operation.duration", "s")
        self.processing = meter.create_histogram("messaging.process.duration", "s")


class Spans:
    """The spans of one tracer provider, and metrics, None for the global providers. Any thread may use it."""

    def __init__(self, provider: TracerProvider | None = None, meters: MeterProvider | None = None) -> None:
        self._tracer = trace.get_tracer(INSTRUMENTATION_NAME, tracer_provider=provider, schema_url=_SCHEMA)
        self._instruments = _Instruments(meters)

    def create(self, record: OutboxRecord, encode: Callable[[OutboxRecord], OutboxRecord]) -> OutboxRecord:
        """Return the encoded record with the context of its `create` span, unless it has a context already."""
        headers: Sequence[tuple[str, bytes | str | None]] = record.headers  # type: ignore[assignment]
        if not _context_names().isdisjoint(name.lower() for name, _ in headers):
            return encode(record)
        attributes = _attributes("create", record.topic, _of_message(record.key, record.value))
        if record.partition is not None:
            attributes[PARTITION] = str(record.partition)
        with self._creation(record.topic, attributes) as span:
            return encode(record).with_headers(_context_headers(span))

    def create_headers(self, destination: str, headers: RawHeaders) -> list[tuple[str, bytes | str | None]]:
        """Return headers with the context of a `create` span behind them, unless they have a context already."""
        given = list(headers)
        if not _context_names().isdisjoint(name.lower() for name, _ in given if isinstance(name, str)):
            return given
        with self._creation(destination, _attributes("create", destination)) as span:
            return [*given, *_context_headers(span)]

    def sent(self, batch: SentBatch) -> None:
        """Make the `send` span of a batch, which has ended."""
        topic = next(iter(batch.topics)) if len(batch.topics) == 1 else ""
        attributes = _attributes("send", topic, {MESSAGE_COUNT: batch.record_count})
        if batch.failures:
            attributes[ERROR_TYPE] = next(iter(batch.failures)) if len(batch.failures) == 1 else "_OTHER"
        span = self._tracer.start_span(
            f"send {topic}".rstrip(),
            Context(),  # the harvester's own: no request waits for it
            SpanKind.CLIENT,
            attributes,
            [Link(context, of_record) for context, of_record in batch.origins],
            start_time=batch.began_ns,
        )
        if batch.failures:
            span.set_status(Status(StatusCode.ERROR, "; ".join(batch.failures.values())))
        span.end(batch.ended_ns)
        measured = _measured(attributes)
        self._instruments.operation.record((batch.ended_ns - batch.began_ns) / 1e9, measured)
        self._instruments.sent.add(batch.record_count, measured)

    @contextmanager
    def process(self, destination: str, headers: RawHeaders, attributes: Attributes) -> Iterator[None]:
        """Run a handler in the `process` span of its record."""
        origin = self.origin(headers)
        links = [Link(origin)] if origin is not None else []
        context = None
        if origin is not None and not trace.get_current_span().get_span_context().is_valid:
            # The current context stays, baggage included; the record gives no more than its span.
            context = trace.set_span_in_context(trace.NonRecordingSpan(origin))
        described = _attributes("process", destination, attributes)
        name, began, measured = f"process {destination}", time.perf_counter(), _measured(described)
        with self._tracer.start_as_current_span(name, context, SpanKind.CONSUMER, described, links) as span:
            try:
                yield
            except Exception as error:
                measured[ERROR_TYPE] = type(error).__qualname__
                span.set_attribute(ERROR_TYPE, measured[ERROR_TYPE])
                raise
            finally:
                self._instruments.processing.record(time.perf_counter() - began, measured)
                self._instruments.consumed.add(1, measured)

    def origin(self, headers: RawHeaders | None) -> SpanContext | None:
        """Return the creation context in a record's headers; None if there is none that can be read.

        Rows that are no messages come here, too: their names and values may be arrays, or NULL.
        """
        texts = ((name.lower(), _text(value)) for name, value in headers or () if isinstance(name, str))
        carrier = {name: text for name, text in texts if text is not None}
        if not carrier:
            return None
        context = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
        return context if context.is_valid else None

    @contextmanager
    def _creation(self, destination: str, attributes: Attributes) -> Iterator[trace.Span]:
        # The error's text stays out of the span: a serializer's may show the value.
        with self._tracer.start_as_current_span(
            f"create {destination}",
            None,
            SpanKind.PRODUCER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                span.set_attribute(ERROR_TYPE, type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR))
                raise


def of_message(
    key: bytes | str | None,
    value: bytes | str | None,
    *,
    message_id: str | None = None,
    partition: int | None = None,
    offset: int | None = None,
    group: str | None = None,
) -> Attributes:
    """Return the attributes of a received message."""
    found: Attributes = _of_message(key, value)
    more = {MESSAGE_ID: message_id, OFFSET: offset, CONSUMER_GROUP: group}
    found.update({name: given for name, given in more.items() if given is not None})
    if partition is not None:
        found[PARTITION] = str(partition)
    return found


def now_ns() -> int:
    """Return the time in nanoseconds since 1970."""
    return time.time_ns()


def _attributes(operation: str, destination: str, more: Mapping[str, AttributeValue] | None = None) -> Attributes:
    found: Attributes = {SYSTEM: "kafka", OPERATION_NAME: operation, OPERATION_TYPE: operation}
    if destination:
        found[DESTINATION] = destination
    found.update(more or {})
    return found


def _measured(attributes: Attributes) -> Attributes:
    """Return the attributes of a span that a metric has, too: those with few values."""
    return {name: value for name, value in attributes.items() if name in _OF_METRICS}


def _of_message(key: object, value: object) -> Attributes:
    found: Attributes = {}
    if isinstance(key, bytes):
        key = key.decode(errors="replace")
    if isinstance(key, str):
        found[KEY] = key
    if value is None:
        found[TOMBSTONE] = True
    elif isinstance(value, bytes) or (isinstance(value, str) and value.isascii()):
        found[BODY_SIZE] = len(value)
    elif isinstance(value, str):
        found[BODY_SIZE] = len(value.encode())
    return found


def _context_names() -> set[str]:
    """Return the names of the headers that carry a span's context, in lower case."""
    return {name.lower() for name in propagate.get_global_textmap().fields} - {_BAGGAGE}


def _context_headers(span: trace.Span) -> list[tuple[str, str]]:
    carrier: dict[str, str] = {}
    # A context with the span alone has no baggage that could get into a table and into Kafka.
    propagate.inject(carrier, trace.set_span_in_context(span, Context()))
    return list(carrier.items())


def _text(value: object) -> str | None:
    if not isinstance(value, str | bytes) or len(value) > _LONGEST_TEXT:
        return None
    try:
        return value.decode("ascii") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return None
