"""Assertions about stashed records, and the words in which they fail."""

from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from unittest.mock import ANY, Mock
from uuid import UUID

import pytest

from outbox_core import InvalidRecord, OutboxRecord, Stasher, TransactionRequired, stasher
from outbox_core.schema import TEXT_LAYOUT
from outbox_core.testing import capture_stashed, in_memory_outbox

AUTOCOMMIT = SimpleNamespace(autocommit=True)
PLACED = OutboxRecord("orders", 7, {"total": 42, "lines": [{"price": "1.50"}]}, {"event": "placed", "n": b"1"})
NEAREST_MISS = """\
no record was stashed on topic 'orders' with key '7', value {'total': 41, 'lines': [{'price': '1.50', 'n': 2}]}, \
headers {'event': 'gone', 'x': '1'}

nearest miss: orders  key='7'  value='{"total":42,"lines":[{"price":"1.50"}]}'  headers: event='placed', n='1'
  value.total: expected 41, got 42
  value.lines[0].n: expected 2, but it is missing
  header event: expected 'gone', got 'placed'
  header x: expected '1', but it is missing

stashed:
  1. orders  key='7'  value='{"total":42,"lines":[{"price":"1.50"}]}'  headers: event='placed', n='1'
  2. orders  key='8'  value=None  partition=3
  3. stock  key=None  value=b'\\xff'"""


@pytest.fixture
def stashed(in_memory_outbox):
    """Return an outbox in memory with three records."""
    Stasher().stash(Mock(), PLACED)
    Stasher().stash_many(Mock(), [OutboxRecord("orders", 8, None, (), 3), OutboxRecord("stock", None, b"\xff")])
    return in_memory_outbox


@pytest.mark.parametrize(
    "expected",
    [
        {},
        {"topic": "orders"},
        {"topic": "orders", "key": 7},
        {"topic": "orders", "key": "7"},
        {"key": b"7"},
        {"value": {"total": 42, "lines": [{"price": "1.50"}]}},
        {"value": {"total": 42, "lines": [{"price": Decimal("1.50")}]}},
        {"value": {"total": 42, "lines": ANY}},
        {"value": '{"total":42,"lines":[{"price":"1.50"}]}'},
        {"value": b'{"total":42,"lines":[{"price":"1.50"}]}'},
        {"headers": {"event": "placed"}},
        {"headers": [("n", "1"), ("event", b"placed")]},
        {"headers": {}, "partition": None},
    ],
)
def test_a_record_is_found_by_any_of_its_fields(stashed, expected):
    """The first record that has all the given fields is returned; fields that are left out may be anything."""
    assert stashed.assert_stashed(**expected) == stashed[0]
    assert stashed[0] in stashed.matching(**expected)


@pytest.mark.parametrize(
    "expected",
    [
        {"topic": "order"},
        {"topic": "orders", "key": None},
        {"topic": "stock", "key": 7},
        {"key": 7, "value": {"total": 42}},
        {"key": 7, "value": None},
        {"key": 8, "value": ""},
        {"key": 8, "value": {}},
        {"topic": "stock", "value": {}},
        {"headers": {"event": "placed", "other": None}},
        {"key": 7, "partition": 3},
        {"key": 8, "partition": None},
    ],
)
def test_another_record_is_not_taken_for_it(stashed, expected):
    """A record that differs in one of the given fields does not do."""
    stashed.assert_not_stashed(**expected)
    with pytest.raises(AssertionError, match="no record was stashed"):
        stashed.assert_stashed(**expected)


def test_the_nearest_miss_is_shown_with_its_differences(stashed):
    """A failure names each part that differs from the nearest record, and lists all that was stashed."""
    with pytest.raises(AssertionError) as failure:
        stashed.assert_stashed(
            "orders",
            key=7,
            value={"total": 41, "lines": [{"price": "1.50", "n": 2}]},
            headers={"event": "gone", "x": "1"},
        )
    assert str(failure.value) == NEAREST_MISS


@pytest.mark.parametrize(
    ("expected", "nearest"),
    [
        ({"topic": "order"}, "orders  key='7'"),
        ({"topic": "orders", "key": 8, "value": {}}, "orders  key='8'"),
        ({"topic": "stocks", "key": 1}, "stock "),
        ({"value": {"total": 42}}, "orders  key='7'"),
    ],
)
def test_the_nearest_miss_is_the_one_that_was_meant(stashed, expected, nearest):
    """The record with the likest topic, key and value is shown."""
    with pytest.raises(AssertionError) as failure:
        stashed.assert_stashed(**expected)
    assert f"nearest miss: {nearest}" in str(failure.value)


def test_counts(stashed):
    """`count` asks for exactly so many; the failure says how many there were."""
    stashed.assert_stashed("orders", count=2)
    with pytest.raises(AssertionError, match=r"2 records were stashed on topic 'orders'; expected 1\n"):
        stashed.assert_stashed("orders", count=1)
    with pytest.raises(AssertionError, match=r"1 record was stashed on topic 'stock':\n  1. stock"):
        stashed.assert_not_stashed("stock")


def test_nothing_was_stashed(in_memory_outbox):
    """An empty outbox is named as such."""
    assert not in_memory_outbox
    in_memory_outbox.assert_not_stashed()
    with pytest.raises(AssertionError, match=r"no record was stashed on topic 'orders'\n\nstashed: nothing"):
        in_memory_outbox.assert_stashed("orders")


def test_long_output_is_cut(in_memory_outbox):
    """A failure shows at most twenty records, and 200 characters of a value."""
    Stasher().stash_many(Mock(), [OutboxRecord("t", n, "x" * 10_000) for n in range(25)])
    with pytest.raises(AssertionError) as failure:
        in_memory_outbox.assert_stashed("u")
    assert "(10002 characters)" in str(failure.value)
    assert str(failure.value).splitlines()[-1] == "  ... and 5 more"
    assert len(str(failure.value)) < 10_000


def test_an_expectation_that_no_record_can_meet_is_an_error(stashed):
    """A topic, key or header that no record can have is refused, instead of searched for."""
    for wrong in ({"topic": "no topic"}, {"key": 1.5}, {"headers": {"x": 1}}):
        with pytest.raises(InvalidRecord, match=next(iter(wrong))):
            stashed.assert_not_stashed(**wrong)


def test_values_are_compared_as_a_reader_sees_them(in_memory_outbox):
    """Dates, UUIDs and tuples are expected as they were given."""
    value = {"at": datetime(2026, 1, 2, tzinfo=UTC), "id": UUID(int=1), "pair": (1, 2)}
    Stasher().stash(None, OutboxRecord("t", value=value))
    in_memory_outbox.assert_stashed("t", value=value)
    in_memory_outbox.assert_stashed("t", value={"at": "2026-01-02T00:00:00+00:00", "id": ANY, "pair": [1, 2]})


def test_differences_in_text(in_memory_outbox):
    """A text within a document that differs is named, also if it looks like other JSON, or has objects beside it."""
    Stasher().stash(None, OutboxRecord("t", value={"id": str(UUID(int=1)), "n": "1", "none": None, "at": "now"}))
    for expected in ("7-8", "1e5", "null", "", ANY):
        with pytest.raises(AssertionError, match=r"value\.n: expected 1, got '1'\n") as failure:
            in_memory_outbox.assert_stashed("t", value={"id": expected, "n": 1, "none": None, "at": ANY})
        assert ("value.id: expected" in str(failure.value)) == (expected is not ANY)
        assert "value.none" not in str(failure.value)
        assert "value.at" not in str(failure.value)


def test_it_is_a_sequence(stashed):
    """Records can be counted, indexed, compared and forgotten."""
    assert (len(stashed), stashed[0].value, stashed[-1].topic, len(stashed[1:])) == (3, PLACED.value, "stock", 2)
    assert PLACED in stashed
    assert OutboxRecord("orders", 7) not in stashed
    assert stashed != [PLACED]
    assert stashed != {"orders"}
    assert stashed == [PLACED, OutboxRecord("orders", 8, None, (), 3), OutboxRecord("stock", None, b"\xff")]
    assert "orders  key='7'" in repr(stashed)
    stashed.clear()
    assert stashed == []


def test_an_outbox_in_memory_checks_what_a_table_would():
    """Without a database a record is still checked against the columns, and a connection against autocommit."""
    with in_memory_outbox() as stashed:
        with pytest.raises(InvalidRecord, match="bytes do not fit"):
            Stasher("outbox", TEXT_LAYOUT).stash(Mock(), OutboxRecord("t", "k", b"v"))
        with pytest.raises(TransactionRequired):
            Stasher().stash(AUTOCOMMIT, OutboxRecord("t"))
        with Stasher().prepare(Mock()) as prepared:
            prepared.stash(OutboxRecord("t", 1))
        assert stashed == [OutboxRecord("t", 1)]
        with in_memory_outbox(require_transaction=False) as inner:
            Stasher().stash(AUTOCOMMIT, OutboxRecord("t", 2))
        assert inner == [OutboxRecord("t", 2)]


def test_captures_may_be_nested():
    """Each capture has what was stashed while it was open; nothing is captured, or kept from the database, after it."""
    with capture_stashed() as outer:
        with in_memory_outbox() as inner:
            Stasher().stash(Mock(), OutboxRecord("t", 1))
        connection = Mock()
        Stasher().stash(connection, OutboxRecord("t", 2))
        Stasher().stash_many(connection, iter([OutboxRecord("t", 3)]))
    assert stasher.interceptor is None
    Stasher().stash(connection, OutboxRecord("t", 4))
    assert inner == [OutboxRecord("t", 1)]
    assert outer == [OutboxRecord("t", 1), OutboxRecord("t", 2), OutboxRecord("t", 3)]
    assert connection.cursor().execute.call_count == 2
    assert connection.cursor().executemany.call_count == 1


def test_a_failed_insert_is_not_captured():
    """A record whose INSERT fails was not stashed."""
    connection = Mock()
    connection.cursor().execute.side_effect = OSError
    with capture_stashed() as stashed, pytest.raises(OSError):  # noqa: PT011
        Stasher().stash(connection, OutboxRecord("t"))
    assert stashed == []
