"""Short stories about Kafka that must end in the same way in the simulated world and in the real one."""

from tests.simulation.scenarios import (
    ending,
    fencing,
    groups,
    late_requests,
    partial_links,
    producing,
    reading,
    time_outs,
)
from tests.simulation.scenarios.scenario import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "Scenario",
    "ending",
    "fencing",
    "groups",
    "late_requests",
    "partial_links",
    "producing",
    "reading",
    "time_outs",
]
