"""What a harvester keeps in memory: within what its settings promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outbox_core.harvest.at_least_once.loop import AtLeastOnce
from outbox_core.harvest.exactly_once.terms import ExactlyOnce

_BATCHES = 2  # of exactly-once delivery: one is published, the next one is scanned


def check(simulation: Any) -> None:
    """Note a broken promise if a harvester of a simulation keeps more than it may."""
    for node in simulation.nodes:
        if node.is_up and node.harvester is not None:
            for what, number, most in _kept_by(node.harvester._term):
                if number > most:
                    simulation.broken(f"{node.name} keeps {number} {what}, and {most} are allowed")


def _kept_by(term: AtLeastOnce | ExactlyOnce | None) -> Iterator[tuple[str, int, int]]:
    """Return what is kept: what it is, the number, and the largest one that is allowed."""
    if term is None:
        return
    limits = term._ctx.limits
    most, batch = limits.max_in_flight_records, limits.mark_query_records
    if isinstance(term, ExactlyOnce):
        yield "records in flight", term.in_flight_records, _BATCHES * batch
    if not isinstance(term, AtLeastOnce):
        return
    lanes, followers = term._lanes, term._lanes._followers
    yield "records in lanes", lanes.held, most
    yield "records in flight", term._publisher.in_flight, most
    yield "lanes in use", len(followers), lanes.held
    # A mark that is under way may bring more for a lane that has become full meanwhile.
    longest = max((len(waiting or ()) for waiting in followers.values()), default=0)
    yield "records in one lane", longest, limits.lane_capacity + batch
