"""OutboxRecord: accepted values, the form in which it keeps them, and refusals."""

import dataclasses
import json
from dataclasses import FrozenInstanceError
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from outbox_core.errors import InvalidRecord, OutboxError
from outbox_core.record import Header, OutboxRecord
from outbox_core.topic_names import MAX_TOPIC_LENGTH

_TOPIC_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class _Colour(StrEnum):
    RED = "red"


class _Number(int, Enum):
    ONE = 1


class _Level(IntEnum):
    HIGH = 9


@given(
    st.text(_TOPIC_CHARACTERS, min_size=1, max_size=MAX_TOPIC_LENGTH).filter(
        lambda t: (
            t not in {".", ".."} and not t.startswith("__") and not t.endswith((".neli", "manifests", ".dead-letter"))
        )
    )
)
def test_legal_topics(topic):
    """Every name that Kafka allows is kept as it is."""
    assert OutboxRecord(topic).topic == topic


@pytest.mark.parametrize(
    "topic",
    ["", ".", "..", "a b", "a/b", "a\n", "\u00e9", "a\0", "x" * 250, None, b"orders", 3, "a:b", "a,b", "a\u0660"],
)
def test_illegal_topics(topic):
    """A topic name that Kafka would refuse is refused when the record is made."""
    with pytest.raises(InvalidRecord, match=r"^topic: "):
        OutboxRecord(topic)


@pytest.mark.parametrize(
    "topic",
    [
        *("__consumer_offsets", "__x", "shop.public.outbox.neli", "a.manifests", "a.relay-manifests"),
        *("postgres.public.outbox.dead-letter", "a.b.c.d.dead-letter"),
    ],
)
def test_topics_that_are_not_for_records(topic):
    """A topic name that would deceive an outbox, or break Kafka's own topics, is refused when the record is made."""
    with pytest.raises(InvalidRecord, match=r"^topic: .* are not for records"):
        OutboxRecord(topic)


@pytest.mark.parametrize(
    "topic",
    ["_x", "a__", "neli", "manifests", "a.manifests.b", "a-manifests", "orders.dead-letter", "eu.orders.dead-letter"],
)
def test_topics_that_look_like_those_are_records_topics(topic):
    """Names that only resemble reserved ones are accepted."""
    assert OutboxRecord(topic).topic == topic


@pytest.mark.parametrize(
    ("field", "largest", "too_large"),
    [
        ("key", "k" * 65_536, "k" * 65_537),
        ("key", "\u00fc" * 32_768, "\u00fc" * 32_769),
        ("headers", {"h": b"v" * (2**20 - 1)}, {"h": b"v" * 2**20}),
        ("headers", [("h" * 2**19, "v" * 2**19)], [("h" * 2**19, "v" * 2**19 + "v")]),
    ],
    ids=["key", "key-utf8", "header-value", "header-name"],
)
def test_sizes(field, largest, too_large):
    """Keys and headers have a limit in bytes, which the error names."""
    OutboxRecord("t", **{field: largest})
    with pytest.raises(InvalidRecord, match=rf"^{field}: \d+ bytes.* at most \d+ are allowed"):
        OutboxRecord("t", **{field: too_large})


def test_values_that_no_client_sends(monkeypatch):
    """A value larger than any producer's limit is refused; smaller ones depend on the topic."""
    monkeypatch.setattr("outbox_core.record.MAX_VALUE_BYTES", 10)
    assert OutboxRecord("t", value=b"v" * 10).value == b"v" * 10
    for value in (b"v" * 11, "v" * 11, {"a": "vvvv"}, bytearray(11)):
        with pytest.raises(InvalidRecord, match=r"^value: 1\d? bytes, at most 10 are allowed"):
            OutboxRecord("t", value=value)


def test_topic_is_required():
    """A record without a topic is refused."""
    with pytest.raises(TypeError):
        OutboxRecord()


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        (None, None),
        ("", ""),
        ("k", "k"),
        (b"k\xc3\xa9", "k\u00e9"),
        (b"", ""),
        (0, "0"),
        (-(2**70), str(-(2**70))),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (_Colour.RED, "red"),
        (_Number.ONE, "1"),
        (_Level.HIGH, "9"),
    ],
)
def test_keys(key, kept):
    """Keys are kept as text; an enum's member as its value."""
    assert OutboxRecord("orders", key).key == kept


@pytest.mark.parametrize("key", [True, 1.5, b"\xff", "a\0b", b"a\0b", "\ud800", ("a",), Decimal(1), object()])
def test_illegal_keys(key):
    """A key that the text column could not hold, or that would become text only by a guess, is refused."""
    with pytest.raises(InvalidRecord, match=r"^key: "):
        OutboxRecord("orders", key)


def test_key_of_endless_digits():
    """A number that Python will not write out is refused as a key."""
    with pytest.raises(InvalidRecord, match=r"^key: "):
        OutboxRecord("orders", 10**5000)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_is_a_key(key):
    """All text without NUL is a key, as str and as UTF-8."""
    assert OutboxRecord("orders", key).key == OutboxRecord("orders", key.encode()).key == key


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (b"", b""),
        (b"\0\xff", b"\0\xff"),
        (bytearray(b"x"), b"x"),
        (memoryview(b"xyz")[::2], b"xz"),
        ("", ""),
        ("\0 \u00e9 {", "\0 \u00e9 {"),
        ({}, "{}"),
        ({"total": 42, "name": "\u00e9"}, '{"total":42,"name":"\u00e9"}'),
        ([1, None, True], "[1,null,true]"),
        ((1, 2), "[1,2]"),
        (42, "42"),
        (False, "false"),
        (1.5, "1.5"),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Decimal("1.10"), '"1.10"'),
        (datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), '"2024-01-02T03:04:05+00:00"'),
        ({"d": date(2024, 1, 2), "t": time(3, 4)}, '{"d":"2024-01-02","t":"03:04:00"}'),
        ({"colour": _Colour.RED}, '{"colour":"red"}'),
    ],
)
def test_values(value, kept):
    """Bytes and text stay, None is a tombstone, and other values become compact JSON."""
    assert OutboxRecord("orders", value=value).value == kept


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, {"x": float("nan")}, float("inf"), {(1, 2): 3}, {"x": b"bytes"}, "\ud800", {"x": "\ud800"}],
)
def test_illegal_values(value):
    """A value that is neither bytes, valid text nor strict JSON is refused."""
    with pytest.raises(InvalidRecord, match=r"^value: "):
        OutboxRecord("orders", value=value)


def test_value_that_contains_itself():
    """A value that contains itself is refused, without a RecursionError."""
    endless = []
    endless.append(endless)
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for value in (endless, nested):
        with pytest.raises(InvalidRecord, match=r"^value: "):
            OutboxRecord("orders", value=value)


@given(_json_values.filter(lambda value: value is not None and not isinstance(value, str)))
def test_json_reads_back(value):
    """A value that became JSON reads back as it was, and is UTF-8."""
    text = OutboxRecord("orders", value=value).value
    assert json.loads(text.encode()) == value


def test_value_is_a_copy():
    """A change of the arguments afterwards does not change the record."""
    value, headers, payload = {"n": 1}, {"h": "1"}, bytearray(b"x")
    record = OutboxRecord("orders", "k", value, headers)
    binary = OutboxRecord("orders", "k", payload)
    value["n"], headers["h"], payload[0] = 2, "2", 0
    assert (record.value, record.headers, binary.value) == ('{"n":1}', (Header("h", "1"),), b"x")


@pytest.mark.parametrize(
    "headers",
    [
        {"a": "1", "b": None},
        MappingProxyType({"a": "1", "b": None}),
        [("a", "1"), ("b", None)],
        (["a", "1"], ["b", None]),
        (Header("a", "1"), Header("b", None)),
        {"a": "1", "b": None}.items(),
    ],
)
def test_headers(headers):
    """Headers are a mapping or pairs, and are kept as Header tuples in their order."""
    assert OutboxRecord("orders", headers=headers).headers == (Header("a", "1"), Header("b", None))


def test_headers_from_a_generator_and_with_repeated_names():
    """Headers may be pairs from a generator; a name may occur more than once."""
    record = OutboxRecord("orders", headers=(("a", value) for value in (b"1", bytearray(b"2"), memoryview(b"3"))))
    assert record.headers == (Header("a", b"1"), Header("a", b"2"), Header("a", b"3"))


@pytest.mark.parametrize(
    ("headers", "where"),
    [
        (None, "headers"),
        ("ab", "headers"),
        (b"ab", "headers"),
        (3, "headers"),
        (["ab"], r"headers\[0\]"),
        ([("a", "1"), ("b",)], r"headers\[1\]"),
        ([("a", "1", "2")], r"headers\[0\]"),
        ([(b"a", "1")], r"headers\[0\]"),
        ([(None, "1")], r"headers\[0\]"),
        ({"a": 1}, r"headers\[0\]"),
        ({"a": "1", "b": ["x"]}, r"headers\[1\]"),
        ({"a\0": "1"}, r"headers\[0\]"),
        ({"\ud800": "1"}, r"headers\[0\]"),
        ({"a": "\ud800"}, r"headers\[0\]"),
    ],
)
def test_illegal_headers(headers, where):
    """A header that is no pair of name and value is refused, with its position."""
    with pytest.raises(InvalidRecord, match=f"^{where}: "):
        OutboxRecord("orders", headers=headers)


@pytest.mark.parametrize("partition", [None, 0, 1, 2**31 - 1, _Level.HIGH])
def test_partitions(partition):
    """A partition is a number of Kafka's int32, or left to the partitioner."""
    assert OutboxRecord("orders", partition=partition).partition == partition


@pytest.mark.parametrize("partition", [-1, 2**31, True, "1", 1.0, b"1"])
def test_illegal_partitions(partition):
    """A partition outside of Kafka's int32, or of another type, is refused."""
    with pytest.raises(InvalidRecord, match=r"^partition: "):
        OutboxRecord("orders", partition=partition)


def test_record_is_a_value():
    """Records are equal by their fields, can be hashed, and cannot be changed."""
    record = OutboxRecord("orders", 1, {"a": 1}, {"h": "x"}, 2)
    assert record == OutboxRecord("orders", "1", '{"a":1}', [("h", "x")], 2)
    assert len({record, OutboxRecord("orders", "1", '{"a":1}', [("h", "x")], 2)}) == 1
    with pytest.raises(FrozenInstanceError):
        record.topic = "other"


def test_errors_are_ours_and_value_errors():
    """A bad record's error is both the library's and a ValueError."""
    assert issubclass(InvalidRecord, OutboxError)
    assert issubclass(InvalidRecord, ValueError)


class Colour(Enum):
    """An Enum that is no text itself."""

    RED = "red"


@dataclasses.dataclass
class Line:
    """A value as applications have them."""

    product: UUID
    colour: Colour


class Basket(BaseModel):
    """A model as FastAPI's applications have them."""

    lines: list[int]
    left: timedelta


LAZY = type("__proxy__", (), {"__str__": lambda _: "later"})()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Colour.RED, '"red"'),
        (Line(UUID(int=1), Colour.RED), '{"product":"00000000-0000-0000-0000-000000000001","colour":"red"}'),
        ([Basket(lines=[1], left=timedelta(seconds=90))], '[{"lines":[1],"left":"PT1M30S"}]'),
        (timedelta(days=1, seconds=3723, microseconds=5), '"P1DT01H02M03.000005S"'),
        (-timedelta(minutes=1), '"-P0DT00H01M00S"'),
        ([LAZY], '["later"]'),
    ],
)
def test_values_of_applications(value, written):
    """Enums, dataclasses, models of pydantic, durations and lazy texts are written as JSON, also within others."""
    assert OutboxRecord("t", "k", value).value == written
    assert OutboxRecord("t", "k", {"in": [value]}).value == f'{{"in":[{written}]}}'


def test_a_set_says_what_to_write():
    """A value without an order is refused, with what to write instead; a topic of another type is named with it."""
    with pytest.raises(InvalidRecord, match="set is not JSON serializable; make a list of it"):
        OutboxRecord("t", "k", {1, 2})
    with pytest.raises(InvalidRecord, match="got int 5"):
        OutboxRecord(5)
