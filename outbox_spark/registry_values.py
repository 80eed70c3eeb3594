"""Avro and Protobuf values, whose schemas are in a schema registry, as typed columns.

Confluent-kafka's deserializers read a value by the schema that its writer has registered, and Arrow converts it to the
declared schema. A value that cannot be read or does not fit is a misfit with its reason. A registry that is away or
refuses is an error instead, so that no record goes to quarantine for it.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from datetime import UTC, time
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from outbox_core.config import redact
from outbox_core.errors import InvalidConfig, MissingExtra, OutboxError, StoreUnavailable
from outbox_spark.runtime.secrets import filled

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

Headers = Sequence[tuple[str, bytes | None]]
Reader = Callable[[bytes, str, Headers], Any]

_SERIALIZED = "serialized"  # the form of a Protobuf schema as descriptors, instead of text
_NOT_FOUND, _TOO_MANY, _SERVER_ERRORS = 404, 429, 500
_DEEPEST = 200  # levels of a value of Avro, a union being one: Python itself takes less than a thousand
_LONGEST_DECIMAL = 1_000  # bytes
_SHOWN = 300  # characters of a library's reason
_DOES_NOT_FIT = (ValueError, TypeError, OverflowError)  # Arrow's errors are of these


class UnreadableValue(Exception):
    """A value that the schema of its writer does not describe."""


def decoded(kind: str, registry: Mapping[str, Any], schema: StructType) -> Callable[..., Column]:
    """Return a function of the columns value, topic and headers: a struct of `value`, NULL for a misfit, and `problem`.

    `kind` is `avro` or `protobuf`; `registry` has properties of confluent-kafka's `SchemaRegistryClient`.
    """
    properties = tuple(sorted(registry.items()))
    make_reader(kind, properties)
    optional = StructType.fromJson(json.loads(schema.json(), object_hook=_nullable))
    result = StructType([StructField("value", optional), StructField("problem", StringType())])
    columns = pa.struct(list(to_arrow_schema(optional, timezone="UTC")))

    def decode(values: pa.Array, topics: pa.Array, headers: pa.Array) -> pa.Array:
        return typed(make_reader(kind, properties), columns, values, topics, headers)

    made: Callable[..., Column] = arrow_udf(decode, result)  # type: ignore[call-overload]  # by the hints of `decode`
    return made


def _nullable(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a type in Spark's JSON without NOT NULL, which is checked later."""
    return {name: name in ("nullable", "containsNull", "valueContainsNull") or item for name, item in part.items()}


def typed(read: Reader, columns: pa.StructType, *arrays: pa.Array) -> pa.StructArray:
    """Read arrays of values, topics and lists of headers into structs of `value` and `problem`."""
    rows: list[Any] = []
    has_maps = "map<" in str(columns)
    problems: list[str | None] = []
    for value, topic, headers in zip(*(array.to_pylist() for array in arrays), strict=True):
        rows.append(None)
        problems.append(None)
        if value is not None:
            try:
                row = read(value, topic, [(header["key"], header["value"]) for header in headers or ()])
                rows[-1] = _checked(row, columns) if has_maps else row
            except UnreadableValue as error:
                problems[-1] = str(error)
    try:
        found = pa.array(rows, columns)
    except _DOES_NOT_FIT:
        for place, row in enumerate(rows):
            if row is not None and (problem := _misfit(row, columns)):
                rows[place], problems[place] = None, problem
        found = pa.array(rows, columns)
    return pa.StructArray.from_arrays([found, pa.array(problems, pa.string())], ["value", "problem"])


def _checked(row: Any, columns: pa.StructType) -> Any:
    """Return a row whose maps are some. Raises UnreadableValue for others: of a list, Arrow may end the process."""
    if isinstance(row, Mapping):
        names = [
            f"{field.name} is no {field.type}" for field in columns if not _has_maps(row.get(field.name), field.type)
        ]
        if names:
            raise UnreadableValue(_unfit(names))
    return row


def _has_maps(value: Any, kind: pa.DataType) -> bool:
    """Tell whether a value has maps where its declared type has some."""
    if value is None:
        return True
    if pa.types.is_map(kind):
        is_map = isinstance(value, Mapping) and None not in value
        return is_map and all(_has_maps(item, kind.item_type) for item in value.values())
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        return all(_has_maps(value.get(field.name), field.type) for field in kind)
    if pa.types.is_list(kind) and isinstance(value, list):
        return all(_has_maps(item, kind.value_type) for item in value)
    return True


def _unfit(names: list[str]) -> str:
    return f"the value does not fit the schema: {', '.join(names)}"


def _misfit(row: Any, columns: pa.StructType) -> str | None:
    if not isinstance(row, Mapping):
        return "the value is not a record with fields"
    names = []
    for field in columns:
        try:
            pa.array([row.get(field.name)], field.type)
        except _DOES_NOT_FIT:
            names.append(f"{field.name} is no {field.type}")
    return _unfit(names) if names else None


@functools.cache
def make_reader(kind: str, properties: tuple[tuple[str, Any], ...]) -> Reader:
    """Return the reader of this process, with its connection and schemas. Raises MissingExtra and InvalidConfig."""
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        client = SchemaRegistryClient(filled(dict(properties)))
        return functools.partial(_read, kind.upper(), _avro(client) if kind == "avro" else _Protobuf(client))
    except ImportError as error:
        wanted = f"pip install 'confluent-kafka[{kind},schemaregistry]'"
        raise MissingExtra(f"format: {kind} needs a client of the schema registry ({error}): {wanted}") from None
    except (ValueError, TypeError) as error:
        raise InvalidConfig(f"registry: {redact(str(error))}") from None


def _read(kind: str, decode: Callable[[bytes, Any, Any], Any], value: bytes, topic: str, headers: Headers) -> Any:
    """Read a value. Raises UnreadableValue; other errors are the registry's."""
    from confluent_kafka.schema_registry import dual_schema_id_deserializer
    from confluent_kafka.schema_registry.serde import SchemaId
    from confluent_kafka.serialization import MessageField, SerializationContext

    context, writer = SerializationContext(topic, MessageField.VALUE, list(headers)), SchemaId(kind)
    try:
        dual_schema_id_deserializer(value, context, writer)
    except Exception:
        raise UnreadableValue("neither the value nor its headers have the id of a schema") from None
    try:
        return decode(value, context, writer)
    except Exception as error:
        refusal = _refusal(error)
        if refusal is not None:
            raise refusal from None
        reason = str(error) or type(error).__name__
        words = f"the value is not as the schema {writer.id or writer.guid} says: {reason}"
        raise UnreadableValue(words[:_SHOWN]) from None


def _avro(client: SchemaRegistryClient) -> Callable[[bytes, Any, Any], Any]:
    from confluent_kafka.schema_registry import dual_schema_id_deserializer
    from confluent_kafka.schema_registry.avro import AvroDeserializer
    from fastavro.read import LOGICAL_READERS

    for kind in ("bytes-decimal", "fixed-decimal"):
        LOGICAL_READERS[kind] = cast(Any, _decimal)
    deserialize = AvroDeserializer(client)
    deep: dict[tuple[Any, Any], tuple[Any, dict[str, Any]] | None] = {}  # of those whose values may be too deep

    def read(value: bytes, context: Any, writer: Any) -> Any:
        key = (writer.id, writer.guid)
        if key not in deep:
            named: dict[str, Any] = {}
            schema = _avro_schema(client, _schema_of(client, writer), named, set())
            if _has_weightless_items(schema, named):
                raise UnreadableValue(
                    "it has an array whose items have no bytes, so that some bytes are millions of them"
                )
            deep[key] = (schema, named) if _depth(schema, named, {}) > _DEEPEST else None
        if (found := deep[key]) is not None:
            _check_depth(dual_schema_id_deserializer(value, context, writer), *found)
        return _plain(deserialize(value, context))

    return read


def _decimal(data: bytes, schema: Mapping[str, Any], _: Any = None) -> Decimal:
    """Return a decimal of Avro. One of many bytes would cost hours: to make digits of it takes the square of them."""
    if len(data) > _LONGEST_DECIMAL:
        raise ValueError(f"it has a decimal of {len(data)} bytes")
    number = Decimal(int.from_bytes(data, "big", signed=True))
    context = Context(prec=schema["precision"])
    return context.create_decimal(number).scaleb(-schema.get("scale", 0), context)


def _schema_of(client: SchemaRegistryClient, writer: Any, **options: Any) -> Any:
    """Return the schema of a value's writer, from the registry or the client's cache."""
    if writer.id is not None:
        return client.get_schema(writer.id, **options)
    return client.get_schema_by_guid(str(writer.guid), **options)


def _avro_schema(client: SchemaRegistryClient, schema: Any, named: dict[str, Any], seen: set[tuple[str, int]]) -> Any:
    """Return a schema as fastavro has it, and note the types that it and those it refers to define, by full names."""
    from fastavro.schema import parse_schema

    for reference in schema.references or ():
        place = (reference.subject, reference.version)
        if place not in seen:
            seen.add(place)
            _avro_schema(client, client.get_version(*place).schema, named, seen)
    try:
        document = json.loads(schema.schema_str)
    except ValueError:  # a primitive's name, without quotes
        document = schema.schema_str
    return parse_schema(document, named_schemas=named)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the types that are defined within an Avro schema."""
    if isinstance(schema, list):
        for member in schema:
            yield from _parts(member)
    elif isinstance(schema, dict):
        yield schema
        for part in _within(schema):
            yield from _parts(part)


def _within(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the types that a type has within it."""
    yield from (schema.get("type"), schema.get("items"), schema.get("values"))
    yield from (field.get("type") for field in schema.get("fields") or ())


def _depth(kind: Any, named: Mapping[str, Any], known: dict[int, float]) -> float:
    """Return how many levels the values of a schema can have; infinity where a type has itself within it."""
    if isinstance(kind, str):
        kind = named.get(kind)
    if isinstance(kind, list):
        return max((_depth(member, named, known) for member in kind), default=0)
    if not isinstance(kind, dict):
        return 0
    if id(kind) not in known:
        known[id(kind)] = math.inf  # until it is known: of a type within itself
        known[id(kind)] = 1 + max((_depth(part, named, known) for part in _within(kind)), default=0)
    return known[id(kind)]


def _check_depth(content: Any, schema: Any, named: Mapping[str, Any]) -> None:
    """Read a value in Python. Raises UnreadableValue where fastavro, in C, would end the process: it has no bound."""
    from fastavro.io.binary_decoder import BinaryDecoder

    decoder = cast(Any, BinaryDecoder)(content)

    def skip(kind: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise UnreadableValue(f"the value has more than {_DEEPEST} levels, one within the other")
        for part in _level(decoder, kind, named):
            skip(part, depth + 1)

    skip(schema, 0)


def _level(decoder: Any, kind: Any, named: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the types of what a value has within it, each of which is to be read before the next one."""
    if isinstance(kind, str):
        kind = named.get(kind, kind)
    if isinstance(kind, list):
        yield kind[decoder.read_index()]
        return
    within = kind["type"] if isinstance(kind, dict) else kind
    if within in ("record", "error"):
        yield from (field["type"] for field in kind["fields"])
    elif within == "array":
        decoder.read_array_start()
        yield from (kind["items"] for _ in decoder.iter_array())
    elif within == "map":
        decoder.read_map_start()
        for _ in decoder.iter_map():
            decoder.read_bytes()  # its key
            yield kind["values"]
    elif within == "fixed":
        decoder.read_fixed(kind["size"])
    elif isinstance(within, str) and within not in named:
        getattr(decoder, f"read_{'bytes' if within == 'string' else within}")()
    else:
        yield within


def _has_weightless_items(schema: Any, named: Mapping[str, Any]) -> bool:
    """Tell whether a schema has an array of items that have no bytes: five bytes may be 40 million of them."""
    parts = [*_parts(schema), *(part for kind in named.values() for part in _parts(kind))]
    known: dict[int, bool] = {}
    return any(part.get("type") == "array" and _is_weightless(part.get("items"), named, known) for part in parts)


def _is_weightless(kind: Any, named: Mapping[str, Any], known: dict[int, bool]) -> bool:
    if isinstance(kind, str) and kind != "null":
        kind = named.get(kind)
    if not isinstance(kind, dict):
        return bool(kind == "null")  # a union has its number, and other primitives have some bytes
    if id(kind) not in known:
        known[id(kind)] = False  # of a record within itself
        within = kind.get("type")
        if within in ("record", "error"):
            fields = [field.get("type") for field in kind.get("fields") or ()]
            known[id(kind)] = all(_is_weightless(field, named, known) for field in fields)
        elif within == "fixed":
            known[id(kind)] = kind.get("size") == 0
        elif within not in ("array", "map", "enum"):
            known[id(kind)] = _is_weightless(within, named, known)
    return known[id(kind)]


class _Protobuf:
    """Messages as dictionaries, by the descriptors in the registry: no generated classes."""

    def __init__(self, client: SchemaRegistryClient) -> None:
        from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer

        self._client = client
        self._make = ProtobufDeserializer
        self._deserializers: dict[tuple[Any, ...], Any] = {}

    def __call__(self, value: bytes, context: Any, writer: Any) -> Any:
        key = (writer.id, writer.guid, *writer.message_indexes)
        if key not in self._deserializers:
            message = self._message(writer)
            self._deserializers[key] = self._make(message, {"use.deprecated.format": False}, self._client)
        return _fields(self._deserializers[key](value, context))

    def _message(self, writer: Any) -> Any:
        """Return the class of the message whose place in its file the value names."""
        from google.protobuf.descriptor_pool import DescriptorPool
        from google.protobuf.message_factory import GetMessageClass

        schema = _schema_of(self._client, writer, fmt=_SERIALIZED)
        pool, name = DescriptorPool(), f"{writer.id or writer.guid}.proto"
        self._add(pool, name, schema)
        first, *within = writer.message_indexes
        message: Any = list(pool.FindFileByName(name).message_types_by_name.values())[first]
        for place in within:
            message = message.nested_types[place]
        return GetMessageClass(message)

    def _add(self, pool: Any, name: str, schema: Any) -> None:
        """Add a file to a pool, behind those that it imports: references in the registry, or Protobuf's own."""
        from google.protobuf import descriptor_pb2, descriptor_pool

        file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(schema.schema_str))
        file.name = name
        references = {reference.name: reference for reference in schema.references or ()}
        for imported in file.dependency:
            if reference := references.get(imported):
                version = self._client.get_version(reference.subject, reference.version, True, _SERIALIZED)
                self._add(pool, imported, version.schema)
            else:  # confluent-kafka's module has imported them
                _copy(descriptor_pool.Default().FindFileByName(imported), pool)
        pool.Add(file)


def _copy(file: Any, pool: Any) -> None:
    for imported in file.dependencies:
        _copy(imported, pool)
    pool.AddSerializedFile(file.serialized_pb)


def _refusal(error: Exception) -> OutboxError | None:
    """Return the error to raise for one of the registry or the way to it; None for one of the value."""
    from confluent_kafka.schema_registry.error import SchemaRegistryError

    text = f"the schema registry: {redact(str(error) or type(error).__name__)}"
    if isinstance(error, SchemaRegistryError):
        status = error.http_status_code
        if status == _NOT_FOUND:
            return None
        return StoreUnavailable(text) if status in (-1, _TOO_MANY) or status >= _SERVER_ERRORS else InvalidConfig(text)
    is_transport = isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "httpcore", "authlib"))
    return StoreUnavailable(text) if is_transport else None


def _plain(value: Any) -> Any:
    """Return an Avro value in types that Arrow converts."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, UUID | time) else value


def _fields(message: Any) -> dict[str, Any]:
    """Return a message's fields by their names; None for those that can be absent and are."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, MutableMapping):
            of = field.message_type.fields_by_name["value"]
            found[field.name] = {key: _scalar(of, value[key]) for key in value}
        elif isinstance(value, MutableSequence):
            found[field.name] = [_scalar(field, item) for item in value]
        else:
            is_absent = field.has_presence and not message.HasField(field.name)
            found[field.name] = None if is_absent else _scalar(field, value)
    return found


def _scalar(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return value if named is None else named.name
    if field.message_type is None:
        return value
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return value.ToDatetime(tzinfo=UTC)
    if field.message_type.file.name == "google/protobuf/wrappers.proto":
        return value.value
    return _fields(value)
