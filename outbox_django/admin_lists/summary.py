"""The summary of an outbox for the admin: what waits, what is held, and who leads, without Kafka."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import DatabaseError, transaction
from django.db.models import Count, Min, Q
from django.utils import timezone

from outbox_core.errors import OutboxError
from outbox_core.schema import EventKind
from outbox_django.admin_lists.filters import HEAD_ROWS, is_held
from outbox_django.databases import write_alias
from outbox_django.models import Event, Outbox

_LEADERSHIPS = {
    EventKind.LEADER_ACQUIRED: "took leadership",
    EventKind.LEADER_HANDED_OVER: "handed leadership over",
    EventKind.LEADER_FENCED: "lost leadership",
}


class Summary(NamedTuple):
    """The counts of the oldest 10,000 records, the ages of their first ones, and the last leadership of the history."""

    waiting: int
    held: int
    deliverable_age: str
    held_age: str
    leadership: str

    @property
    def deliverable(self) -> int:
        """Records that no hold keeps."""
        return self.waiting - self.held

    @property
    def is_bounded(self) -> bool:
        """True if there may be more records than were counted."""
        return self.waiting >= HEAD_ROWS


def age(since: datetime | None) -> str:
    """Return the time since then to the second: `0:02:07`, `1 day, 2:03:09`."""
    if since is None:
        return "-"
    seconds = round((timezone.now() - since).total_seconds())
    return str(timedelta(seconds=max(0, seconds)))


def summarise() -> Summary | None:
    """Return the summary, None if the database does not give it: the tables may be missing."""
    try:
        alias = write_alias("Outbox")
        with transaction.atomic(using=alias):  # an error must not end the page's own transaction
            return _summary(alias)
    except (DatabaseError, OutboxError):
        return None


def _summary(alias: str) -> Summary:
    rows = Outbox.objects.using(alias).annotate(is_held=is_held()).order_by("id")[:HEAD_ROWS]
    found = rows.aggregate(
        waiting=Count("pk"),
        held=Count("pk", filter=Q(is_held=True)),
        deliverable_since=Min("create_time", filter=Q(is_held=False)),
        held_since=Min("create_time", filter=Q(is_held=True)),
    )
    return Summary(
        found["waiting"],
        found["held"],
        age(found["deliverable_since"]),
        age(found["held_since"]),
        _leadership(alias),
    )


def _leadership(alias: str) -> str:
    try:
        with transaction.atomic(using=alias):
            event = Event.objects.using(alias).filter(kind__in=_LEADERSHIPS).order_by("-id").first()
    except DatabaseError:  # the history is optional
        return ""
    if event is None:
        return ""
    term = "" if event.term is None else f", term {event.term}"
    why = f": {event.reason}" if event.reason else ""
    return f"{event.actor} {_LEADERSHIPS[EventKind(event.kind)]} {age(event.create_time)} ago{term}{why}"
