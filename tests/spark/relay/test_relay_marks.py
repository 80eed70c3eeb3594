"""Relays' marks: numbers within a UUID."""

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.stores.relay_marks import FIRST, LAST, RelayMark, term_bounds

NUMBERS = st.integers(0, 2**48 - 1)
MARKS = st.builds(RelayMark, NUMBERS, NUMBERS)


@given(MARKS)
def test_a_mark_is_read_back(mark):
    """A mark's UUID is a proper one, and the mark can be read back from it."""
    assert mark.leader_id.version == 8
    assert mark.leader_id.variant == "specified in RFC 4122"
    assert RelayMark.of(mark.leader_id) == mark


@given(MARKS, MARKS)
def test_uuids_are_ordered_as_marks_are(one, other):
    """UUIDs are ordered by term, then by batch: all marks of a term are one range, as are all marks of relays."""
    assert (one.leader_id < other.leader_id) == (one < other)
    low, high = term_bounds(one.term)
    assert FIRST <= low <= one.leader_id <= high <= LAST


def test_a_harvesters_mark_is_none():
    """A random leader ID, or any other UUID, is not read as a relay's mark."""
    assert RelayMark.of(uuid4()) is None
    assert RelayMark.of(UUID(int=0)) is None
    assert RelayMark.of(UUID(int=LAST.int + (1 << 102))) is None


@pytest.mark.parametrize("mark", [RelayMark(-1, 0), RelayMark(0, 2**48)])
def test_numbers_have_bounds(mark):
    """Numbers that do not fit are refused, not cut off."""
    with pytest.raises(ValueError, match="must be from 0"):
        _ = mark.leader_id
