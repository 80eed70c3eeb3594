"""The schedule: which fault comes when, all of it drawn from one seed before the run begins.

Every outbox has a list of faults of its own, and so have the services that all share. The lists are dealt like cards:
each kind comes once before any comes twice, so that a short run has seen all of them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from tests.chaos.failpoints import AT_LEAST_ONCE_STEPS, EXACTLY_ONCE_STEPS

_CUTS = ("hold", "drop", "reset")
# What a black hole has held back arrives late once it forwards again, also from a process that has long been deposed:
# at-least-once delivery cannot exclude that (design, section 5), so there a cut loses what it swallows.
_CUTS_THAT_LOSE = ("drop", "reset")
_SHARED = ("broker-kill", "postgres-restart")
_SHORTEST_GAP, _LONGEST_GAP = 0.1, 1.5
_SHARED_GAPS = (2.0, 8.0)


@dataclass(frozen=True)
class Fault:
    """One fault, as planned.

    Attributes:
        kind: what is done; `kinds` lists them.
        gap: seconds to wait before, counted from when the last fault was over.
        count: for failpoints: at which visit of the step.
        share: a number from 0 to 1 that decides how long or how late, as the kind needs it.
    """

    kind: str
    gap: float
    count: int
    share: float

    def __str__(self) -> str:
        return f"{self.kind} (gap {self.gap:.2f}, count {self.count}, share {self.share:.3f})"


def outbox_kinds(delivery: str) -> list[str]:
    """Faults that meet one outbox."""
    exactly_once = delivery == "exactly-once"
    steps = EXACTLY_ONCE_STEPS if exactly_once else AT_LEAST_ONCE_STEPS
    kinds = ["kill-leader", "freeze-leader", *(f"kill:{step}" for step in steps), *(f"stop:{step}" for step in steps)]
    kinds += [f"cut-database:{how}" for how in _CUTS]
    kinds += [f"hold-{what}:{then}" for what in ("topic", "records") for then in ("release", "kill-and-release")]
    return [*kinds, "two-leaders", "rival", "rival-lingers"] if exactly_once else kinds


def shared_kinds(delivery: str) -> list[str]:
    """Faults of the services that all outboxes share."""
    cuts = _CUTS if delivery == "exactly-once" else _CUTS_THAT_LOSE
    return [*_SHARED, *(f"cut-broker:{how}" for how in cuts)]


@dataclass(frozen=True)
class Schedule:
    """The faults of a run.

    Args:
        seed: from which everything is drawn.
        delivery: the harvesters' mode.
        outboxes: how many there are.
    """

    seed: int
    delivery: str
    outboxes: int

    def of_outbox(self, number: int) -> Iterator[Fault]:
        """The faults of one outbox, without end."""
        kinds = outbox_kinds(self.delivery)
        for deal in count():
            # All outboxes shuffle the same cards in the same way and take turns.
            deck = random.Random(f"{self.seed}/{deal}").sample(kinds, len(kinds))
            generator = random.Random(f"{self.seed}/{deal}/{number}")
            for kind in deck[number :: self.outboxes]:
                yield _fault(kind, generator, (_SHORTEST_GAP, _LONGEST_GAP))

    def sizes(self) -> list[int]:
        """How many faults make one of each kind: for the services, then for each outbox."""
        kinds = outbox_kinds(self.delivery)
        return [len(shared_kinds(self.delivery)), *(len(kinds[n :: self.outboxes]) for n in range(self.outboxes))]

    def of_services(self) -> Iterator[Fault]:
        """The faults of the shared services, without end."""
        kinds = shared_kinds(self.delivery)
        generator = random.Random(f"{self.seed}/services")
        while True:
            for kind in generator.sample(kinds, len(kinds)):
                yield _fault(kind, generator, _SHARED_GAPS)


def _fault(kind: str, generator: random.Random, gaps: tuple[float, float]) -> Fault:
    return Fault(kind, generator.uniform(*gaps), generator.randint(1, 4), generator.random())
