"""The simulated Kafka and its client against the real ones: the same scenarios must have the same outcomes."""

import pytest

from tests.simulation.scenarios import SCENARIOS
from tests.simulation.worlds import RealWorld, SimulatedWorld

_SEEDS = (1, 2)
_ALL = [pytest.param(each, id=name) for name, each in SCENARIOS.items()]
_ALL_REAL = [
    pytest.param(each, id=name, marks=() if each.is_quick else pytest.mark.complete) for name, each in SCENARIOS.items()
]


@pytest.mark.parametrize("scenario", _ALL)
def test_simulated_kafka(scenario):
    """The simulated world ends a scenario as it is written down, in any order of its steps."""
    for seed in _SEEDS:
        assert SimulatedWorld(seed).run(scenario.play) == scenario.outcome


@pytest.mark.real_broker
@pytest.mark.parametrize("scenario", _ALL_REAL)
def test_real_kafka(scenario, kafka):
    """A real broker and the real client end it in the same way."""
    with kafka.frame_proxied(1) as proxy:
        assert RealWorld(proxy).run(scenario.play) == scenario.outcome


def test_scenarios_notice_a_broker_that_verifies_no_partitions():
    """A simulated broker that takes records outside of transactions differs: the comparison can fail."""
    world = SimulatedWorld()
    world.cluster.verifies_partitions = False
    scenario = SCENARIOS["late_commit_ends_a_later_transaction"]
    assert world.run(scenario.play) != scenario.outcome
