"""The terms of the harvester processes, from their journals (see `worker`).

A term begins when its process announces `LeaderAcquired`. It ends at the earlier of `LeaderRevoked` or `LeaderFenced`
and the deadline of its lease, whichever way its process ended: a successor must wait even for the lease of the dead.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_ENDS = {"LeaderRevoked", "LeaderFenced"}


class Term(NamedTuple):
    """One leadership of one process, in seconds on the clock of leases.

    Attributes:
        process: the leader.
        begin: the time of its announcement.
        end: the time from which it could not lead any more.
        leader_id: the leadership's.
    """

    process: str
    begin: float
    end: float
    leader_id: str


def terms_of(process: str, journal: Iterable[Mapping[str, Any]]) -> list[Term]:
    """Return the leaderships in one process's journal."""
    terms: list[Term] = []
    for entry in journal:
        kind, leader_id = entry["event"], entry.get("leader_id")
        if kind == "LeaderAcquired":
            terms.append(Term(process, entry["at"], entry["deadline"], leader_id))
        elif terms and terms[-1].leader_id == leader_id:
            if kind == "lease":
                terms[-1] = terms[-1]._replace(end=max(terms[-1].end, entry["deadline"]))
            elif kind in _ENDS:
                terms[-1] = terms[-1]._replace(end=min(terms[-1].end, entry["at"]))
    return terms


def overlaps(terms: Iterable[Term]) -> list[tuple[Term, Term]]:
    """Return the pairs of terms of different processes that have a moment in common."""
    found = []
    longest: Sequence[Term] = ()
    for term in sorted(terms, key=lambda term: term.begin):
        found += [(other, term) for other in longest if other.process != term.process and other.end > term.begin]
        longest = [*(other for other in longest if other.end > term.begin), term]
    return found
