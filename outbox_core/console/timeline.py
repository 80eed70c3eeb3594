"""Leaderships, from the events of the history: who led from when to when, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from outbox_core.retention.history import EventKind, HistoryEvent

End = Literal["handed_over", "fenced", "unknown"]
_ENDS: dict[str, End] = {EventKind.LEADER_HANDED_OVER: "handed_over", EventKind.LEADER_FENCED: "fenced"}


@dataclass(frozen=True, slots=True)
class Leadership:
    """One leadership of a harvester. `begin` is None if it was before the first event, `to` while it leads.

    The end is `unknown` if none was written: the process was killed. Then `to` is when the next one began.
    """

    instance: str
    leader_id: str | None
    term: int | None
    begin: datetime | None
    to: datetime | None = None
    end: End | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can have it."""
        return {
            "instance": self.instance,
            "leader_id": self.leader_id,
            "term": None if self.term is None else str(self.term),
            "from": self.begin and self.begin.isoformat(),
            "to": self.to and self.to.isoformat(),
            "end": self.end,
            "reason": self.reason,
        }


def leaderships(events: Iterable[HistoryEvent]) -> list[Leadership]:
    """Return the leaderships that these events tell of, both the oldest first.

    Events may arrive late: a harvester that is cut off from the database writes them when it is back.
    """
    found: list[Leadership] = []
    for event in sorted(events, key=lambda event: event.create_time):
        leader_id = None if event.leader_id is None else str(event.leader_id)
        end = _ENDS.get(event.kind)
        if end is None:
            found.append(Leadership(event.actor, leader_id, event.term, event.create_time))
            continue
        place = next((n for n in range(len(found) - 1, -1, -1) if _is_open(found[n], event.actor, leader_id)), None)
        if place is None:
            ended = Leadership(event.actor, leader_id, event.term, None)
            found.insert(0, replace(ended, to=event.create_time, end=end, reason=event.reason))
        else:
            found[place] = replace(found[place], to=event.create_time, end=end, reason=event.reason)
    return _closed(found)


def _is_open(leadership: Leadership, instance: str, leader_id: str | None) -> bool:
    return leadership.end is None and leadership.instance == instance and leadership.leader_id == leader_id


def _closed(found: list[Leadership]) -> list[Leadership]:
    """End those without an end at the beginning of the next."""
    closed = []
    for place, leadership in enumerate(found):
        is_last = place == len(found) - 1
        if leadership.end is None and not is_last:
            closed.append(replace(leadership, to=found[place + 1].begin, end="unknown"))
        else:
            closed.append(leadership)
    return closed
