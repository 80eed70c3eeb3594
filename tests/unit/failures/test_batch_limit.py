"""The limit that failed transactions leave behind."""

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.harvest.failures.batch_limit import BatchLimit


def test_half_after_a_failure_double_after_a_success():
    """The limit is halved after each failure, of the records that were tried, and doubled after each commit."""
    batch = BatchLimit(10_000, 10_000)
    assert not batch.is_searching
    batch.failed(8_000, refused=False)
    assert (batch.limit, batch.is_searching, batch.is_unbatched) == (4_000, True, False)
    batch.failed(100, refused=False)
    assert batch.limit == 50
    for _ in range(10):
        batch.failed(1, refused=False)
    assert batch.limit == 1
    for _ in range(14):
        batch.committed(batch.limit, 1.0)
    assert batch.limit == 10_000
    assert not batch.is_searching


def test_small_commits_do_not_bring_back_a_large_limit():
    """A commit of a few records says nothing of large transactions, for which the broker may have no time."""
    batch = BatchLimit(10_000, 10_000)
    batch.failed(8_000, refused=False)
    batch.committed(10, 0.1)
    assert batch.limit == 4_000


def test_records_that_the_client_refuses_let_the_limit_grow():
    """Thousands of records that the client refuses are not left out a few at a time; a search goes on with them."""
    batch = BatchLimit(10_000, 10_000)
    batch.failed(36, refused=False)
    batch.left_out(18)
    batch.left_out(36)
    assert batch.limit == 72
    batch.left_out(20_000)
    assert batch.limit == 10_000
    batch.failed(10_000, refused=True)
    batch.left_out(100)
    assert batch.is_unbatched


def test_refusals_are_searched_in_small_transactions_record_by_record():
    """After a refusal the transaction is small and each record a batch of its own, until it is not small any more."""
    batch = BatchLimit(10_000, 10_000)
    batch.failed(10_000, refused=True)
    assert batch.limit == 100
    assert batch.is_unbatched
    batch.committed(batch.limit, 1.0)
    assert batch.limit == 200
    assert not batch.is_unbatched
    batch.failed(200, refused=False)
    assert batch.is_unbatched, "the search goes on"
    while batch.is_searching:
        batch.committed(batch.limit, 1.0)
    batch.failed(10_000, refused=False)
    batch.failed(100, refused=False)
    assert not batch.is_unbatched, "another search"


def test_the_search_for_a_refused_record_ends_with_a_transaction_that_is_not_full():
    """It held all that was there: with little to do, records are not batches of their own for ever."""
    batch = BatchLimit(10_000, 10_000)
    batch.failed(10_000, refused=True)
    batch.committed(10, 0.1)
    assert (batch.limit, batch.is_unbatched) == (100, False)


def test_ends_count_until_a_commit():
    """Ends of producers halve the limit, and count until something is committed."""
    batch = BatchLimit(8, 8)
    for _ in range(4):
        batch.ended(8)
    assert (batch.limit, batch.ends) == (1, 4)
    batch.committed(batch.limit, 1.0)
    assert (batch.limit, batch.ends) == (2, 0)


def test_transactions_grow_with_the_load():
    """Full transactions that are quick double the limit; one that is slow, or half empty, takes that back."""
    batch = BatchLimit(5_000, 12_000)
    limits = []
    for records, took in [
        (5_000, 0.1),
        (10_000, 0.1),
        (12_000, 0.3),
        (6_000, 0.1),
        (6_000, 0.1),
        (5_999, 0.1),
        (9, 0.1),
    ]:
        batch.committed(records, took)
        limits.append(batch.limit)
    assert limits == [10_000, 12_000, 6_000, 12_000, 12_000, 6_000, 5_000]
    batch.committed(5_000, 0.1)
    batch.failed(10_000, refused=False)
    assert (batch.limit, batch.is_searching) == (2_500, True)


@given(st.integers(1, 50), st.lists(st.tuples(st.sampled_from(["failed", "ended", "committed"]), st.booleans())))
def test_limit_stays_in_its_bounds(most, steps):
    """The limit is at least one and at most the largest, and commits alone bring it back there."""
    batch = BatchLimit(most, 2 * most)
    for step, refused in steps:
        if step == "failed":
            batch.failed(batch.limit, refused=refused)
        elif step == "ended":
            batch.ended(batch.limit)
        else:
            batch.committed(batch.limit, 1.0)
        assert 1 <= batch.limit <= most
    for _ in range(6):
        batch.committed(batch.limit, 1.0)
    assert batch.limit == most
    assert not batch.is_unbatched
