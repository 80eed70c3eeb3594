"""Spans: what they say, what travels in headers, and that there is nothing without tracing."""

import subprocess
import sys

import pytest
from confluent_kafka import KafkaError, KafkaException
from opentelemetry import baggage, context, trace
from opentelemetry.trace import SpanKind, StatusCode

from outbox_core import OutboxRecord, Stasher, tracing
from outbox_core.errors import InvalidRecord
from outbox_core.harvest.at_least_once.traced_publisher import TracedPublisher
from outbox_core.kafka.traced_producer import TracedRecordProducer
from outbox_core.kafka.transactions import Ended
from outbox_core.schema import TEXT_LAYOUT
from outbox_core.stores.interface import StoredRecord
from outbox_core.tracing.batches import MOST_LINKS
from outbox_queue.producing.payloads import with_creation
from tests.traces import links_of, traced

UNSET = """
import os, sys
from outbox_core import OutboxRecord, Stasher, tracing
assert tracing.active() is None
assert Stasher().row(OutboxRecord("t"))[3] == []
assert not any(name.startswith("opentelemetry") for name in sys.modules)
import opentelemetry.trace
assert tracing.active() is None, "no provider is set"
from opentelemetry.sdk.trace import TracerProvider
opentelemetry.trace.set_tracer_provider(TracerProvider())
print(tracing.active() is not None, Stasher().row(OutboxRecord("t"))[3])
"""


@pytest.fixture
def traces():
    """Spans are on, and kept in memory."""
    with traced() as made:
        yield made


def _headers(row):
    return dict(zip(row[3], row[4], strict=True))


def test_create_span(traces):
    """A stash makes a PRODUCER span below the caller's, whose context is in the record's headers."""
    with traces.tracer.start_as_current_span("request") as request:
        row = Stasher().row(OutboxRecord("orders", 7, "böx", headers={"a": "b"}, partition=3))
    (created,) = traces.named("create orders")
    assert created.kind is SpanKind.PRODUCER
    assert created.parent.span_id == request.get_span_context().span_id
    assert dict(created.attributes) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "3",
        "messaging.kafka.message.key": "7",
        "messaging.message.body.size": 4,
    }
    its = created.context
    parent = f"00-{its.trace_id:032x}-{its.span_id:016x}-{its.trace_flags:02x}"
    assert _headers(row) == {"a": b"b", "traceparent": parent.encode()}


def test_tombstone_and_text_layout(traces):
    """A tombstone is marked as one; a text table gets the context as text."""
    row = Stasher("t", TEXT_LAYOUT).row(OutboxRecord("orders", "k"))
    assert _headers(row)["traceparent"].startswith("00-")
    (created,) = traces.named("create")
    assert created.attributes["messaging.kafka.message.tombstone"] is True


@pytest.mark.usefixtures("traces")
def test_baggage_stays_where_it_is():
    """No baggage gets into a record, and a record's own stays; a handler sees the caller's baggage."""
    token = context.attach(baggage.set_baggage("secret", "1"))
    try:
        row = Stasher().row(OutboxRecord("t", headers={"baggage": "mine=2"}))
        assert [*_headers(row)] == ["baggage", "traceparent"]
        assert _headers(row)["baggage"] == b"mine=2"
        with tracing.active().process("t", _headers(row).items(), {}):
            assert baggage.get_all() == {"secret": "1"}
    finally:
        context.detach(token)


def test_a_context_of_ones_own_is_kept(traces):
    """A record that has a trace context already gets neither a span nor another context."""
    given = {"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert _headers(Stasher().row(OutboxRecord("t", headers=given))) == {"Traceparent": given["Traceparent"].encode()}
    assert traces.named("") == []


def test_failing_creation_shows_no_text(traces):
    """A failed creation marks its span by the error's type alone: texts of serializers may show values."""

    def fail(_):
        raise InvalidRecord("value: 4111-1111")

    with pytest.raises(InvalidRecord):
        tracing.active().create(OutboxRecord("t"), fail)
    (created,) = traces.named("create")
    assert created.status.status_code is StatusCode.ERROR
    assert created.attributes["error.type"] == "InvalidRecord"
    assert "4111" not in created.to_json()


def test_process_is_a_child_of_the_creation_unless_there_is_a_span(traces):
    """A handler's span belongs to the record's trace, or to the current one, and is linked with the creation."""
    headers = list(_headers(Stasher().row(OutboxRecord("t"))).items())
    with tracing.active().process("t", headers, {}):
        pass
    with traces.tracer.start_as_current_span("loop") as loop, tracing.active().process("t", headers, {}):
        pass
    (created,) = traces.named("create")
    alone, below = traces.named("process t")
    assert alone.parent.span_id == created.context.span_id
    assert below.parent.span_id == loop.get_span_context().span_id
    assert links_of(alone) == links_of(below) == [created.context.span_id]
    assert alone.kind is SpanKind.CONSUMER


@pytest.mark.parametrize("bad", [b"\xff", b"garbage", None, b"00-00-00-00"])
def test_unreadable_context(traces, bad):
    """A handler runs in a span of its own if the context in the headers cannot be read."""
    with pytest.raises(ZeroDivisionError), tracing.active().process("t", [("traceparent", bad)], {}):
        raise ZeroDivisionError
    (span,) = traces.named("process")
    assert span.parent is None
    assert not span.links
    assert span.attributes["error.type"] == "ZeroDivisionError"
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ([None], [b"1"]),
        ([["traceparent"]], [[b"1"]]),
        (["traceparent"], [[b"1"]]),
        (["traceparent", "tracestate"], [b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", b" " * 200_000]),
    ],
)
@pytest.mark.timeout(60)
def test_headers_of_a_row_that_is_no_message(traces, names, values):
    """A row with arrays, NULL or an endless text in the place of a context neither ends nor delays a harvester."""
    producer = _Producer()
    publisher = _publisher(producer)
    publisher.send([_stored(1)._replace(header_keys=names, header_values=values)], 1.0)
    publisher.close()
    (span,) = traces.named("send")
    assert len(span.links) == (len(names) == 2)


def test_queue_headers(traces):
    """A message that is sent to a queue carries its creation, behind the user's headers."""
    pairs = with_creation("jobs", {"a": "b"})
    assert [name for name, _ in pairs] == ["a", "traceparent"]
    assert [span.name for span in traces.named("create")] == ["create jobs"]
    tracing.disable()
    assert with_creation("jobs", {"a": "b"}) == {"a": "b"}


class _Producer:
    """A Kafka producer that keeps the callbacks of deliveries."""

    def __init__(self, refuses=()):
        self.callbacks = []
        self._refuses = refuses

    def produce(self, *record, on_delivery, **_):
        value = record[1]
        if value in self._refuses:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        self.callbacks.append(on_delivery)


def _publisher(producer):
    return TracedPublisher(lambda _: producer, id_header="outbox-id", outbox_name="box", spans=tracing.active())


def _stored(number, topic="t", value=b"v"):
    """Return a stashed record as the harvester reads it."""
    _, key, value, names, values, _ = Stasher().row(OutboxRecord(topic, number, value))
    return StoredRecord(number, topic, key, value, names, values, -1, 99)


def _deliver(producer, *errors):
    pending, producer.callbacks = producer.callbacks, []
    for on_delivery, error in zip(pending, errors, strict=True):
        on_delivery(error, None)


def test_send_span_of_a_batch(traces):
    """The records of a batch have one CLIENT span without a parent, linked with each creation."""
    producer = _Producer()
    publisher = _publisher(producer)
    with traces.tracer.start_as_current_span("harvester"):
        for number in (1, 2, 3):
            assert publisher.send([_stored(number)], 1.0)
        _deliver(producer, None, None, None)
    (sent,) = traces.named("send")
    created = traces.named("create")
    assert (sent.name, sent.kind, sent.parent) == ("send t", SpanKind.CLIENT, None)
    assert links_of(sent) == [span.context.span_id for span in created]
    assert [link.attributes["messaging.message.id"] for link in sent.links] == ["box:1", "box:2", "box:3"]
    assert sent.attributes["messaging.batch.message_count"] == 3
    assert sent.start_time <= sent.end_time
    assert sent.status.status_code is StatusCode.UNSET


def test_batches_are_apart(traces):
    """Records that are sent at other times have other spans; a batch of several topics names none."""
    producer = _Producer()
    publisher = _publisher(producer)
    publisher.send([_stored(1)], 1.0)
    publisher.send([_stored(2, "u")], 1.0)
    publisher.send([_stored(3)], 2.0)
    publisher.send([_stored(4)], 2.0, alone=True)
    _deliver(producer, None, None, None, None)
    sent = traces.named("send")
    assert [(span.name, span.attributes["messaging.batch.message_count"]) for span in sent] == [
        ("send", 2),
        ("send t", 1),
        ("send t", 1),
    ]
    assert "messaging.destination.name" not in sent[0].attributes


def test_refused_records_mark_their_span(traces):
    """A record that the client or the broker refuses marks the span, and the link of its creation."""
    producer = _Producer(refuses=[b"big"])
    publisher = _publisher(producer)
    publisher.send([_stored(1)], 1.0)
    publisher.send([_stored(2, value=b"big")], 1.0)
    publisher.send([_stored(3)], 1.0)
    _deliver(producer, None, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    (sent,) = traces.named("send")
    assert sent.status.status_code is StatusCode.ERROR
    assert sent.attributes["error.type"] == "_OTHER"
    assert sent.status.description == ("1 of 3 records: MSG_SIZE_TOO_LARGE; 1 of 3 records: TOPIC_AUTHORIZATION_FAILED")
    assert [link.attributes.get("error.type") for link in sent.links] == [
        None,
        "MSG_SIZE_TOO_LARGE",
        "TOPIC_AUTHORIZATION_FAILED",
    ]


def test_no_link_is_lost(traces):
    """A batch of more records than a span takes links has several spans."""
    producer = _Producer()
    publisher = _publisher(producer)
    count = 2 * MOST_LINKS + 1
    for number in range(1, count + 1):
        publisher.send([_stored(number)], 1.0)
    _deliver(producer, *[None] * count)
    sent = traces.named("send")
    assert [len(span.links) for span in sent] == [MOST_LINKS, MOST_LINKS, 1]
    assert sum(span.dropped_links for span in sent) == 0


def test_metrics(traces):
    """Messages and durations are counted by destination, with the attributes that have few values."""
    producer = _Producer()
    publisher = _publisher(producer)
    for number in (1, 2):
        publisher.send([_stored(number)], 1.0)
    _deliver(producer, None, None)
    with tracing.active().process("t", [], {"messaging.message.id": "1"}):
        pass
    with pytest.raises(ZeroDivisionError), tracing.active().process("u", [], {}):
        raise ZeroDivisionError
    assert traces.points("messaging.client.sent.messages")["t"].value == 2
    assert traces.points("messaging.client.operation.duration")["t"].count == 1
    assert traces.points("messaging.client.consumed.messages")["t"].value == 1
    durations = traces.points("messaging.process.duration")
    assert "messaging.message.id" not in durations["t"].attributes
    assert durations["u"].attributes["error.type"] == "ZeroDivisionError"


def test_closing_ends_spans(traces):
    """Records under way when the publisher is closed have a span with an unknown outcome."""
    publisher = _publisher(_Producer())
    publisher.send([_stored(1)], 1.0)
    publisher.close()
    (sent,) = traces.named("send")
    assert sent.attributes["error.type"] == "unknown"


def test_switch(traces):
    """Off means off: no span, no header; on again means the global provider, of which there is none here."""
    tracing.disable()
    assert Stasher().row(OutboxRecord("t"))[3] == []
    tracing.enable()
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert tracing.active() is None
    assert traces.named("") == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "True ['traceparent']"),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "redis, kafka-outbox"}, "False []"),
        ({"OTEL_SDK_DISABLED": "true"}, "True []"),
    ],
)
def test_nothing_before_the_application_sets_a_provider(variables, expected):
    """A process that does not use OpenTelemetry never imports it; the environment switches spans off."""
    done = subprocess.run([sys.executable, "-c", UNSET], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.usefixtures("traces")
def test_traced_producer_is_replaced():
    """A transactional producer that makes spans is replaced like any other, with the settings of its batches."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "transactional.id": "t", "log_level": 0}
    producer = TracedRecordProducer(
        settings, spans=tracing.active(), outbox_name="box", id_header="outbox-id", timeout_seconds=1.0
    )
    producer.limit_batches(1_000)
    assert producer.must_replace
    assert producer.replace(lambda: True) == Ended("init_transactions was given up")
    producer.discard()
