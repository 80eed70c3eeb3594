"""Values of callers' own types: records, events, ids, names and reasons keep Python's own."""

from enum import Enum, IntEnum, StrEnum
from uuid import UUID

import pytest
from django.utils.functional import SimpleLazyObject, lazystr
from django.utils.safestring import mark_safe

from outbox_core import InvalidRecord, OutboxRecord
from outbox_core.errors import InvalidConfig, InvalidMessageId
from outbox_core.formats.cloud_events import cloud_event_record
from outbox_core.inbox import inbox_key
from outbox_core.plain import column_text, named, plain
from outbox_core.testing.expectation import Expectation


class Colour(str, Enum):  # noqa: UP042  its text is its name
    RED = "red"


class Shade(StrEnum):
    RED = "red"


class Talking(str):
    """Text whose methods say something else."""

    __slots__ = ()

    def __str__(self):
        return "something else"

    def __format__(self, spec):
        return "something else"

    def encode(self, *_, **__):
        return b"something else"


class Blob(bytes):
    """Bytes whose methods say something else."""

    __slots__ = ()

    def __bytes__(self):
        return b"something else"

    def decode(self, *_, **__):
        return "something else"


class Level(int, Enum):
    SEVEN = 7


class Rank(IntEnum):
    SEVEN = 7


class Index:
    """A whole number as NumPy has it."""

    def __index__(self):
        return 7


class Array:
    """What has the method of a whole number, and is none."""

    def __index__(self):
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


class LongId(UUID):
    """An id that shows otherwise."""

    def __str__(self):
        return "short"


TEXTS = {
    "str, Enum": Colour.RED,
    "StrEnum": Shade.RED,
    "talking": Talking("red"),
    "SafeString": mark_safe("red"),
    "lazy": lazystr("red"),
    "proxy": SimpleLazyObject(lambda: "red"),
    "proxy of SafeString": SimpleLazyObject(lambda: mark_safe("red")),
}
BYTES = {
    "bytes": Blob(b"red"),
    "bytearray": bytearray(b"red"),
    "memoryview": memoryview(b"r.e.d")[::2],
}
NUMBERS = {
    "int, Enum": Level.SEVEN,
    "IntEnum": Rank.SEVEN,
    "index": Index(),
    "proxy": SimpleLazyObject(lambda: 7),
}
each_text = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
each_bytes = pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
each_number = pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)


def is_own(value, expected):
    """Return True if it is that value, of Python's own type, and deep in tuples, too."""
    if isinstance(expected, tuple):
        return len(value) == len(expected) and all(map(is_own, value, expected))
    return type(value) is type(expected) and value == expected


@each_text
def test_texts_of_records(text):
    """Topic, key, value, names and values of headers are plain text."""
    record = OutboxRecord(text, text, text, [(text, text)])
    assert is_own((record.topic, record.key, record.value), ("red", "red", "red"))
    assert is_own(record.headers, (("red", "red"),))
    assert is_own(OutboxRecord("t", value={"a": [text]}).value, '{"a":["red"]}')
    assert is_own(OutboxRecord("t", value=1, serializer=lambda _: text).value, "red")


@each_bytes
def test_bytes_of_records(content):
    """Key, value and values of headers are the bytes, whatever holds them."""
    record = OutboxRecord("t", content, content, [("h", content)])
    assert is_own((record.key, record.value), ("red", b"red"))
    assert is_own(record.headers, (("h", b"red"),))


@each_number
def test_numbers_of_records(number):
    """Key, partition and numbers in a value are plain."""
    record = OutboxRecord("t", number, number, partition=number)
    assert is_own((record.key, record.value, record.partition), ("7", "7", 7))
    assert is_own(OutboxRecord("t", value=[number]).value if number is not NUMBERS["proxy"] else "[7]", "[7]")


@pytest.mark.parametrize("wrong", [True, SimpleLazyObject(lambda: True), Array(), 1.5, object(), 2**31, -1])
def test_what_is_no_partition(wrong):
    """A truth value, an array, a float and a number out of range are refused, whatever their types."""
    with pytest.raises(InvalidRecord, match="partition: expected a whole number"):
        OutboxRecord("t", partition=wrong)


@pytest.mark.parametrize("wrong", [True, SimpleLazyObject(lambda: False), Array(), 1.5])
def test_what_is_no_key(wrong):
    """So they are as keys and as ids of messages."""
    with pytest.raises(InvalidRecord, match="key: expected str"):
        OutboxRecord("t", wrong)
    with pytest.raises(InvalidMessageId, match="message_id: expected str"):
        inbox_key("s", wrong)


def test_a_class_of_ids():
    """An id of a class of the caller's is kept as its digits."""
    number = LongId(int=7)
    assert OutboxRecord("t", number).key == inbox_key(number, number)[0] == UUID.__str__(number)


@each_text
def test_texts_of_events(text):
    """An event's attributes are plain text, its id among them, and its data is no JSON if it is text."""
    record = cloud_event_record(
        text, text, type=text, source=text, id=text, subject=text, extensions={"colour": text}, key=text
    )
    headers = dict(record.headers)
    assert is_own(tuple(headers[f"ce_{name}"] for name in ("type", "source", "id", "subject", "colour")), ("red",) * 5)
    assert "content-type" not in headers


def test_numbers_and_bytes_of_events():
    """A number is its digits, and bytes in any form are no JSON."""
    record = cloud_event_record("t", memoryview(b"x"), type="t", source="s", extensions={"level": Level.SEVEN})
    assert dict(record.headers)["ce_level"] == "7"
    assert "content-type" not in dict(record.headers)


@each_text
def test_texts_as_ids(text):
    """Source and id of an acceptance are plain text."""
    assert is_own(inbox_key(text, text), ("red", "red"))
    assert is_own((named(text, "topic"), column_text(text, "reason")), ("red", "red"))


@each_bytes
def test_bytes_as_ids(content):
    """The id of a message and the key of a hold may be UTF-8, whatever holds it; a topic may not."""
    assert is_own((inbox_key("s", content)[1], column_text(content, "key")), ("red", "red"))
    with pytest.raises(InvalidConfig, match="topic: expected a name, got b'red'"):
        named(content, "topic")


@each_number
def test_numbers_as_ids(number):
    """A number is its digits."""
    assert is_own(inbox_key(number, number), ("7", "7"))
    assert is_own(plain(number), 7)


@each_text
def test_texts_that_tests_expect(text):
    """An expectation may be in the words of the application."""
    record = OutboxRecord("red", "red", "red", {"red": "red"})
    assert Expectation(topic=text, key=text, value=text, headers={text: text}).matches(record)
    assert "topic 'red'" in str(Expectation(topic=text))


@each_bytes
def test_bytes_that_tests_expect(content):
    """So may bytes be."""
    assert Expectation(key=content, value=content).matches(OutboxRecord("t", "red", b"red"))
