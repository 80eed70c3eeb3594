"""Avro and Protobuf values as typed columns: a schema registry over real HTTP, without Spark."""

import datetime as dt
import json
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_spark.registry_values import make_reader, typed

_NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
_AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "n", "type": "long"},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "tags", "type": {"type": "map", "values": "long"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
_ORDER = {"n": 7, "amount": Decimal("1.50"), "at": _NOON, "id": UUID(int=5), "tags": {"a": 1}, "note": None}
_COLUMNS = pa.struct(
    {
        "n": pa.int64(),
        "amount": pa.decimal128(10, 2),
        "at": pa.timestamp("us", tz="UTC"),
        "id": pa.string(),
        "tags": pa.map_(pa.string(), pa.int64()),
        "later": pa.string(),
    }
)
_HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))


def _serialized(serializer, value, headers=None):
    return serializer(value, SerializationContext("orders", MessageField.VALUE, headers))


def _typed(kind, server, columns, values, headers=None):
    read = make_reader(kind, (("url", server.url),))
    count = len(values)
    arrays = pa.array(values, pa.binary()), pa.array(["orders"] * count), pa.array(headers or [None] * count, _HEADERS)
    return typed(read, columns, *arrays).to_pylist()


def test_avro(client, server):
    """A value has the types of the declared columns; a field that its writer did not know is NULL."""
    value = _serialized(AvroSerializer(client, json.dumps(_AVRO)), _ORDER)
    found, none = _typed("avro", server, _COLUMNS, [value, None])
    assert found == {
        "value": {
            "n": 7,
            "amount": Decimal("1.50"),
            "at": _NOON,
            "id": str(UUID(int=5)),
            "tags": [("a", 1)],
            "later": None,
        },
        "problem": None,
    }
    assert none == {"value": None, "problem": None}


_FULL = {"type": "record", "name": "Full", "fields": [{"name": "n", "type": "long"}]}
_HOLLOW = {"type": "record", "name": "Hollow", "fields": [{"name": "a", "type": "null"}]}
_TWICE = {
    "type": "record",
    "name": "Twice",
    "fields": [{"name": "a", "type": _HOLLOW}, {"name": "b", "type": "Hollow"}],
}
_TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [{"name": "n", "type": "null"}, {"name": "more", "type": {"type": "array", "items": "Tree"}}],
}


@pytest.mark.parametrize(
    ("items", "is_refused"),
    [
        ("null", True),
        ({"type": "null"}, True),
        ({"type": "fixed", "name": "Zero", "size": 0}, True),
        ({"type": "record", "name": "Empty", "fields": []}, True),
        (_HOLLOW, True),
        (_TWICE, True),
        ({"type": "array", "items": "null"}, True),
        ("long", False),
        (_FULL, False),
        (_TREE, False),
        (["null", "long"], False),
        ({"type": "enum", "name": "One", "symbols": ["a"]}, False),
        ({"type": "fixed", "name": "Eight", "size": 8}, False),
        ({"type": "map", "values": "null"}, False),
    ],
)
def test_avro_arrays_of_nothing(client, server, items, is_refused):
    """An array of items that have no bytes, of which five may be 40 million items, is not read at all."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": {"type": "array", "items": items}}]}
    number = client.register_schema("orders-value", Schema(json.dumps(schema), "AVRO"))
    value = b"\0" + number.to_bytes(4, "big") + (b"\x80\xb4\x89\x26\0" if is_refused else b"\0")
    (found,) = _typed("avro", server, pa.struct({"y": pa.int64()}), [value])
    if is_refused:
        assert "an array whose items have no bytes" in found["problem"]
    else:
        assert found == {"value": {"y": None}, "problem": None}


def test_avro_arrays_of_nothing_by_reference(client, server):
    """The items may be defined in another schema of the registry."""
    client.register_schema("hollow", Schema(json.dumps({**_HOLLOW, "namespace": "shop"}), "AVRO"))
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "x", "type": {"type": "array", "items": "shop.Hollow"}}],
    }
    references = [SchemaReference("shop.Hollow", "hollow", 1)]
    number = client.register_schema("orders-value", Schema(json.dumps(schema), "AVRO", references))
    value = b"\0" + number.to_bytes(4, "big") + b"\x80\xb4\x89\x26\0"
    (found,) = _typed("avro", server, pa.struct({"y": pa.int64()}), [value])
    assert "an array whose items have no bytes" in found["problem"]


def _chain(length):
    """Return a schema of as many types, each of which has the one before within it."""
    types = [{"type": "record", "name": "T0", "fields": [{"name": "n", "type": "long"}]}]
    for number in range(1, length):
        field = {"name": "n", "type": f"T{number - 1}"}
        types.append({"type": "record", "name": f"T{number}", "fields": [field]})
    return types


_NODE = {"type": "record", "name": "Node", "namespace": "a.b", "fields": [{"name": "n", "type": ["null", "Node"]}]}
_SELF = {"type": "record", "name": "Self", "fields": [{"name": "n", "type": "Self"}]}
_BUSH = {
    "type": "record",
    "name": "Bush",
    "fields": [
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["a"]}},
        {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}},
        {"name": "t", "type": {"type": "int", "logicalType": "date"}},
        {"name": "more", "type": {"type": "map", "values": {"type": "array", "items": "Bush"}}},
    ],
}
_TWIG = b"\0ab\2"


@pytest.mark.parametrize(
    ("schema", "content", "problem"),
    [
        (_NODE, b"\2" * 30 + b"\0", None),
        (_NODE, b"\2" * 800 + b"\0", "levels"),
        (_NODE, b"\2" * 200_000 + b"\0", "levels"),
        ({"type": "array", "items": _NODE}, b"\2" + b"\2" * 200_000 + b"\0\0", "levels"),
        (_SELF, b"\0", "levels"),
        (_BUSH, _TWIG + b"\2\2k\4" + (_TWIG + b"\0") * 2 + b"\0\0", None),
        (_BUSH, (_TWIG + b"\2\2k\2") * 20_000 + _TWIG + b"\0" * 40_001, "levels"),
        (_chain(60), b"\x76\2", None),
        (_chain(300), b"\xd6\4\2", "levels"),
    ],
    ids=["few", "many", "wild", "items", "itself", "bush", "deep bush", "chain", "long chain"],
)
def test_avro_values_of_many_levels(client, server, schema, content, problem):
    """A value whose levels would end the process is a misfit; others of such schemas are read."""
    number = client.register_schema("orders-value", Schema(json.dumps(schema), "AVRO"))
    (found,) = _typed("avro", server, pa.struct({"y": pa.int64()}), [b"\0" + number.to_bytes(4, "big") + content])
    if problem is None:
        assert found == {"value": {"y": None}, "problem": None}
    else:
        assert problem in found["problem"]


@pytest.mark.parametrize("size", [2, 300_000])
@pytest.mark.parametrize("kind", ["bytes", "fixed"])
def test_avro_decimals_of_many_bytes(client, server, kind, size):
    """A decimal whose digits would take hours is a misfit."""
    decimal = {"type": kind, "logicalType": "decimal", "precision": 4, "scale": 2}
    if kind == "fixed":
        decimal |= {"name": "D", "size": size}
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": decimal}]}
    number = client.register_schema("orders-value", Schema(json.dumps(schema), "AVRO"))
    length = b"\4" if size == 2 else b"\xc0\xcf\x24"
    value = b"\0" + number.to_bytes(4, "big") + (length if kind == "bytes" else b"") + b"\1" * size
    (found,) = _typed("avro", server, pa.struct({"x": pa.decimal128(10, 2)}), [value])
    if size == 2:
        assert found == {"value": {"x": Decimal("2.57")}, "problem": None}
    else:
        assert "it has a decimal of 300000 bytes" in found["problem"]


@pytest.mark.parametrize("items", [[None], [{"a": 1}], [None, {"a": 1}]])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lists_are_no_maps(items, depth):
    """A list where a map is declared is a misfit at any depth: Arrow would end the process for some of them."""
    row, kind = {"m": items}, pa.struct({"m": pa.map_(pa.string(), pa.int64()), "n": pa.int64()})
    for _ in range(depth):
        row, kind = {"m": [row]}, pa.struct({"m": pa.list_(kind)})
    arrays = pa.array([b"v", b"w"]), pa.array(["t", "t"]), pa.array([None, None], _HEADERS)
    rows = iter([row, {"m": None}])
    bad, good = typed(lambda *_: next(rows), kind, *arrays).to_pylist()
    assert (bad["value"], good["problem"]) == (None, None)
    assert "does not fit the schema: m is no" in bad["problem"]


def test_avro_with_the_schema_in_a_header(client, server):
    """A schema's id may stand in a header instead of the value."""
    headers = []
    serializer = AvroSerializer(client, json.dumps(_AVRO), conf={"schema.id.serializer": header_schema_id_serializer})
    value = _serialized(serializer, _ORDER, headers)
    pairs = [{"key": name, "value": content} for name, content in headers]
    (found,) = _typed("avro", server, pa.struct({"n": pa.int64()}), [value], [pairs])
    assert found["value"] == {"n": 7}


def test_misfits_have_a_reason(client, server):
    """A value that cannot be read or does not fit is named with its reason, and harms no other one."""
    value = _serialized(AvroSerializer(client, json.dumps(_AVRO)), _ORDER)
    long = _serialized(AvroSerializer(client, '"long"'), 3)
    values = [value, b'{"n":1}', b"", value[:6], b"\0\0\1\0\0" + value[5:], long]
    good, *bad = _typed("avro", server, pa.struct({"n": pa.int64()}), values)
    assert good == {"value": {"n": 7}, "problem": None}
    no_id = "neither the value nor its headers have the id of a schema"
    assert [row["problem"] for row in bad[:2]] == [no_id, no_id]
    assert "is not as the schema" in bad[2]["problem"]
    assert "65536" in bad[3]["problem"]
    assert bad[4]["problem"] == "the value is not a record with fields"
    (unfit,) = _typed("avro", server, pa.struct({"n": pa.int64(), "amount": pa.bool_(), "id": pa.int32()}), [value])
    assert unfit["problem"] == "the value does not fit the schema: amount is no bool, id is no int32"


def _message_class(pool, name):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _file(pool, name, text):
    """Add a file with these parts to a pool."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package="shop", syntax="proto3", **text)
    pool.Add(file)


def _field(name, number, kind, *, label="LABEL_OPTIONAL", of=None):
    field = descriptor_pb2.FieldDescriptorProto
    return field(name=name, number=number, type=f"TYPE_{kind}", label=label, type_name=of)


def test_protobuf(client, server):
    """A message is read by the registry's descriptors, with what it imports, and needs no generated class."""
    pool = descriptor_pool.DescriptorPool()
    for known in ("google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"):
        pool.AddSerializedFile(descriptor_pool.Default().FindFileByName(known).serialized_pb)
    line = descriptor_pb2.DescriptorProto(name="Line", field=[_field("sku", 1, "STRING")])
    _file(pool, "line.proto", {"message_type": [line]})
    tag = descriptor_pb2.DescriptorProto(
        name="TagsEntry", field=[_field("key", 1, "STRING"), _field("value", 2, "INT64")], options={"map_entry": True}
    )
    order = descriptor_pb2.DescriptorProto(
        name="Order",
        nested_type=[tag],
        field=[
            _field("n", 1, "INT64"),
            _field("at", 2, "MESSAGE", of=".google.protobuf.Timestamp"),
            _field("note", 3, "MESSAGE", of=".google.protobuf.StringValue"),
            _field("lines", 4, "MESSAGE", label="LABEL_REPEATED", of=".shop.Line"),
            _field("tags", 5, "MESSAGE", label="LABEL_REPEATED", of=".shop.Order.TagsEntry"),
            _field("state", 6, "ENUM", of=".shop.State"),
            _field("codes", 7, "INT32", label="LABEL_REPEATED"),
            _field("other", 8, "MESSAGE", of=".shop.Line"),
        ],
    )
    state = {"name": "State", "value": [{"name": "NEW", "number": 0}, {"name": "PAID", "number": 1}]}
    imports = ["line.proto", "google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"]
    _file(pool, "order.proto", {"message_type": [_nothing(), order], "enum_type": [state], "dependency": imports})
    order = _message_class(pool, "shop.Order")
    message = order(n=2**40, at=_NOON, lines=[{"sku": "a"}], tags={"x": 3}, state=1, codes=[1, 2], note={"value": "hi"})
    value = _serialized(ProtobufSerializer(order, client, {"use.deprecated.format": False}), message)
    columns = pa.struct(
        {
            "n": pa.int64(),
            "at": pa.timestamp("us", tz="UTC"),
            "note": pa.string(),
            "lines": pa.list_(pa.struct({"sku": pa.string()})),
            "tags": pa.map_(pa.string(), pa.int64()),
            "state": pa.string(),
            "codes": pa.list_(pa.int32()),
            "other": pa.struct({"sku": pa.string()}),
        }
    )
    (found, torn) = _typed("protobuf", server, columns, [value, value[:-3]])
    assert found["problem"] is None
    assert found["value"] == {
        "n": 2**40,
        "at": _NOON,
        "note": "hi",
        "lines": [{"sku": "a"}],
        "tags": [("x", 3)],
        "state": "PAID",
        "codes": [1, 2],
        "other": None,
    }
    assert "is not as the schema" in torn["problem"]


def _nothing():
    """Return a message before the wanted one, so that its place in the file counts."""
    return descriptor_pb2.DescriptorProto(name="Nothing")


def test_a_registry_that_is_away_or_refuses(server):
    """No value is a misfit because of the registry: an outage is endured, a refusal ends the pipeline."""
    value = pa.array([b"\0\0\0\0\1\2"]), pa.array(["orders"]), pa.array([None], _HEADERS)
    away = make_reader("avro", (("max.retries", 0), ("url", "http://127.0.0.1:9")))
    with pytest.raises(StoreUnavailable, match="the schema registry"):
        typed(away, _COLUMNS, *value)
    with pytest.raises(InvalidConfig, match="registry: Unrecognized properties: urls"):
        make_reader("avro", (("url", server.url), ("urls", "x")))
