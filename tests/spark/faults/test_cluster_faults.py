"""A short run of faults on a cluster, each kind of them once; `make spark-faults` runs many."""

import pytest

from tests.spark.faults.run import KINDS, run
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
    assert len(wrong) == 10
