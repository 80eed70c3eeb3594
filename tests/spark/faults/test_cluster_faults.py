"""A short run of faults on a cluster, each kind of them once; `make spark-faults` runs many."""

import pytest

from tests.spark.faults.run import KINDS, compared, count_reordered, run
from tests.spark.faults.world import World


@pytest.mark.complete
@pytest.mark.real_broker
@pytest.mark.timeout(3600)
def test_nothing_is_lost_repeated_or_reordered(tmp_path):
    """Relay, archive, projection and replay end with each record once, in order, after each kind of fault."""
    with World(tmp_path) as world:
        done, wrong = run(world, records=16_000, faults=len(KINDS), seed=1)
    assert set(done.values()) == {1}
    assert set(wrong.values()) == {0}, wrong
    assert len(wrong) == 14


def test_what_is_wrong_is_counted():
    """One number is missing, one is there twice, one is foreign; for one key two have changed places."""
    wrong = compared("table", [1, 3, 3, 9], 3)
    assert wrong == {"table: lost": 1, "table: repeated": 1, "table: unexpected": 1}
    assert set(compared("table", [3, 1, 2], 3).values()) == {0}
    assert count_reordered([(b"a", 1), (b"b", 4), (b"a", 3), (b"a", 2), (b"b", 5)]) == 1
    assert count_reordered([(b"a", 2), (b"b", 1), (b"a", 3)]) == 0
