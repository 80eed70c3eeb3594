"""One linked trace from a request through the table and Kafka to the handler."""

import asyncio
import threading

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import outbox_sqlalchemy
from outbox_core import OutboxRecord
from outbox_core.consuming import consume
from outbox_core.schema import TableName, create_inbox_sql
from outbox_queue import QueueService
from tests.harvesting import wait_until
from tests.queueing import queue_config
from tests.traces import links_of, traced

AT_LEAST_ONCE = "at-least-once"
EXACTLY_ONCE = pytest.param("exactly-once", marks=pytest.mark.real_broker)


@pytest.fixture
def traces():
    """Spans are on, and kept in memory."""
    with traced() as made:
        yield made


def _consume(scene, topic, handler, count):
    """Handle the records of a topic's partition 0 in transactions with an inbox."""
    scene.execute(create_inbox_sql(TableName("inbox")))
    settings = {"enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "earliest"}
    consumer = Consumer({"bootstrap.servers": scene.bootstrap, "group.id": f"billing-{topic}", **settings})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        consume(consumer, handler, lambda: psycopg.connect(scene.database), max_records=count)
    finally:
        consumer.close()


@pytest.mark.parametrize("delivery", [AT_LEAST_ONCE, EXACTLY_ONCE])
def test_from_request_to_handler(scene, make_topic, traces, delivery):
    """Request, creation and handler are one trace; the harvester's span is linked with every creation."""
    topic = make_topic(1)
    with traces.tracer.start_as_current_span("POST /orders") as request:
        scene.stash(*(OutboxRecord(topic, "k", number) for number in range(3)))
    scene.drain(config={"delivery": delivery})

    def handle(_, message):
        with traces.tracer.start_as_current_span(f"charge {message.value().decode()}"):
            pass

    _consume(scene, topic, handle, 3)
    created, processed = traces.named(f"create {topic}"), traces.named(f"process {topic}")
    ids = [span.context.span_id for span in created]
    its = request.get_span_context()
    assert {span.context.trace_id for span in [*created, *processed, *traces.named("charge")]} == {its.trace_id}
    assert [span.parent.span_id for span in created] == [its.span_id] * 3
    assert [span.parent.span_id for span in processed] == ids
    assert [links_of(span) for span in processed] == [[identity] for identity in ids]
    assert [span.parent.span_id for span in traces.named("charge")] == [span.context.span_id for span in processed]
    sent = traces.named(f"send {topic}")
    assert [identity for span in sent for identity in links_of(span)] == ids
    assert {(span.kind, span.parent, span.status.status_code) for span in sent} == {
        (SpanKind.CLIENT, None, StatusCode.UNSET)
    }
    first = dict(processed[0].attributes)
    assert first.pop("messaging.message.id").endswith(".public.outbox:1")
    assert first == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.kafka.message.key": "k",
        "messaging.kafka.offset": first["messaging.kafka.offset"],
        "messaging.message.body.size": 1,
        "messaging.consumer.group.name": f"billing-{topic}",
    }


@pytest.mark.parametrize(
    "delivery",
    [AT_LEAST_ONCE, pytest.param("exactly-once", marks=[pytest.mark.real_broker, pytest.mark.complete])],
)
def test_a_refused_send_marks_its_span(scene, make_topic, traces, delivery):
    """A record that is too large for its topic marks a `send` span with Kafka's error; the others arrive as ever."""
    topic, small = make_topic(1), make_topic(1, config={"max.message.bytes": "2000"})
    scene.stash(OutboxRecord(small, "big", b"x" * 5_000), OutboxRecord(topic, "k", b"1"))
    with scene.running(config={"delivery": delivery}):
        wait_until(scene.held, "the record is held")
        wait_until(lambda: scene.count() == 1, "the other is published")
    sent = traces.named("send")
    errors = {span.attributes["error.type"] for span in sent if span.status.status_code is StatusCode.ERROR}
    assert errors == {"MSG_SIZE_TOO_LARGE"}
    (big,), (good,) = traces.named(f"create {small}"), traces.named(f"create {topic}")
    outcomes = [(link.context.span_id, link.attributes.get("error.type")) for span in sent for link in span.links]
    assert {error for identity, error in outcomes if identity == big.context.span_id} == {"MSG_SIZE_TOO_LARGE"}
    assert (good.context.span_id, None) in outcomes
    assert [message.value for message in scene.read(topic)] == [b"1"]


def test_an_asynchronous_session(scene, traces):
    """A record that is stashed in an asynchronous session belongs to the span of its task."""

    async def run():
        engine = create_async_engine(outbox_sqlalchemy.sqlalchemy_url(scene.database))
        with traces.tracer.start_as_current_span("request") as request:
            async with AsyncSession(engine) as session, session.begin():
                await outbox_sqlalchemy.astash(session, OutboxRecord("t"))
        await engine.dispose()
        return request.get_span_context()

    its = asyncio.run(run())
    (created,) = traces.named("create t")
    assert created.parent.span_id == its.span_id
    assert [row.kafka_header_keys for row in scene.rows()] == [["traceparent"]]


@pytest.mark.real_broker
def test_a_message_of_a_queue(scene, make_topic, traces):
    """A handler of a queue continues the trace of the request that stashed its message, or that sent it."""
    config = queue_config(scene.bootstrap, make_topic)
    queue = QueueService(config).queue(f"jobs-{config.message_topic}")
    with traces.tracer.start_as_current_span("request") as request:
        with scene.connect() as connection:
            queue.stash(connection, b"stashed")
        with queue.producer() as producer:
            producer.send(b"sent")
    scene.drain()
    handled, stop = [], threading.Event()

    def handle(message):
        handled.append(message.payload)
        if len(handled) == 2:
            stop.set()

    assert queue.run(handle, stop=stop, on_signals=False)
    its = request.get_span_context()
    created = {span.context.span_id: span for span in traces.named(f"create {queue.name}")}
    processed = traces.named(f"process {queue.name}")
    assert sorted(handled) == [b"sent", b"stashed"]
    assert {span.context.trace_id for span in [*created.values(), *processed]} == {its.trace_id}
    assert {identity for span in processed for identity in links_of(span)} == set(created)
    assert len(created) == len(processed) == 2
