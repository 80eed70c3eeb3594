"""The manifest survives its encoding, and what is no manifest is not taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest.manifest import BYTES_PER_ROW, Manifest

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
