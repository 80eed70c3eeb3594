"""The outbox in Django's admin, for reading only, and its holds, which admins decide about.

The table may be huge and busy: the list reads one page by primary key, without the values, and counts up to a bound.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import models
from django.utils.html import format_html, format_html_join

from outbox_django.databases import write_alias
from outbox_django.holding import holds
from outbox_django.models import Hold, Outbox

if TYPE_CHECKING:
    from django.http import HttpRequest

    OutboxAdminBase = admin.ModelAdmin[Outbox]
    HoldAdminBase = admin.ModelAdmin[Hold]
    PaginatorBase = Paginator[Outbox]
else:
    OutboxAdminBase = admin.ModelAdmin
    HoldAdminBase = admin.ModelAdmin
    PaginatorBase = Paginator

_COUNT_BOUND = 10_000
_SHOWN_CHARACTERS = 20_000
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class BoundedPaginator(PaginatorBase):
    """A paginator of up to 10,000 rows; the pages after those can be reached by searching."""

    @cached_property
    def count(self) -> int:
        """Number of rows, or the bound if there are more."""
        rows = self.object_list
        return rows.order_by()[:_COUNT_BOUND].count() if isinstance(rows, models.QuerySet) else len(rows)


class OutboxChangeList(ChangeList):
    """A page of records without values and headers, which can be large."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> models.QuerySet[Any]:
        """Return the page's rows without values and headers."""
        rows = super().get_queryset(request, exclude_parameters)
        return rows.defer("kafka_value", "kafka_header_keys", "kafka_header_values")


@admin.register(Outbox)
class OutboxAdmin(OutboxAdminBase):
    """Records that wait to be published, the next one first."""

    list_display = ("id", "kafka_topic", "kafka_key", "create_time", "leader_id", "size")
    search_fields = ("kafka_topic__startswith", "kafka_key__startswith")
    search_help_text = "Beginning of a topic or of a key"
    list_filter = (("leader_id", admin.EmptyFieldListFilter),)
    ordering = ("id",)
    sortable_by = ("id",)
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 0
    actions = None
    fields = readonly_fields = (
        "id",
        "create_time",
        "kafka_topic",
        "kafka_key",
        "kafka_partition",
        "leader_id",
        "shown_headers",
        "size",
        "shown_value",
    )

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Outbox]:
        """Return the rows with the sizes of their values."""
        size = models.Func("kafka_value", function="octet_length", output_field=models.IntegerField())
        return super().get_queryset(request).annotate(octets=size)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list that leaves values out."""
        del request, kwargs
        return OutboxChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: a record belongs to a transaction."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: Outbox | None = None) -> bool:
        """Refuse: the harvester publishes what was committed."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Outbox | None = None) -> bool:
        """Refuse: a deleted record is a lost message."""
        del request, obj
        return False

    @admin.display(description="size (bytes)")
    def size(self, record: Outbox) -> int | str:
        """Return the bytes of the value."""
        octets: int | None = getattr(record, "octets", None)
        return "tombstone" if octets is None else octets

    @admin.display(description="headers")
    def shown_headers(self, record: Outbox) -> str:
        """Return one header a line."""
        lines = ((header.key, as_text(header.value)) for header in record.headers)
        return format_html_join("", "<div><b>{}</b>: {}</div>", lines) or "-"

    @admin.display(description="value")
    def shown_value(self, record: Outbox) -> str:
        """Return the value as JSON, text or hexadecimal digits, whichever it is."""
        text = _indented(as_text(record.kafka_value))
        cut = "" if len(text) <= _SHOWN_CHARACTERS else f"\n... {len(text) - _SHOWN_CHARACTERS} more characters"
        return format_html('<pre style="white-space: pre-wrap">{}{}</pre>', text[:_SHOWN_CHARACTERS], cut)


@admin.register(Hold)
class HoldAdmin(HoldAdminBase):
    """The holds of the outbox. The actions are those of `outbox hold`."""

    list_display = ("kafka_topic", "kafka_key", "record_id", "reason", "error", "dead_letter", "create_time")
    search_fields = ("kafka_topic__startswith", "kafka_key__startswith", "=record_id")
    search_help_text = "Beginning of a topic or of a key, or a record's id"
    list_filter = ("dead_letter", ("record_id", admin.EmptyFieldListFilter))
    ordering = ("create_time", "record_id")
    show_full_result_count = False
    list_per_page = 50
    actions = ("release", "skip", "send_to_dead_letters")
    fields = ("kafka_topic", "kafka_key", "reason")

    def save_model(self, request: HttpRequest, obj: Hold, form: Any, change: bool) -> None:
        """Pause a topic or a key, as `outbox hold add` does."""
        del form, change
        key = obj.kafka_key or None
        which = holds(write_alias("Hold"))
        if not which.add(obj.kafka_topic, key, reason=obj.reason or f"by {request.user}"):
            self.message_user(request, "It was held already.", messages.WARNING)
        obj.pk = which.list(topic=obj.kafka_topic, key=key)[0].id

    def get_form(self, request: HttpRequest, obj: Hold | None = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form, in which key and reason are optional."""
        form = super().get_form(request, obj, change, **kwargs)
        for name in ("kafka_key", "reason"):
            if name in form.base_fields:
                form.base_fields[name].required = False
        return form

    def has_change_permission(self, request: HttpRequest, obj: Hold | None = None) -> bool:
        """Refuse: a hold is released, and another one made."""
        del request, obj
        return False

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Let users who may delete holds decide about the held records."""
        return request.user.has_perm("outbox_django.delete_hold")

    @admin.action(description="Release: publish what was held", permissions=["decide"])
    def release(self, request: HttpRequest, chosen: models.QuerySet[Hold]) -> None:
        """End the selected holds."""
        number, _ = chosen.delete()
        self.message_user(request, f"Released: {number}.")

    @admin.action(description="Skip: delete the held records for good", permissions=["decide"])
    def skip(self, request: HttpRequest, chosen: models.QuerySet[Hold]) -> None:
        """Delete the records of the selected holds."""
        number = holds(chosen.db).skip(records=self._records(chosen))
        self.message_user(request, f"Skipped records: {number}.")

    @admin.action(description="Publish the held records to the dead-letter topic instead", permissions=["decide"])
    def send_to_dead_letters(self, request: HttpRequest, chosen: models.QuerySet[Hold]) -> None:
        """Ask the harvester to publish them there."""
        number = holds(chosen.db).dead_letter(records=self._records(chosen))
        self.message_user(request, f"Asked for: {number}.")

    @staticmethod
    def _records(chosen: models.QuerySet[Hold]) -> list[int]:
        records = chosen.values_list("record_id", flat=True)
        return [identity for identity in records if identity is not None]


def as_text(value: Any) -> str:
    """Return a value for people: text if it is UTF-8, hexadecimal digits if not."""
    if value is None:
        return "NULL (tombstone)"
    if isinstance(value, str):
        return value
    octets = bytes(value)
    try:
        text = octets.decode()
    except UnicodeDecodeError:
        return f"0x{octets.hex(' ')}"
    return f"0x{octets.hex(' ')}" if _CONTROL_CHARACTERS.search(text) else text


def _indented(text: str) -> str:
    if not text.startswith(("{", "[")):
        return text
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text
