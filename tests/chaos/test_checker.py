"""Tests of the checker: it finds each kind of violation."""

import pytest

from tests.chaos.checker import Arrival, Checker


def judged(numbers, committed, *, key="k", rows=None):
    """Return the kinds of violations for these numbers in this order."""
    checker = Checker()
    for position, n in enumerate(numbers):
        row = rows[position] if rows else 10 * n
        checker.see(Arrival("t", key, n, row, 0, position, 0.0))
    checker.finish({("t", key): committed})
    return [violation.kind for violation in checker.violations]


@pytest.mark.parametrize(
    ("numbers", "committed", "found"),
    [
        ([1, 2, 3], 3, []),
        ([], 0, []),
        ([1, 3], 3, ["lost"]),
        ([1, 2], 3, ["lost"]),
        ([1, 3, 2], 3, ["reordered"]),
        ([1, 1, 2], 2, ["repeated (adjacent)"]),
        ([1, 2, 1, 2], 2, ["repeated (distant)", "repeated (distant)"]),
        ([1, 2, 3, 2, 3], 3, ["repeated (distant)", "repeated (distant)"]),
        ([1, 2], 1, ["stranger"]),
        ([1, 3, 3, 2], 3, ["repeated (adjacent)", "reordered"]),
    ],
)
def test_a_key_is_judged_by_its_numbers(numbers, committed, found):
    """Each departure from 1 2 3 ... has its own name."""
    assert judged(numbers, range(1, committed + 1)) == found


def test_records_without_a_key_come_in_any_order():
    """Records without a key are only counted: in any order each must be there once."""
    assert judged([7, 3, 5], {3, 5, 7}, key=None) == []
    assert judged([7, 3, 7], {3, 5, 7}, key=None) == ["repeated (adjacent)", "lost"]


def test_a_repeat_with_another_id_header_is_mislabelled():
    """A repeat with another id header is mislabelled, as a consumer that drops repeats by id would keep it."""
    assert judged([1, 1], [1], rows=[5, 6]) == ["repeated (adjacent)", "mislabelled"]


def test_a_row_id_that_does_not_rise_is_mislabelled():
    """Within a key ids rise with the numbers."""
    assert judged([1, 2], [1, 2], rows=[5, 5]) == ["mislabelled"]


def test_a_key_that_was_never_committed_is_a_stranger():
    """A record whose whole key is unknown to the database is a stranger."""
    checker = Checker()
    checker.see(Arrival("t", "k", 1, 1, 0, 0, 0.0))
    checker.finish({})
    assert [violation.kind for violation in checker.violations] == ["stranger"]


def test_a_key_that_moves_to_another_partition_is_out_of_order():
    """A key in two partitions is reordered, as no reader could restore its order."""
    checker = Checker()
    checker.see(Arrival("t", "k", 1, 1, 0, 0, 0.0))
    checker.see(Arrival("t", "k", 2, 2, 1, 0, 0.0))
    assert [violation.kind for violation in checker.violations] == ["reordered"]
