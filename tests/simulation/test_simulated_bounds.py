"""A simulated harvester that keeps more than it may is noticed."""

from collections import deque

import pytest

from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.at_least_once.loop import AtLeastOnce
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.exactly_once.term import Term
from tests.simulation.simulation import Plan, run


def _keep_old_lanes(self, records):
    _admit(self, records)
    self._followers.update({("orders", f"old-{row.id}"): None for row in records})


def _fill_one_lane(self, records):
    _admit(self, records)
    for followers in self._followers.values():
        (followers if followers is not None else deque()).extend([records[0]] * 40)


def _report_alone(self, record, *_):
    self.delivered.append(record)
    self._sent += 1


def _count_twice(self, count):
    self._leadership.in_flight_records = 3 * count


_admit = Lanes._admit


@pytest.mark.parametrize(
    ("mode", "place", "name", "double", "shown"),
    [
        ("at-least-once", AtLeastOnce, "_room", lambda _: 10_000, "records in lanes"),
        ("at-least-once", Lanes, "_admit", _keep_old_lanes, "lanes in use"),
        ("at-least-once", Lanes, "_admit", _fill_one_lane, "records in one lane"),
        ("at-least-once", Publisher, "_report", _report_alone, "records in flight"),
        ("exactly-once", Term, "_count_in_flight", _count_twice, "records in flight"),
    ],
)
def test_memory_of_harvesters_is_bounded(monkeypatch, mode, place, name, double, shown):
    """A run notices a harvester that marks too many rows, or forgets too few."""
    monkeypatch.setattr(place, name, double)
    plan = Plan(5, mode, ("database", "cut"), harvesters=1, writers=5, seconds=20.0, latency=0.005, pause=0.02)
    assert shown in run(plan).problem
