"""Filters of the admin's lists: what is in flight, what is held, and what a hold holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Coalesce

from outbox_django.models import Hold, Outbox

if TYPE_CHECKING:
    from django.http import HttpRequest

HEAD_ROWS = 10_000
"""The records at the head of the outbox that are searched for what holds keep; the table may have millions."""


def head(rows: models.QuerySet[Outbox]) -> models.QuerySet[Outbox]:
    """Return those of the records that are among the oldest 10,000."""
    last = Outbox.objects.using(rows.db).order_by("id").values("pk")[HEAD_ROWS - 1 : HEAD_ROWS]
    bound = Coalesce(models.Subquery(last), models.Value(2**63 - 1))
    return rows.filter(pk__lte=bound)


def is_held() -> Q:
    """Return the condition of records that a hold keeps; each part is one that PostgreSQL can hash."""
    topics = Hold.objects.filter(kafka_topic=OuterRef("kafka_topic"))
    return (
        Q(Exists(topics.filter(record_id__isnull=True, kafka_key__isnull=True)))
        | Q(Exists(topics.filter(kafka_key=OuterRef("kafka_key"))))
        | Q(Exists(topics.filter(record_id=OuterRef("pk"))))
    )


class _Choice(admin.SimpleListFilter):
    """A filter with a condition for each of its values."""

    choices_: ClassVar[dict[str, tuple[str, Q]]]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the values and their labels."""
        del request, model_admin
        return [(value, label) for value, (label, _) in self.choices_.items()]

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        """Return the rows of the chosen value."""
        del request
        chosen = self.choices_.get(self.value() or "")
        return queryset if chosen is None else queryset.filter(chosen[1])


class InFlight(_Choice):
    """Records that an at-least-once harvester has marked, and others."""

    title = "in flight"
    parameter_name = "in_flight"
    choices_: ClassVar[dict[str, tuple[str, Q]]] = {
        "yes": ("Yes", Q(leader_id__isnull=False)),
        "no": ("No", Q(leader_id__isnull=True)),
    }


class Held(_Choice):
    """Records that a hold keeps, and others, among the oldest 10,000."""

    title = f"held (of the oldest {HEAD_ROWS:,})"
    parameter_name = "held"
    choices_: ClassVar[dict[str, tuple[str, Q]]] = {"yes": ("Yes", is_held()), "no": ("No", ~is_held())}

    def queryset(self, request: HttpRequest, queryset: models.QuerySet[Any]) -> models.QuerySet[Any]:
        """Return the rows of the chosen value, of the oldest ones."""
        chosen = super().queryset(request, queryset)
        return chosen if chosen is queryset else head(chosen)


class What(_Choice):
    """Holds of records, keys and topics."""

    title = "what is held"
    parameter_name = "what"
    choices_: ClassVar[dict[str, tuple[str, Q]]] = {
        "record": ("Records", Q(record_id__isnull=False)),
        "key": ("Keys", Q(record_id__isnull=True, kafka_key__isnull=False)),
        "topic": ("Topics", Q(record_id__isnull=True, kafka_key__isnull=True)),
    }
