"""Table names, the capacity of a table's columns, and the DDL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import InvalidConfig, InvalidRecord
from outbox_core.record import OutboxRecord
from outbox_core.schema import (
    BINARY_LAYOUT,
    COLUMNS,
    STORAGE_PARAMETERS,
    TEXT_LAYOUT,
    TableLayout,
    TableName,
    create_table_sql,
)
from outbox_core.stasher import Stasher, insert_sql

_identifiers = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=15)


@pytest.mark.parametrize(
    ("text", "name", "quoted"),
    [
        ("outbox", TableName("outbox"), '"outbox"'),
        ("billing.outbox", TableName("outbox", "billing"), '"billing"."outbox"'),
        ("Outbox", TableName("Outbox"), '"Outbox"'),
        ("_o1$", TableName("_o1$"), '"_o1$"'),
        ("bücher", TableName("bücher"), '"bücher"'),
        ('"a.b"', TableName("a.b"), '"a.b"'),
        ('"a b".outbox', TableName("outbox", "a b"), '"a b"."outbox"'),
        ('s."it""s"', TableName('it"s', "s"), '"s"."it""s"'),
        ("x" * 63, TableName("x" * 63), f'"{"x" * 63}"'),
    ],
)
def test_table_names(text, name, quoted):
    """A name is read with or without schema and quotes, exactly as written."""
    assert TableName.parse(text) == name
    assert name.quoted == quoted


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "a.", ".a", "a..b", "a.b.c", "a b", "1a", "a-b", "a;b", 'a"b', '"a', 'a"', '""', '"a"b', '"a""', " a",
        "a\n", "a'b", "x" * 64, "é" * 32, '"' + "x" * 64 + '"', '"a\0"', "a\0", "a.b --", "$a",
    ],
)  # fmt: skip
def test_illegal_table_names(text):
    """Text that is no name is refused, so that none of it reaches a statement."""
    with pytest.raises(InvalidConfig):
        TableName.parse(text)


@given(_identifiers, st.none() | _identifiers)
def test_quoted_name_reads_back(table, schema):
    """Every identifier that PostgreSQL can have reads back as itself once quoted."""
    name = TableName(table, schema)
    assert TableName.parse(name.quoted) == name


@given(st.text(max_size=12) | st.text('ab."$1 ', max_size=12))
def test_parse_reads_or_refuses(text):
    """Any text is either a name that quotes to an equivalent one, or refused as InvalidConfig."""
    try:
        name = TableName.parse(text)
    except InvalidConfig:
        return
    assert TableName.parse(name.quoted) == name


def test_binary_row():
    """The binary layout takes text as UTF-8 bytes, and all fields of a record."""
    record = OutboxRecord("orders", "k" * 1000, "é\0", [("a", "é"), ("b", b"\0"), ("c", None)], 7)
    assert BINARY_LAYOUT.row(record) == (
        "orders",
        "k" * 1000,
        "é\0".encode(),
        ["a", "b", "c"],
        ["é".encode(), b"\0", None],
        7,
    )


def test_bare_row():
    """A record of a topic alone is a tombstone without key."""
    assert BINARY_LAYOUT.row(OutboxRecord("orders")) == ("orders", None, None, [], [], None)


def test_text_row():
    """The text layout takes text as it is."""
    record = OutboxRecord("orders", "k", {"a": "é"}, {"h": "x", "n": None})
    assert TEXT_LAYOUT.row(record) == ("orders", "k", '{"a":"é"}', ["h", "n"], ["x", None], None)


@pytest.mark.parametrize(
    ("layout", "record", "complaint"),
    [
        (TEXT_LAYOUT, OutboxRecord("orders"), r"^key: .*NOT NULL"),
        (TEXT_LAYOUT, OutboxRecord("orders", "k", b"v"), r"^value: bytes"),
        (TEXT_LAYOUT, OutboxRecord("orders", "k", "\0"), r"^value: contains a NUL"),
        (TEXT_LAYOUT, OutboxRecord("orders", "k", "v", {"h": b""}), r"^headers: the value of 'h': bytes"),
        (TEXT_LAYOUT, OutboxRecord("orders", "k", "v", {"h": "\0"}), r"^headers: the value of 'h': contains a NUL"),
        (TEXT_LAYOUT, OutboxRecord("orders", "k", partition=0), r"^partition: "),
        (TEXT_LAYOUT, OutboxRecord("orders", "k" * 101), r"^key: 101 characters do not fit .*kafka_key of 100"),
        (TEXT_LAYOUT, OutboxRecord("orders", "k", "v" * 10_001), r"^value: 10001 .*kafka_value of 10000"),
        (TableLayout(key_length=3), OutboxRecord("orders", 1234), r"^key: 4 characters"),
        (TableLayout(key_required=True), OutboxRecord("orders"), r"^key: "),
        (BINARY_LAYOUT, {"topic": "orders"}, "expected an OutboxRecord, got dict"),
        (BINARY_LAYOUT, None, "expected an OutboxRecord, got NoneType"),
    ],
)
def test_what_does_not_fit(layout, record, complaint):
    """A record that the columns cannot hold is refused by the name of the field."""
    with pytest.raises(InvalidRecord, match=complaint):
        layout.row(record)


def test_lengths_are_characters():
    """Lengths count characters as PostgreSQL does, not bytes; the longest still fits."""
    record = OutboxRecord("orders", "\U0001f600" * 100, "é" * 10_000)
    assert TEXT_LAYOUT.row(record)[1:3] == ("\U0001f600" * 100, "é" * 10_000)


def test_columns():
    """A stash writes the columns that the table has."""
    assert BINARY_LAYOUT.columns == COLUMNS[1:]
    assert TEXT_LAYOUT.columns == COLUMNS[1:-1]
    assert len(Stasher().row(OutboxRecord("orders"))) == 6
    assert len(Stasher(layout=TEXT_LAYOUT).row(OutboxRecord("orders", "k"))) == 5


def test_insert_statement():
    """The INSERT names its columns, and the time only if that has no default; it casts arrays, and escapes %."""
    assert insert_sql(TableName("100%", "s"), BINARY_LAYOUT) == (
        'INSERT INTO "s"."100%%" (kafka_topic, kafka_key, kafka_value, kafka_header_keys, '
        "kafka_header_values, kafka_partition) VALUES (%s, %s, %s, %s::text[], %s::bytea[], %s)"
    )
    assert insert_sql(TableName("outbox"), TEXT_LAYOUT) == (
        'INSERT INTO "outbox" (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, '
        "kafka_header_values) VALUES (now(), %s, %s, %s, %s::text[], %s::text[])"
    )


@pytest.mark.parametrize("layout", ["binary", "text"])
def test_ddl(layout):
    """The DDL is one statement that quotes its table and carries every storage parameter."""
    ddl = create_table_sql(TableName('o"x', "s"), layout)
    assert ddl.startswith('CREATE TABLE "s"."o""x" (')
    assert ddl.endswith(");\n")
    assert ddl.count(";") == 1
    assert "{" not in ddl.replace("'{}'", "")
    for key, value in STORAGE_PARAMETERS.items():
        assert f"    {key} = {value}" in ddl


def test_stasher_refuses_a_name_that_is_none():
    """A stasher's table name is checked when the stasher is made."""
    with pytest.raises(InvalidConfig):
        Stasher("outbox; DROP TABLE orders")
