"""The contract of every way of stashing, in any framework.

A suite derives from `StashContract`, opens its framework's transactions in the fixture `adapter`, and inherits
the tests. The rows are read back over a connection of its own.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from typing import Protocol

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from outbox_core.errors import InvalidRecord, TransactionRequired
from outbox_core.record import OutboxRecord
from outbox_core.schema import TableName, create_table_sql

EVERY_BYTE = bytes(range(256))
AWKWARD = '\'{"a"},NULL\\n\\\\ %s %(x)s :y \u00e9\u4e2d\U0001f600\u202e'


class _Name(str, Enum):  # noqa: UP042  its text is its name
    RED = "red"


class _Number(int, Enum):
    TWO = 2


class Writer(Protocol):
    """An open transaction (or an autocommit connection) of the framework."""

    def stash(self, record: OutboxRecord) -> None: ...

    def stash_many(self, records: Iterable[OutboxRecord]) -> None: ...

    def savepoint(self) -> AbstractContextManager[object]:
        """Open a savepoint: released at the end of the block, rolled back when an exception leaves it."""

    def execute(self, sql: str) -> None:
        """Run a statement of the application in the same transaction."""


class Adapter(Protocol):
    """A framework's way of writing to the database of the test."""

    def transaction(self) -> AbstractContextManager[Writer]:
        """Open a transaction: committed at the end of the block, rolled back when an exception leaves it."""

    def autocommit(self) -> AbstractContextManager[Writer]:
        """Open a connection outside any transaction, in autocommit mode."""


class _Undo(Exception):
    """An error that leaves a block to roll it back."""


@contextmanager
def _undone(block: AbstractContextManager[Writer]):
    """Leave a transaction or savepoint by an exception."""
    with suppress(_Undo), block as writer:
        yield writer
        raise _Undo


def stashed(database: str, table: str = "outbox"):
    """Return every row of an outbox table by ascending id, as named tuples."""
    with psycopg.connect(database, row_factory=namedtuple_row) as connection:
        return connection.execute(f"SELECT * FROM {TableName.parse(table).quoted} ORDER BY id").fetchall()


def _keys(database: str) -> list[str | None]:
    return [row.kafka_key for row in stashed(database)]


def _value_count(database: str) -> int:
    with psycopg.connect(database) as connection:
        return connection.execute("SELECT count(*) FROM business").fetchone()[0]


class StashContract:
    """The behaviours of every stash adapter, on a table of the binary layout called `outbox`."""

    @pytest.fixture
    def outbox_database(self, database):
        """Return a fresh database with an outbox and a table of the application."""
        with psycopg.connect(database) as connection:
            connection.execute(create_table_sql(TableName("outbox")))
            connection.execute("CREATE TABLE business (id int)")
        return database

    @pytest.fixture
    def adapter(self, outbox_database) -> Adapter:
        """Return this framework's adapter for `outbox_database`."""
        raise NotImplementedError

    def test_commit(self, adapter, outbox_database):
        """Other sessions see a record once its transaction is committed, and not before."""
        with adapter.transaction() as writer:
            writer.stash(OutboxRecord("orders", "k", b"v"))
            assert stashed(outbox_database) == []
        assert _keys(outbox_database) == ["k"]

    def test_rollback(self, adapter, outbox_database):
        """A rolled-back transaction leaves neither its records nor its data."""
        with _undone(adapter.transaction()) as writer:
            writer.execute("INSERT INTO business VALUES (1)")
            writer.stash(OutboxRecord("orders", "k", b"v"))
            writer.stash_many([OutboxRecord("orders", "l", b"v")])
        assert _keys(outbox_database) == []
        assert _value_count(outbox_database) == 0

    def test_atomic_with_data(self, adapter, outbox_database):
        """A record is committed together with data written before and after it."""
        with adapter.transaction() as writer:
            writer.execute("INSERT INTO business VALUES (1)")
            writer.stash(OutboxRecord("orders", "k", b"v"))
            writer.execute("INSERT INTO business VALUES (2)")
        assert _keys(outbox_database) == ["k"]
        assert _value_count(outbox_database) == 2

    def test_savepoint_rollback(self, adapter, outbox_database):
        """Rolling back to a savepoint discards the records stashed after it, and no others."""
        with adapter.transaction() as writer:
            writer.stash(OutboxRecord("orders", "before"))
            with _undone(writer.savepoint()):
                writer.stash(OutboxRecord("orders", "discarded"))
                writer.stash_many([OutboxRecord("orders", "discarded too")])
            writer.stash(OutboxRecord("orders", "after"))
        assert _keys(outbox_database) == ["before", "after"]

    def test_savepoint_released(self, adapter, outbox_database):
        """Records stashed in nested savepoints are committed with the transaction around them."""
        with adapter.transaction() as writer, writer.savepoint():
            writer.stash(OutboxRecord("orders", "outer"))
            with writer.savepoint():
                writer.stash(OutboxRecord("orders", "inner"))
        assert _keys(outbox_database) == ["outer", "inner"]

    def test_autocommit_is_refused(self, adapter, outbox_database):
        """Outside a transaction every function refuses to stash, even no records."""
        with adapter.autocommit() as writer:
            with pytest.raises(TransactionRequired):
                writer.stash(OutboxRecord("orders", "k"))
            with pytest.raises(TransactionRequired):
                writer.stash_many([OutboxRecord("orders", "k")])
            with pytest.raises(TransactionRequired):
                writer.stash_many([])
        assert _keys(outbox_database) == []

    def test_bad_input_sends_nothing(self, adapter, outbox_database):
        """Bad input leaves the transaction usable, and none of the records beside it is written."""
        bad = ({"topic": t} for t in ("orders", "orders", "no topic"))
        with adapter.transaction() as writer:
            with pytest.raises(InvalidRecord, match="topic"):
                writer.stash_many(OutboxRecord(**fields) for fields in bad)
            with pytest.raises(InvalidRecord, match="expected an OutboxRecord, got dict"):
                writer.stash({"topic": "orders"})
            with pytest.raises(InvalidRecord, match="expected an OutboxRecord, got str"):
                writer.stash_many([OutboxRecord("orders", "k"), "orders"])
            writer.execute("INSERT INTO business VALUES (1)")
        assert _keys(outbox_database) == []
        assert _value_count(outbox_database) == 1

    def test_many(self, adapter, outbox_database):
        """Many records, also from a generator, get ascending ids in the order given."""
        with adapter.transaction() as writer:
            writer.stash(OutboxRecord("orders", "first"))
            writer.stash_many(OutboxRecord("orders", number, {"n": number}) for number in range(500))
            writer.stash_many([])
            writer.stash(OutboxRecord("orders", "last"))
        assert _keys(outbox_database) == ["first", *map(str, range(500)), "last"]

    def test_values_byte_for_byte(self, adapter, outbox_database):
        """Every field arrives in its column exactly as given, stashed singly or with others."""
        records = [
            OutboxRecord("orders"),
            OutboxRecord("a" * 249, "", ""),
            OutboxRecord("orders", AWKWARD, AWKWARD, {AWKWARD: AWKWARD}, 0),
            OutboxRecord("orders", "k" * 20_000, EVERY_BYTE * 400, {"h": EVERY_BYTE}, 2**31 - 1),
            OutboxRecord("orders", b"k", b"", [("h", None)]),
            OutboxRecord("orders", 42, {"n": 42, "t": "\0 \u00e9"}, [("a", "1"), ("b", None), ("a", b"\0"), ("", "")]),
            OutboxRecord("orders", "k", b"v", [("h", "")], 3),
        ]
        with adapter.transaction() as writer:
            for record in records:
                writer.stash(record)
            writer.stash_many(records)
        for record, row in zip(records * 2, stashed(outbox_database), strict=True):
            assert row.kafka_topic == record.topic
            assert row.kafka_key == record.key
            assert row.kafka_value == _encoded(record.value)
            assert row.kafka_header_keys == [name for name, _ in record.headers]
            assert row.kafka_header_values == [_encoded(value) for _, value in record.headers]
            assert row.kafka_partition == record.partition
            assert row.leader_id is None

    def test_types_of_callers(self, adapter, outbox_database):
        """Enums, bytes in other forms and numbers of other classes arrive as what they stand for."""
        record = OutboxRecord(
            _Name.RED, _Name.RED, bytearray(b"v"), {_Name.RED: _Name.RED, "n": memoryview(b"m")}, _Number.TWO
        )
        with adapter.transaction() as writer:
            writer.stash(record)
            writer.stash_many([record, OutboxRecord("red", _Number.TWO, _Name.RED)])
        rows = [(row.kafka_topic, row.kafka_key, row.kafka_value) for row in stashed(outbox_database)]
        assert rows == [("red", "red", b"v"), ("red", "red", b"v"), ("red", "2", b"red")]
        row = stashed(outbox_database)[0]
        assert (row.kafka_header_keys, row.kafka_header_values) == (["red", "n"], [b"red", b"m"])
        assert row.kafka_partition == 2

    def test_database_clock(self, adapter, outbox_database):
        """create_time is the database's time of the transaction."""
        with adapter.transaction() as writer:
            writer.execute("CREATE TABLE began AS SELECT now() AS at")
            writer.stash(OutboxRecord("orders"))
            writer.stash_many([OutboxRecord("orders")])
        with psycopg.connect(outbox_database) as connection:
            began = connection.execute("SELECT at FROM began").fetchone()[0]
        assert [row.create_time for row in stashed(outbox_database)] == [began, began]


class CaptureContract:
    """The behaviour of captures on adapters that tell them of transactions; beside `StashContract`."""

    def test_a_capture_has_what_the_table_has(self, adapter, outbox_database, outbox_records):
        """Records of transactions and savepoints that were rolled back are neither in the table nor in the capture."""
        with adapter.transaction() as writer:
            with _undone(writer.savepoint()):
                writer.stash(OutboxRecord("orders", "undone before all others"))
            writer.stash(OutboxRecord("orders", "first"))
            with writer.savepoint():
                writer.stash_many([OutboxRecord("orders", "second"), OutboxRecord("orders", "third")])
                with _undone(writer.savepoint()):
                    writer.stash(OutboxRecord("orders", "undone"))
            assert [record.key for record in outbox_records] == ["first", "second", "third"]
            assert outbox_records.committed == []
        with _undone(adapter.transaction()) as writer:
            writer.stash(OutboxRecord("orders", "rolled back"))
        with adapter.transaction() as writer:
            writer.stash(OutboxRecord("orders", "last"))
        assert [record.key for record in outbox_records.committed] == _keys(outbox_database)
        assert outbox_records == outbox_records.committed
        assert [record.key for record in outbox_records.rolled_back] == [
            "undone before all others",
            "undone",
            "rolled back",
        ]


class TextStashContract:
    """The contract of every stash adapter on a table as goharvest makes it, called `outbox`."""

    @pytest.fixture
    def outbox_database(self, database):
        """Return a fresh database with the outbox table of goharvest's documentation."""
        with psycopg.connect(database) as connection:
            connection.execute(create_table_sql(TableName("outbox"), "text"))
        return database

    @pytest.fixture
    def adapter(self, outbox_database) -> Adapter:
        """Return this framework's adapter for `outbox_database`."""
        raise NotImplementedError

    def test_text_is_stored(self, adapter, outbox_database):
        """Text keys, values and headers arrive as given; the database's clock writes create_time, without a default."""
        with adapter.transaction() as writer:
            writer.stash(OutboxRecord("orders", AWKWARD, AWKWARD, [(AWKWARD, AWKWARD), ("n", None)]))
            writer.stash_many([OutboxRecord("orders", "k" * 100, "\u00e9" * 10_000), OutboxRecord("orders", "k")])
        first, longest, tombstone = stashed(outbox_database)
        assert (first.kafka_key, first.kafka_value) == (AWKWARD, AWKWARD)
        assert (first.kafka_header_keys, first.kafka_header_values) == ([AWKWARD, "n"], [AWKWARD, None])
        assert (longest.kafka_key, longest.kafka_value) == ("k" * 100, "\u00e9" * 10_000)
        assert (tombstone.kafka_value, tombstone.kafka_header_keys, tombstone.create_time) == (
            None,
            [],
            first.create_time,
        )

    def test_what_does_not_fit(self, adapter, outbox_database):
        """A record that the columns cannot hold is refused before any SQL, and the transaction goes on."""
        refused = [
            (OutboxRecord("orders", None, "v"), "key: .*NOT NULL"),
            (OutboxRecord("orders", "k" * 101, "v"), "key: 101 characters do not fit the column kafka_key of 100"),
            (OutboxRecord("orders", "k", "v" * 10_001), "value: 10001 characters do not fit"),
            (OutboxRecord("orders", "k", b"v"), "value: bytes do not fit a text column"),
            (OutboxRecord("orders", "k", "a\0b"), "value: contains a NUL"),
            (OutboxRecord("orders", "k", "v", {"h": b"x"}), "headers: the value of 'h': bytes do not fit"),
            (OutboxRecord("orders", "k", "v", (), 3), "partition: .*no kafka_partition"),
        ]
        with adapter.transaction() as writer:
            for record, complaint in refused:
                with pytest.raises(InvalidRecord, match=complaint):
                    writer.stash(record)
                with pytest.raises(InvalidRecord, match=complaint):
                    writer.stash_many([OutboxRecord("orders", "good", "v"), record])
            writer.stash(OutboxRecord("orders", "k", "v"))
        assert [row.kafka_key for row in stashed(outbox_database)] == ["k"]


def _encoded(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
