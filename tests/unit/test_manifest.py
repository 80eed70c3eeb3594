"""The manifest survives its encoding, and what is no manifest is not taken for one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.manifest import BYTES_PER_ROW, MOST_TOPICS, Manifest, Opening

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.text(), st.lists(st.tuples(INT64, INT64)))
def test_manifest_comes_back_as_it_was(outbox, rows):
    """Any ids and create times, in any number, and any identity."""
    manifest = Manifest(outbox, [row[0] for row in rows], [row[1] for row in rows])
    assert Manifest.decode(manifest.encode()) == manifest


def test_a_row_costs_sixteen_bytes():
    """The size of the tracking topic's traffic is what the documentation says."""
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
    ],
)
def test_what_is_no_manifest_is_refused(value):
    """Cut off, foreign or of a later version: nothing may be deleted on its word."""
    with pytest.raises(TrackingTopicError):
        Manifest.decode(value)


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=20), min_size=1), INT64)
def test_opening_comes_back_as_it_was(outbox, topics, identity):
    """The first and last id, and the topics: what it takes to read a torn batch back."""
    records = [(identity, topic, None, b"", None, None, -1, 0) for topic in topics]
    opening = Opening.of(outbox, "7", records)
    assert Opening.decode(opening.encode(), 5) == replace(opening, written_at_ms=5)
    assert opening.topics == tuple(sorted(set(topics)))


def test_opening_stays_small():
    """With too many topics to name, it names none: brokers take 1 MB."""
    records = [(number, f"{number:0249}", None, b"", None, None, -1, 0) for number in range(MOST_TOPICS + 1)]
    assert Opening.of("d.s.t", "7", records).topics is None
    assert len(Opening.of("d.s.t", "7", records[1:]).encode()) < 300_000


def test_manifest_without_a_server_is_one_of_earlier_releases():
    """They wrote none, and ignore it."""
    old = b'{"v":1,"outbox":"d.s.t","rows":0}\n'
    assert Manifest.decode(old) == Manifest("d.s.t", [], [])
    assert Manifest("d.s.t", [], []).encode() == old
    assert Manifest.decode(Manifest("d.s.t", [], [], "7").encode()).server == "7"
