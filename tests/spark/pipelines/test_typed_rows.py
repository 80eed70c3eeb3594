"""Records as typed rows: values of a schema registry, CloudEvents, and change events."""

import datetime as dt
import json

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from outbox_core.errors import InvalidConfig
from outbox_core.formats.cloud_events import cloud_event_record
from outbox_spark.config import RowSettings
from outbox_spark.pipelines.project import changes, project
from outbox_spark.pipelines.typed_rows import parse
from outbox_spark.topics.source import SCHEMA
from tests.schema_registry import registry

pytestmark = [pytest.mark.complete, pytest.mark.timeout(900)]

_NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)


@pytest.fixture
def records(spark):
    """Return a function that makes rows of `outbox_kafka` of (key, value, headers)."""

    def make(*given):
        rows = []
        for offset, (key, value, headers) in enumerate(given):
            pairs = [(name, text if isinstance(text, bytes) else text.encode()) for name, text in headers]
            rows.append((key, value, dict(pairs), pairs, "t", 0, offset, _NOON, dict(headers).get("outbox-id")))
        return spark.createDataFrame(rows, SCHEMA)

    return make


def test_values_of_a_schema_registry(records):
    """Avro values become columns of the declared types; those that do not fit are misfits with a reason."""
    schema = {"type": "record", "name": "Order", "fields": [{"name": "n", "type": ["null", "long"]}]}
    lines = {"type": "array", "items": {"type": "record", "name": "L", "fields": [{"name": "sku", "type": "string"}]}}
    schema["fields"].append({"name": "lines", "type": lines})
    with registry() as server:
        serialize = AvroSerializer(SchemaRegistryClient({"url": server.url}), json.dumps(schema))
        context = SerializationContext("t", MessageField.VALUE)
        values = [serialize({"n": n, "lines": [{"sku": "a"}, {"sku": "b"}]}, context) for n in (7, None)]
        settings = RowSettings(
            schema="n BIGINT NOT NULL, lines ARRAY<STRUCT<sku: STRING NOT NULL>> NOT NULL, later DECIMAL(10,2)",
            format="avro",
            registry={"url": server.url},
            explode="lines",
            columns={"n": "n", "sku": "item.sku", "later": "later", "key": "record.key"},
        )
        found = project(records(*((b"k", value, []) for value in (*values, b"nope", None))), settings).collect()
    shown = [(row.n, row.sku, row.later, row.key, row._row, row._problem) for row in found]
    assert shown[:2] == [(7, "a", None, "k", 0, None), (7, "b", None, "k", 1, None)]
    assert [row[-1] for row in shown[2:]] == [
        "a field that must be there is missing: n",
        "neither the value nor its headers have the id of a schema",
    ]


def test_cloud_events_and_framed_json(records):
    """Attributes of a CloudEvent are columns; JSON of a serializer for a registry is read without its frame."""
    event = cloud_event_record(
        "t", {"n": 1}, type="paid", source="/shop", id="e1", subject="o", time=_NOON, extensions={"minor": 0}
    )
    settings = RowSettings(
        schema="n BIGINT",
        columns={
            "n": "n",
            **{name: f"record.event.{name}" for name in ("id", "source", "type", "subject", "time", "dataschema")},
            "media": "record.event.datacontenttype",
            "minor": "record.event.extensions['minor']",
        },
    )
    given = (b"k", event.value.encode(), event.headers), (b"k", b'\0\0\0\0\1{"n":2}', [("ce_type", "paid")])
    one, two = (row.asDict() for row in project(records(*given), settings).collect())
    assert one["_problem"] is two["_problem"] is None
    own = {name: one[name] for name in settings.columns if name != "time"}
    expected = {"n": 1, "id": "e1", "source": "/shop", "type": "paid", "subject": "o", "dataschema": None}
    assert own == {**expected, "media": "application/json", "minor": "0"}
    assert one["time"].astimezone(dt.UTC) == _NOON
    assert (two["n"], two["id"], two["type"]) == (2, None, None)


def test_change_events(records):
    """Each record is one event with its key, its place in the order of the key, and whether it deletes."""
    settings = RowSettings(schema="n BIGINT NOT NULL", where="n > 0", columns={"n": "n"})
    found = changes(
        records(
            (b"a", b'{"n":1}', [("outbox-id", "db.s.t:41")]),
            (b"a", None, [("outbox-id", "db.s.t:42")]),
            (b"a", b'{"n":1}', [("outbox-id", "db.s.t:41")]),
            (b"b", b'{"n":0}', []),
            (None, b'{"n":1}', []),
            (b"c", b"{}", []),
        ),
        settings,
    ).collect()
    assert [(row._topic, row._key, row._sequence, row._deleted, row.n) for row in found[:4]] == [
        ("t", "a", 41, False, 1),
        ("t", "a", 42, True, None),
        ("t", "a", 41, False, 1),
        ("t", "b", 3, True, None),
    ]
    assert [(row._deleted, row.n) for row in found[4:]] == [(False, None)] * 2
    assert ["key" in found[4]._problem, "missing: n" in found[5]._problem] == [True, True]
    with pytest.raises(InvalidConfig, match="explode"):
        changes(records(), RowSettings(schema="n ARRAY<INT>", explode="n"))


def test_text_that_expressions_make(records):
    """Bytes that are not UTF-8 are no text, in no column and at no depth: the record is a misfit without values."""
    broken, fine = b"\xc3\x28", "\u00fc".encode()
    settings = RowSettings(
        schema="n BIGINT",
        columns={
            "n": "n",
            "x": "CAST(get(record.headers, 0).value AS STRING)",
            "all": "transform(record.headers, h -> struct(CAST(h.value AS STRING) AS text, h.value AS bytes))",
            "named": "map_from_entries(transform(record.headers, h -> struct(CAST(h.value AS STRING), h.key)))",
        },
    )
    given = [
        (b"k", b'{"n":1}', [("x", fine)]),
        (b"k", b'{"n":2}', [("x", broken)]),
        (b"k", b'{"n":3}', [("x", fine), ("y", broken)]),
        (b"k", b'{"n":4}', [("outbox-id", "\ufffd:1")]),
        (b"k", b'{"n":5}', []),
    ]
    found = project(records(*given), settings).collect()
    assert [(row.n, row._problem) for row in found] == [
        (1, None),
        (None, "x is not UTF-8 text"),
        (None, "all is not UTF-8 text"),
        (None, "the outbox-id is not UTF-8 text"),
        (5, None),
    ]
    assert (found[0].x, found[0].named) == ("\u00fc", {"\u00fc": "x"})
    events = changes(records(*given[:2]), settings).collect()
    assert [(row.n, row._deleted, row._problem) for row in events] == [
        (1, False, None),
        (None, False, "x is not UTF-8 text"),
    ]


@pytest.mark.parametrize(
    ("chosen", "value", "wild"),
    [
        (
            {"schema": "l ARRAY<STRUCT<at: TIMESTAMP>>", "explode": "l", "columns": {"at": "item.at"}},
            b'{"l":[{"at":"2026-01-01T00:00:00Z"},{"at":"%b-01-01T00:00:00Z"}]}',
            "at",
        ),
        ({"schema": "o STRUCT<m: MAP<STRING, DATE>>"}, b'{"o":{"m":{"x":"%b-01-01"}}}', "o"),
        ({"schema": "t STRING", "columns": {"d": "try_cast(t AS DATE)"}}, b'{"t":"%b-01-01"}', "d"),
    ],
    ids=["items", "within", "expression"],
)
def test_times_that_no_other_system_holds(records, chosen, value, wild):
    """A time beyond the calendar of databases is a misfit, at any depth and also if an expression makes it."""
    given = [(b"k", value % year, []) for year in (b"9999", b"+20000", b"-0044")]
    problem = f"{wild} is not within the years 1 to 9999"
    assert [row._problem for row in project(records(*given), RowSettings(**chosen)).collect()][-2:] == [problem] * 2
    assert [row.problem for row in parse(records(*given), RowSettings(**chosen)).collect()] == [None, problem, problem]
