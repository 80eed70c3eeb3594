"""The schedule: the faults and their order, all of it drawn from one seed before the run begins.

Every outbox has a list of faults of its own, and so have the services that all share. The lists are dealt like cards:
each kind comes once before any comes twice, so that a short run has seen all of them. A *deck* is a set of kinds:

    faults    processes that die or freeze, connections that are cut, holds, rivals
    late      requests that arrive late (`tests.chaos.late`), half of them the end of a transaction
    brokers   faults that need three brokers: leaders and coordinators that move or are cut off alone, a broker that
              is killed or isolated from its controller, a min ISR that is lost
    all       all of these
    one       one of an outbox's three harvesters, usually the leader, is ill for up to two minutes (`tests.chaos.ill`);
              its links fail, or it stands still or dies; the others and the services are well
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from devstack.links import LinkFault
from tests.chaos.failpoints import AT_LEAST_ONCE_STEPS, EXACTLY_ONCE_STEPS

DECKS = ("faults", "late", "brokers", "all", "one")
_CUTS = ("hold", "drop", "reset")
# Bytes that a black hole has held back arrive late once it forwards again, also from a process deposed long before:
# at-least-once delivery cannot exclude that (design, section 5), so there a cut loses the bytes.
_CUTS_THAT_LOSE = ("drop", "reset")
_ENDS = ("late:end-txn-commit",) * 3 + ("late:end-txn-abort",) * 2
_LATE_IN_TRANSACTIONS = ("late:produce", "late:add-partitions", "late:init-producer-id")
_LATE_READS = ("late:fetch", "late:list-offsets")
_SHORTEST_GAP, _LONGEST_GAP = 0.1, 1.5
_SHARED_GAPS = (2.0, 8.0)
_GAPS_OF_THE_ILL = (2.0, 15.0)
SHORTEST_ILLNESS_SECONDS, LONGEST_ILLNESS_SECONDS = 10.0, 120.0


@dataclass(frozen=True)
class Fault:
    """One fault, as planned.

    Attributes:
        kind: its kind; `kinds` lists them.
        gap: seconds to wait before it, counted from the end of the last fault.
        count: for failpoints: the number of the visit of the step.
        share: a number from 0 to 1 that decides a duration or a delay, as the kind needs it.
        seconds: for the deck `one`: its duration.
    """

    kind: str
    gap: float
    count: int
    share: float
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kind} (gap {self.gap:.2f}, count {self.count}, share {self.share:.3f}, {self.seconds:.0f} seconds)"
        )


def outbox_kinds(delivery: str, deck: str = "faults", brokers: int = 1) -> list[str]:
    """List the faults that meet one outbox; those that come twice as often are listed twice."""
    exactly_once = delivery == "exactly-once"
    kinds: list[str] = []
    if deck in {"faults", "all"}:
        steps = EXACTLY_ONCE_STEPS if exactly_once else AT_LEAST_ONCE_STEPS
        kinds += ["kill-leader", "freeze-leader", *(f"{do}:{step}" for do in ("kill", "stop") for step in steps)]
        kinds += [f"cut-database:{how}" for how in _CUTS]
        kinds += [f"hold-{what}:{then}" for what in ("topic", "records") for then in ("release", "kill-and-release")]
        kinds += ["two-leaders", "rival", "rival-lingers"] if exactly_once else []
    if deck in {"late", "all"}:
        kinds += [*_ENDS, *_LATE_IN_TRANSACTIONS] if exactly_once else ["late:produce", "late:produce"]
        kinds += _LATE_READS
    if deck in {"brokers", "all"} and brokers > 1:
        roles = ("leader", "coordinator") if exactly_once else ("leader",)
        kinds += [f"move-{role}" for role in roles]
        kinds += [f"cut-{role}:{how}" for role in roles for how in _cuts(delivery)]
    if deck == "one":
        kinds += [f"link:{to} {how}" for to in _links_to(delivery, brokers) for how in LinkFault]
        kinds += ["backends:those", "backends:all", "process:freeze", "process:kill", "process:restart"]
    return kinds


def _links_to(delivery: str, brokers: int) -> list[str]:
    """List the links that can fail alone: to the database, to all brokers, to the one that has a part to play."""
    alone = ["leader-topic", "group", "data"] if brokers > 1 else []
    if alone and delivery == "exactly-once":
        alone.append("transactions")
    return ["database", "brokers", *alone]


def shared_kinds(delivery: str, deck: str = "faults", brokers: int = 1) -> list[str]:
    """List the faults of the services that all outboxes share."""
    kinds: list[str] = []
    if deck in {"faults", "all"}:
        kinds += ["broker-kill", "postgres-restart", *(f"cut-broker:{how}" for how in _cuts(delivery))]
    if deck in {"brokers", "all"} and brokers > 1:
        kinds += [*({"broker-kill"} - set(kinds)), "broker-isolated", "min-isr"]
    return kinds


def _cuts(delivery: str) -> tuple[str, ...]:
    return _CUTS if delivery == "exactly-once" else _CUTS_THAT_LOSE


@dataclass(frozen=True)
class Schedule:
    """The faults of a run.

    Args:
        seed: the seed of all draws.
        delivery: the harvesters' mode.
        outboxes: number of outboxes.
        deck: the deck.
        brokers: 1 or 3.
        longest_illness: seconds, in the deck `one`.
    """

    seed: int
    delivery: str
    outboxes: int
    deck: str = "faults"
    brokers: int = 1
    longest_illness: float = LONGEST_ILLNESS_SECONDS

    def kinds(self) -> set[str]:
        """Return every kind that comes."""
        return {*self._of_outbox(), *self._shared()}

    def _of_outbox(self) -> list[str]:
        return outbox_kinds(self.delivery, self.deck, self.brokers)

    def _shared(self) -> list[str]:
        return shared_kinds(self.delivery, self.deck, self.brokers)

    def of_outbox(self, number: int) -> Iterator[Fault]:
        """Yield the faults of one outbox, without end."""
        kinds = self._of_outbox()
        for deal in count():
            # All outboxes shuffle the same cards in the same way and take turns.
            deck = random.Random(f"{self.seed}/{deal}").sample(kinds, len(kinds))
            generator = random.Random(f"{self.seed}/{deal}/{number}")
            for kind in deck[number :: self.outboxes]:
                if self.deck == "one":
                    yield self._illness(kind, generator)
                else:
                    yield _fault(kind, generator, (_SHORTEST_GAP, _LONGEST_GAP))

    def _illness(self, kind: str, generator: random.Random) -> Fault:
        seconds = generator.uniform(SHORTEST_ILLNESS_SECONDS, self.longest_illness)
        return replace(_fault(kind, generator, _GAPS_OF_THE_ILL), seconds=seconds)

    def sizes(self) -> list[int]:
        """Return the number of faults that make one of each kind: for the services, then for each outbox."""
        kinds = self._of_outbox()
        return [len(self._shared()), *(len(kinds[n :: self.outboxes]) for n in range(self.outboxes))]

    def of_services(self) -> Iterator[Fault]:
        """Yield the faults of the shared services, without end."""
        kinds = self._shared()
        generator = random.Random(f"{self.seed}/services")
        while kinds:
            for kind in generator.sample(kinds, len(kinds)):
                yield _fault(kind, generator, _SHARED_GAPS)


def _fault(kind: str, generator: random.Random, gaps: tuple[float, float]) -> Fault:
    return Fault(kind, generator.uniform(*gaps), generator.randint(1, 4), generator.random())
