"""The manifest: it reads back as it was, and other data is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import TrackingTopicError
from outbox_core.kafka.manifest import BYTES_PER_ROW, MOST_TOPICS, Manifest, Opening
from outbox_core.stores.interface import StoredRecord

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.text(), st.lists(st.tuples(INT64, INT64)))
def test_manifest_comes_back_as_it_was(outbox, rows):
    """A manifest with any ids, create times and identity, in any number, reads back as it was."""
    manifest = Manifest(outbox, [row[0] for row in rows], [row[1] for row in rows])
    assert Manifest.decode(manifest.encode()) == manifest


def test_a_row_costs_sixteen_bytes():
    """A row costs sixteen bytes of a manifest, as the documentation says."""
    small, large = (len(Manifest("db.public.outbox", range(n), range(n)).encode()) for n in (1_000, 2_000))
    assert large - small == 1_000 * BYTES_PER_ROW == 16_000


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"hello",
        b"[]\n",
        b"{}\n",
        b'{"v":1,"outbox":"x","rows":2}\n' + bytes(16),
        b'{"v":1,"outbox":"x","rows":"2"}\n',
        b'{"v":1,"outbox":7,"rows":0}\n',
        b'{"v":2,"outbox":"x","rows":0}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_manifest_is_refused(value):
    """A record that is cut off, foreign or of a later version is refused, as its rows would be deleted."""
    with pytest.raises(TrackingTopicError):
        Manifest.decode(value)


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=20), min_size=1), INT64)
def test_opening_comes_back_as_it_was(outbox, topics, identity):
    """An opening with its first and last id and its topics reads back as it was."""
    records = [StoredRecord(identity, topic, None, b"", None, None, -1, 0) for topic in topics]
    opening = Opening.of(outbox, "7", records)
    assert Opening.decode(opening.encode(), 5) == replace(opening, written_at_ms=5)
    assert opening.topics == tuple(sorted(set(topics)))


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b'{"outbox":"x","opens":{"first":1e999,"last":2,"topics":[]}}', b'{"outbox":' + b"[" * 100_000],
)
def test_what_is_no_opening_is_refused(value):
    """An opening that nobody could have written is refused like any other that cannot be read."""
    with pytest.raises(TrackingTopicError):
        Opening.decode(value, 0)


def test_opening_stays_small():
    """An opening with too many topics names none, as brokers take 1 MB."""
    records = [
        StoredRecord(number, f"{number:0249}", None, b"", None, None, -1, 0) for number in range(MOST_TOPICS + 1)
    ]
    assert Opening.of("d.s.t", "7", records).topics is None
    assert len(Opening.of("d.s.t", "7", records[1:]).encode()) < 300_000


def test_manifest_without_a_server_is_one_of_earlier_releases():
    """A manifest without a server, as earlier releases write it, is read and written; they ignore a server."""
    old = b'{"v":1,"outbox":"d.s.t","rows":0}\n'
    assert Manifest.decode(old) == Manifest("d.s.t", [], [])
    assert Manifest("d.s.t", [], []).encode() == old
    assert Manifest.decode(Manifest("d.s.t", [], [], "7").encode()).server == "7"
