"""Serializers at stash time: the record's own, the outbox's, those of topics; a schema registry over real HTTP."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from uuid import UUID

import msgspec
import orjson
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from outbox_core import OutboxRecord, SerializationFailed, Stasher
from outbox_core.errors import InvalidConfig, InvalidRecord
from outbox_core.record import json_default
from outbox_django import OutboxTable
from outbox_queue.protocol.markers_pb2 import Marker
from outbox_sqlalchemy import Outbox

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "total", "type": "long"}, {"name": "blob", "type": ["null", "bytes"], "default": None}],
    }
)
JSON_SCHEMA = json.dumps(
    {"title": "Order", "type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
)


def _context(topic, headers=None):
    return SerializationContext(topic, MessageField.VALUE, headers)


def _shout(value):
    return f"{value}!"


def _refuse(value):
    raise LookupError(f"no {value}")


# -- whose serializer


def test_the_records_own():
    """A record's serializer runs when it is made, and only then."""
    calls = []
    record = OutboxRecord("t", value={"a": 1}, serializer=lambda value: calls.append(value) or b"x")
    assert (record.value, calls) == (b"x", [{"a": 1}])
    assert Stasher(serializer=_refuse, serializers={"t": _refuse}).row(record)[2] == b"x"
    moved = replace(record, topic="u")
    assert (moved.topic, Stasher(serializer=_refuse).row(moved)[2]) == ("u", b"x")
    assert calls == [{"a": 1}]
    assert record == OutboxRecord("t", value=b"x")


def test_the_outboxs_and_the_topics():
    """The outbox's serializer gets the value as it was given, whatever its type; a topic's comes first."""
    stasher = Stasher(serializer=repr, serializers={"loud": _shout, "plain": None})

    def stashed(topic, value, **more):
        return stasher.row(OutboxRecord(topic, value=value, **more))[2]

    assert stashed("any", {"a": 1}) == b"{'a': 1}"
    assert stashed("any", "text") == b"'text'"
    assert stashed("any", b"bytes") == b"b'bytes'"
    assert stashed("loud", 7) == b"7!"
    assert stashed("plain", {"a": 1}) == b'{"a":1}'
    assert stashed("any", b"as it is", serializer=bytes) == b"as it is"


def test_tombstones_stay():
    """No serializer gets None, which stays a tombstone."""
    assert OutboxRecord("t", serializer=_refuse).value is None
    assert Stasher(serializer=_refuse).row(OutboxRecord("t"))[2] is None
    assert Stasher().row(OutboxRecord("t", serializer="outbox"))[2] is None


def test_values_that_json_cannot_express():
    """Left to the outbox, a value of any kind waits for its serializer; without one it is refused."""
    record = OutboxRecord("t", value={b"no": object}, serializer="outbox")
    assert Stasher(serializer=lambda value: next(iter(value))).row(record)[2] == b"no"
    with pytest.raises(InvalidRecord, match=r"^value: its serializer is 'outbox', which has none for topic 't'"):
        Stasher().row(record)
    with pytest.raises(InvalidRecord, match=r"^value: cannot be written as JSON .* or a serializer"):
        OutboxRecord("t", value={b"no": object})


def test_every_outbox_takes_them():
    """Each adapter's outbox has the same options."""
    options = {"serializer": _shout, "serializers": {"u": repr}}
    record = OutboxRecord("t", value="hi")
    assert OutboxTable("outbox", **options)._stasher.row(record)[2] == b"hi!"
    assert Outbox(**options)._parameters(record)["kafka_value"] == b"hi!"
    with pytest.raises(InvalidConfig, match="that of 'u' is 7"):
        Stasher(serializers={"u": 7})
    with pytest.raises(InvalidRecord, match="serializer: expected a function, 'outbox' or None, got 7"):
        OutboxRecord("t", value=1, serializer=7)


# -- what goes wrong


async def _asynchronous(_):
    """Return nothing yet."""


@pytest.mark.parametrize(
    ("serializer", "expected"),
    [
        (_refuse, r"serializer _refuse cannot serialize a str: LookupError: no v|LookupError: 'no v'"),
        (lambda _: None, "it returned NoneType instead of bytes or str"),
        (_asynchronous, "it is asynchronous; use its synchronous twin"),
        (bytes, "TypeError: string argument without an encoding"),
    ],
)
def test_errors(serializer, expected):
    """An error names field, topic, serializer and cause: at once for the record's own, and before SQL for others."""
    with pytest.raises(SerializationFailed, match=expected) as own:
        OutboxRecord("orders", value="v", serializer=serializer)
    with pytest.raises(SerializationFailed, match=expected):
        Stasher(serializer=serializer).stash(None, OutboxRecord("orders", value="v"))  # there is no connection to use
    assert str(own.value).startswith("value: for topic 'orders' the serializer ")


# -- libraries for JSON and MessagePack


@pytest.mark.parametrize(
    "serializer",
    [partial(orjson.dumps, default=json_default), msgspec.json.encode, partial(json.dumps, default=json_default)],
)
def test_json_libraries(serializer):
    """Functions of orjson and msgspec serialize as they are; the types that our JSON knows come out alike."""
    value = {
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "id": UUID(int=7),
        "total": Decimal("1.50"),
        "text": "böx",
    }
    written = json.loads(OutboxRecord("t", value=value, serializer=serializer).value)
    expected = json.loads(OutboxRecord("t", value=value).value)
    assert {**written, "at": written["at"].replace("Z", "+00:00")} == expected


def test_message_pack():
    """A serializer may return any bytes."""
    written = OutboxRecord("t", value={"a": 1}, serializer=msgspec.msgpack.encode).value
    assert msgspec.msgpack.decode(written) == {"a": 1}


# -- a schema registry


def test_avro(client, server):
    """Avro values carry the id of the schema that is registered for the topic, once."""
    stasher = Stasher(serializers={"avro-orders": AvroSerializer(client, AVRO)})
    rows = [stasher.row(OutboxRecord("avro-orders", value={"total": 40 + n})) for n in range(2)]
    decode = AvroDeserializer(client)
    assert [decode(row[2], _context("avro-orders"))["total"] for row in rows] == [40, 41]
    registrations = [path for method, path in server.requests if method == "POST" and "avro-orders-value" in path]
    assert len([path for path in registrations if "/versions" in path]) == 1


def test_avro_of_bytes(client):
    """Bytes within an Avro value need `serializer="outbox"`, as JSON has no type for them."""
    stasher = Stasher(serializer=AvroSerializer(client, AVRO))
    value = {"total": 1, "blob": b"\xff"}
    row = stasher.row(OutboxRecord("blobs", value=value, serializer="outbox"))
    assert AvroDeserializer(client)(row[2], _context("blobs")) == value


def test_json_schema(client):
    """JSON Schema values are validated before they are written."""
    serializer = JSONSerializer(JSON_SCHEMA, client)
    record = OutboxRecord("json-orders", value={"total": 42}, serializer=serializer)
    assert JSONDeserializer(JSON_SCHEMA, schema_registry_client=client)(record.value, _context("json-orders")) == {
        "total": 42
    }
    with pytest.raises(SerializationFailed, match=r"^value: for topic 'json-orders' .*JSONSerializer.*'total'"):
        OutboxRecord("json-orders", value={"sum": 42}, serializer=serializer)


def test_protobuf(client):
    """A Protobuf message is the value."""
    serializer = ProtobufSerializer(Marker, client, {"use.deprecated.format": False})
    message = Marker(value=b"42")
    row = Stasher(serializer=serializer).row(OutboxRecord("proto-orders", value=message, serializer="outbox"))
    decode = ProtobufDeserializer(Marker, {"use.deprecated.format": False}, client)
    assert decode(row[2], _context("proto-orders")) == message


def test_schema_id_in_a_header(client):
    """A serializer may put the schema's id into a header, which is written behind the record's own."""
    serializer = AvroSerializer(client, AVRO, conf={"schema.id.serializer": header_schema_id_serializer})
    row = Stasher(serializer=serializer).row(OutboxRecord("in-header", value={"total": 1}, headers={"a": "b"}))
    assert row[3] == ["a", "__value_schema_id"]
    headers = list(zip(row[3], row[4], strict=True))
    assert headers[0] == ("a", b"b")


def test_a_value_that_does_not_fit(client):
    """An Avro value that does not fit its schema raises before any SQL, with Avro's reason."""
    stasher = Stasher(serializer=AvroSerializer(client, AVRO))
    with pytest.raises(SerializationFailed, match=r"^value: for topic 'orders' .*AvroSerializer.* total"):
        stasher.stash(None, OutboxRecord("orders", value={"total": "many"}))


def test_an_incompatible_schema(client, server):
    """A schema that the registry refuses raises with the registry's words."""
    AvroSerializer(client, AVRO)({"total": 1}, _context("frozen"))
    other = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "sum", "type": "long"}]})
    server.frozen = True
    try:
        with pytest.raises(SerializationFailed, match="incompatible with an earlier schema"):
            OutboxRecord("frozen", value={"sum": 1}, serializer=AvroSerializer(client, other))
    finally:
        server.frozen = False


def test_a_registry_that_is_away():
    """A registry that cannot be reached raises, too; its error is the cause."""
    away = SchemaRegistryClient({"url": "http://127.0.0.1:9", "max.retries": 0})
    with pytest.raises(SerializationFailed, match=r"^value: for topic 'orders' .*AvroSerializer") as raised:
        OutboxRecord("orders", value={"total": 1}, serializer=AvroSerializer(away, AVRO))
    assert raised.value.__cause__ is not None
