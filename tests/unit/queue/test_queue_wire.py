"""Markers and headers: read by Go, read from Go, and unchanged by a redelivery."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_queue.protocol import headers
from outbox_queue.protocol import markers as wire
from tests.queueing import start_marker

names = st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text and not text.startswith("kmq-"))
pairs = st.lists(st.tuples(names, st.none() | st.binary(max_size=20)), max_size=5)
places = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1))


def _varint(number):
    out = bytearray()
    while True:
        number, low = number >> 7, number & 0x7F
        out.append(low | (0x80 if number else 0))
        if not number:
            return bytes(out)


def _go_marker(kind, place, after_ms=0, key=b"", value=b""):
    """Return a marker as Go writes it: proto3, fields 1 to 6, zero values left out, written here by hand."""
    number = lambda field, n: _varint(field << 3) + _varint(n) if n else b""  # noqa: E731
    data = lambda field, b: _varint(field << 3 | 2) + _varint(len(b)) + b if b else b""  # noqa: E731
    identity = number(1, place[0]) + number(2, place[1])
    whole = _varint(3 << 3 | 2) + _varint(len(identity)) + identity
    return number(2, kind) + whole + number(4, after_ms) + data(5, key) + data(6, value)


@given(place=places, after=st.integers(0, 2**40), key=st.binary(max_size=30), value=st.binary(max_size=50))
def test_fields_one_to_six_are_those_of_go(place, after, key, value):
    """Without our own fields, a marker is byte for byte Go's, and Go's is read."""
    ours = wire.Marker(redeliver_after_ms=after, key=key, value=value, message_id=wire.MessageID(partition=place[0]))
    ours.message_id.offset = place[1]
    assert ours.SerializeToString() == _go_marker(wire.START, place, after, key, value)
    assert wire.end_marker(*place) == _go_marker(wire.END, place)
    assert wire.keep_alive_marker(*place, after) == _go_marker(wire.KEEPALIVE, place, after)
    read = wire.Marker.FromString(_go_marker(wire.START, place, after, key, value))
    assert (read.message_id.partition, read.message_id.offset) == place
    assert (read.redeliver_after_ms, read.key, read.value) == (after, key, value)
    assert not read.HasField("attempt")


def test_go_finds_its_fields_before_ours():
    """A start marker of ours begins with Go's fields; ours have numbers that Go does not know."""
    marker = start_marker(
        3, 9, 500, b"q", b"v", attempt=2, enqueued_at_ms=7, max_attempts=5, origin=(0, 0), headers=[("h", b"1")]
    )
    assert marker.startswith(_go_marker(wire.START, (3, 9), 500, b"q", b"v"))


@given(
    place=places,
    origin=st.none() | places,
    attempt=st.integers(0, 2**31 - 1),
    enqueued=st.integers(0, 2**50),
    users=pairs,
)
def test_a_start_marker_keeps_what_a_copy_needs(place, origin, attempt, enqueued, users):
    """A start marker keeps attempt, time, first place and headers, with None and empty values told apart."""
    data = start_marker(
        *place, 1, b"q", b"v", attempt=attempt, enqueued_at_ms=enqueued, max_attempts=0, origin=origin, headers=users
    )
    read = wire.Marker.FromString(data)
    assert (read.attempt, read.enqueued_at_ms, read.HasField("max_attempts")) == (attempt, enqueued, True)
    assert read.HasField("origin") == (origin is not None)
    if origin is not None:
        assert (read.origin.partition, read.origin.offset) == origin
    assert [(header.name, header.value if header.HasField("value") else None) for header in read.headers] == users


messages = st.fixed_dictionaries(
    {
        "place": places,
        "redeliver_after_ms": st.integers(0, 2**40),
        "value": st.binary(max_size=20),
        "attempt": st.integers(0, 2**31 - 1),
        "enqueued_at_ms": st.integers(0, 2**50),
        "origin": st.none() | places,
        "headers": pairs,
    }
)


@given(st.lists(messages, max_size=5))
def test_encoders_keep_nothing_of_the_marker_before(started):
    """An encoder that has encoded other markers makes the same one as a new encoder."""
    starts, ends = wire.StartEncoder(b"q", 3), wire.EndEncoder()
    for message in started:
        assert starts.encode(**message) == wire.StartEncoder(b"q", 3).encode(**message)
        assert ends.encode(message["place"]) == wire.end_marker(*message["place"])


@given(users=pairs, attempt=st.integers(1, 2**31 - 2), enqueued=st.integers(1, 2**50), origin=places)
def test_headers_of_a_copy_are_read_back(users, attempt, enqueued, origin):
    """The next consumer reads from a copy's headers the same as the copy was given."""
    if origin[1] >= 10**18:
        origin = (origin[0], origin[1] % 10**18)
    copy = headers.of_copy(users, attempt=attempt, enqueued_at_ms=enqueued, origin=origin)
    travelled = headers.read(copy)
    assert travelled == headers.Travelled(attempt, enqueued, origin, None, "", tuple(users))


@given(st.lists(st.tuples(st.sampled_from([headers.ID, headers.ATTEMPT, headers.DELIVER_AT]), st.binary(max_size=30))))
def test_strangers_headers_never_break_a_consumer(written):
    """A header of ours that holds nonsense counts as missing."""
    travelled = headers.read(written)
    assert 1 <= travelled.attempt < 2**31
    assert travelled.headers == ()
    place = travelled.origin or (0, 0)
    start_marker(
        *place, 1, b"q", b"", attempt=travelled.attempt, enqueued_at_ms=0, max_attempts=0, origin=travelled.origin
    )


def test_a_long_reason_is_cut():
    """A long reason, such as a traceback, is cut, so that it does not make a dead letter too large."""
    letter = headers.of_dead_letter(
        [], attempts=1, enqueued_at_ms=None, origin=(1, 2), reason="\u00e9" * 10_000, dead_at_ms=5
    )
    assert len(dict(letter)[headers.REASON]) == 4000
    assert headers.ENQUEUED_AT not in dict(letter)


@pytest.mark.parametrize("bad", [5, "text", b"bytes"])
def test_headers_that_are_no_pairs_are_refused(bad):
    """Headers that are neither a mapping nor pairs are refused."""
    with pytest.raises(ValueError, match="expected a mapping or"):
        headers.of_users(bad)


@pytest.mark.parametrize("missing", ["google", "google.protobuf"])
def test_a_missing_protobuf_is_named_with_the_extra(missing):
    """The name of its module is that of another package, which nobody is to install."""
    program = f"import sys; sys.modules[{missing!r}] = None; import outbox_queue"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("outbox_queue needs protobuf: pip install 'kafka-outbox[queue]'\n")
