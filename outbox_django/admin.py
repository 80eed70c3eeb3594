"""The outbox in Django's admin, for reading only, and its holds, which admins decide about.

The table may be huge and busy: the list reads one page by primary key, without the values, and counts up to a bound.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.contrib.admin.widgets import AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import models
from django.db.models.expressions import RawSQL
from django.http import HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join

from outbox_core.schema import HEADERS_TOO_LARGE, small_headers_sql
from outbox_core.topic_names import is_legal
from outbox_django.admin_lists.filters import Held, InFlight, What
from outbox_django.admin_lists.summary import age
from outbox_django.console import console_view, may_view
from outbox_django.databases import write_alias
from outbox_django.holding import holds
from outbox_django.models import Console, Hold, Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.http import HttpRequest
    from django.utils.safestring import SafeString

    OutboxAdminBase = admin.ModelAdmin[Outbox]
    HoldAdminBase = admin.ModelAdmin[Hold]
    ConsoleAdminBase = admin.ModelAdmin[Console]
    PaginatorBase = Paginator[Outbox]
else:
    OutboxAdminBase = admin.ModelAdmin
    HoldAdminBase = admin.ModelAdmin
    ConsoleAdminBase = admin.ModelAdmin
    PaginatorBase = Paginator

_COUNT_BOUND = 10_000
_NAMED = 100
_OFFERED_TOPICS = 500
_MOST_LOGGED = 1_000
_LONGEST_ENTRY = 500
_SHOWN_CHARACTERS = 20_000
_READ_BYTES = 2**20
_ARE_SMALL = small_headers_sql("%s")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class BoundedPaginator(PaginatorBase):
    """A paginator of up to 10,000 rows; the pages after those can be reached by searching."""

    @cached_property
    def count(self) -> int:
        """Number of rows, or the bound if there are more."""
        rows = self.object_list
        return rows.order_by()[:_COUNT_BOUND].count() if isinstance(rows, models.QuerySet) else len(rows)


class _Media:
    """The style sheet of all pages."""

    css: ClassVar = {"all": ("outbox_django/admin.css",)}


@admin.register(Outbox)
class OutboxAdmin(OutboxAdminBase):
    """Records that wait to be published, the next one first."""

    list_display = ("id", "kafka_topic", "kafka_key", "age", "held", "in_flight", "size")
    search_fields = ("kafka_topic__startswith", "kafka_key__startswith")
    search_help_text = "Beginning of a topic or of a key"
    list_filter = (Held, InFlight)
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
        "held",
        "shown_headers",
        "size",
        "shown_value",
    )

    Media = _Media

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Outbox]:
        """Return the rows with the sizes of their values and their holds, without values and headers."""
        size = models.Func("kafka_value", function="octet_length", output_field=models.IntegerField())
        topic, key, record = (models.OuterRef(name) for name in ("kafka_topic", "kafka_key", "pk"))
        keeps = models.Q(record_id=record) | models.Q(kafka_key=key)
        keeps |= models.Q(kafka_key__isnull=True, record_id__isnull=True)
        hold = Hold.objects.filter(keeps, kafka_topic=topic).order_by("create_time").values("pk")[:1]
        rows = super().get_queryset(request).using(write_alias("Outbox"))
        rows = rows.defer("kafka_value", "kafka_header_keys", "kafka_header_values")
        return rows.annotate(octets=size, hold=models.Subquery(hold))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Outbox | None:
        """Return a record with the beginning of its value, and its headers if they are small enough to be shown."""
        record = super().get_object(request, object_id, from_field)
        if record is None:
            return None
        begin = models.Func("kafka_value", 1, _READ_BYTES, function="substring", output_field=models.BinaryField())
        columns = "kafka_header_keys", "kafka_header_values"
        headers = (RawSQL(f"CASE WHEN {_ARE_SMALL} THEN {column} END", [_READ_BYTES]) for column in columns)  # noqa: S611
        rows = Outbox.objects.using(write_alias("Outbox")).filter(pk=record.pk)
        found = rows.values_list(begin, *headers).first()
        if found is None:  # published meanwhile
            return None
        record.value_begin, record.kafka_header_keys, record.kafka_header_values = found
        return record

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

    @admin.display(description="waiting for", ordering="id")
    def age(self, record: Outbox) -> str:
        """Return the time since the record's transaction began, to the second."""
        return age(record.create_time)

    @admin.display(description="held by")
    def held(self, record: Outbox) -> str:
        """Return a link to a hold that keeps the record."""
        hold: int | None = getattr(record, "hold", None)
        return "-" if hold is None else _link(self.admin_site, "hold", hold, "a hold")

    @admin.display(description="in flight")
    def in_flight(self, record: Outbox) -> str:
        """Tell whether an at-least-once harvester has marked the record, and is publishing it."""
        return "-" if record.leader_id is None else "yes"

    @admin.display(description="size (bytes)")
    def size(self, record: Outbox) -> int | str:
        """Return the bytes of the value."""
        octets: int | None = getattr(record, "octets", None)
        return "tombstone" if octets is None else octets

    @admin.display(description="headers")
    def shown_headers(self, record: Outbox) -> str:
        """Return one header a line."""
        if record.kafka_header_keys is None:
            return HEADERS_TOO_LARGE
        lines = ((header.key, as_text(header.value)) for header in record.headers)
        return format_html_join("", '<div class="outbox-text"><b>{}</b>: {}</div>', lines) or "-"

    @admin.display(description="value")
    def shown_value(self, record: Outbox) -> str:
        """Return the value as JSON, text or hexadecimal digits, whichever it is."""
        text = _indented(as_text(record.value_begin))
        cut = "" if len(text) <= _SHOWN_CHARACTERS else f"\n... {len(text) - _SHOWN_CHARACTERS} more characters"
        if (getattr(record, "octets", None) or 0) > _READ_BYTES:
            cut = f"\n... {self.size(record)} bytes in all"
        return format_html('<pre class="outbox-text">{}{}</pre>', text[:_SHOWN_CHARACTERS], cut)


class TopicInput(AdminTextInputWidget):
    """A line for a topic's name that offers those for which records wait."""

    def __init__(self, topics: Sequence[str] = ()) -> None:
        super().__init__({"list": "outbox-topics", "autocomplete": "off"})
        self._topics = topics

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        """Return the line, and the list that browsers complete it from."""
        line = super().render(name, value, attrs, renderer)
        options = format_html_join("", '<option value="{}">', ((topic,) for topic in self._topics))
        return format_html('{}<datalist id="outbox-topics">{}</datalist>', line, options)


class HoldChangeList(ChangeList):
    """A page of holds with the number of records that each keeps."""

    def get_results(self, request: HttpRequest) -> None:
        """Count for all holds of the page at once."""
        super().get_results(request)
        kept = holds(self.result_list.db).count_behind() if self.result_list else {}
        for hold in self.result_list:
            hold.kept_records = kept.get(hold.pk, 0)


@admin.register(Hold)
class HoldAdmin(HoldAdminBase):
    """The holds of the outbox. The actions are those of `outbox hold`."""

    list_display = ("__str__", "record", "kept", "why", "dead_lettering", "age")
    search_fields = ("kafka_topic__startswith", "kafka_key__startswith", "=record_id")
    search_help_text = "Beginning of a topic or of a key, or a record's id"
    list_filter = (What, "dead_letter")
    ordering = ("create_time", "record_id")
    show_full_result_count = False
    list_per_page = 50
    actions = ("release", "skip", "send_to_dead_letters")

    Media = _Media

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Hold]:
        """Return the rows of the database where `holds` writes: a replica may be behind, and takes no actions."""
        return super().get_queryset(request).using(write_alias("Outbox"))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list that counts what holds keep."""
        del request, kwargs
        return HoldChangeList

    def get_fields(self, request: HttpRequest, obj: Hold | None = None) -> tuple[str, ...]:
        """Return the fields of a new hold, or all of one that is there."""
        del request
        new = ("kafka_topic", "kafka_key", "reason")
        return new if obj is None else (*new, "record", "error", "dead_lettering", "create_time")

    def get_readonly_fields(self, request: HttpRequest, obj: Hold | None = None) -> tuple[str, ...]:
        """Return the fields that nobody enters."""
        del request
        return () if obj is None else ("record", "dead_lettering", "create_time")

    @admin.display(description="record", ordering="record_id")
    def record(self, hold: Hold) -> str:
        """Return a link to the held record."""
        return "-" if hold.record_id is None else _link(self.admin_site, "outbox", hold.record_id, str(hold.record_id))

    @admin.display(description="records kept")
    def kept(self, hold: Hold) -> int:
        """Return the number of records that the hold keeps, among the oldest 10,000."""
        kept: int = getattr(hold, "kept_records", 0)
        return kept

    @admin.display(description="why")
    def why(self, hold: Hold) -> str:
        """Return the reason and Kafka's error, which may be long."""
        text = ": ".join(filter(None, (hold.reason, hold.error))) or "-"
        return format_html('<div class="outbox-why">{}</div>', text)

    @admin.display(description="held for", ordering="create_time")
    def age(self, hold: Hold) -> str:
        """Return the time since the hold was set, to the second."""
        return age(hold.create_time)

    @admin.display(description="dead letter", ordering="dead_letter")
    def dead_lettering(self, hold: Hold) -> str:
        """Tell whether the record waits for the dead-letter topic."""
        return "asked for" if hold.dead_letter else "-"

    def save_model(self, request: HttpRequest, obj: Hold, form: Any, change: bool) -> None:
        """Pause a topic or a key, as `outbox hold add` does."""
        del form, change
        obj.kafka_key = obj.kafka_key or None
        which = holds(write_alias("Outbox"), str(request.user))
        obj.was_held = not which.add(obj.kafka_topic, obj.kafka_key, reason=obj.reason or f"by {request.user}")
        obj.pk = which.list(topic=obj.kafka_topic, key=obj.kafka_key)[0].id
        doubt = which.doubt(obj.kafka_topic, obj.kafka_key)
        if doubt is not None:
            end = "" if doubt.text.endswith("?") else "."
            self.message_user(request, f"{doubt.text[:1].upper()}{doubt.text[1:]}{end}", messages.WARNING)

    def response_add(self, request: HttpRequest, obj: Hold, post_url_continue: str | None = None) -> HttpResponse:
        """Go back to the list, and say what is held now."""
        del post_url_continue
        text = f"It was held already: {obj}." if obj.was_held else f"Held: {obj}."
        self.message_user(request, text, messages.WARNING if obj.was_held else messages.SUCCESS)
        return HttpResponseRedirect(reverse("admin:outbox_django_hold_changelist", current_app=self.admin_site.name))

    def get_form(self, request: HttpRequest, obj: Hold | None = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form, in which key and reason are optional and each field is one line."""
        form = super().get_form(request, obj, change, **kwargs)
        topics = list(holds(write_alias("Outbox")).waiting_topics()) if obj is None else []
        for name in ("kafka_key", "reason"):
            if name in form.base_fields:
                form.base_fields[name].required = False
        for field in form.base_fields.values():
            field.widget = AdminTextInputWidget()
        if "kafka_topic" in form.base_fields:
            form.base_fields["kafka_topic"].widget = TopicInput(topics[:_OFFERED_TOPICS])
            form.base_fields["kafka_topic"].validators.append(_check_topic)
        return form

    def has_change_permission(self, request: HttpRequest, obj: Hold | None = None) -> bool:
        """Refuse: a hold is released, and another one made."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Hold | None = None) -> bool:
        """Refuse: "Delete" does not say that the record is published then. The actions do."""
        del request, obj
        return False

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Let users who may delete holds decide about the held records."""
        return request.user.has_perm("outbox_django.delete_hold")

    @admin.action(description="Release: publish what was held", permissions=["decide"])
    def release(self, request: HttpRequest, chosen: models.QuerySet[Hold]) -> None:
        """End the selected holds."""
        self._log(request, chosen, "Released")
        ids = list(chosen.values_list("pk", flat=True))
        number = holds(chosen.db, str(request.user)).release_holds(ids)
        self.message_user(request, f"Released: {number}.")

    @admin.action(description="Skip: delete the held records for good", permissions=["decide"])
    def skip(self, request: HttpRequest, chosen: models.QuerySet[Hold]) -> HttpResponse | None:
        """Delete the records of the selected holds, once that is confirmed."""
        held = chosen.filter(record_id__isnull=False)
        if "confirmed" not in request.POST:
            return self._confirm_skip(request, chosen, held)
        self._log(request, held, "Skipped: deleted the record")
        number = holds(chosen.db, str(request.user)).skip(records=self._records(chosen))
        self.message_user(request, f"Skipped records: {number}.{self._left_out(chosen, number)}")
        return None

    def _confirm_skip(self, request: HttpRequest, chosen: models.QuerySet[Hold], held: Any) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": "Delete held records for good?",
            "opts": self.model._meta,  # noqa: SLF001  Django's documented API
            "chosen": [str(pk) for pk in chosen.values_list("pk", flat=True)],
            "held": held[:_NAMED],
            "count": held.count(),
            "others": chosen.count() - held.count(),
        }
        return TemplateResponse(request, "admin/outbox_django/hold/confirm_skip.html", context)

    @admin.action(description="Publish the held records to the dead-letter topic instead", permissions=["decide"])
    def send_to_dead_letters(self, request: HttpRequest, chosen: models.QuerySet[Hold]) -> None:
        """Ask the harvester to publish them there."""
        self._log(request, chosen.filter(record_id__isnull=False), "Asked for the dead-letter topic")
        number = holds(chosen.db, str(request.user)).dead_letter(records=self._records(chosen))
        self.message_user(request, f"Asked for: {number}.{self._left_out(chosen, number)}")

    def _log(self, request: HttpRequest, chosen: models.QuerySet[Hold], what: str) -> None:
        """Write who did what to which hold into Django's log of admin actions."""
        for hold in chosen[:_MOST_LOGGED]:
            why = hold.error or hold.reason
            self.log_change(request, hold, f"{what}{f' ({why})' if why else ''}"[:_LONGEST_ENTRY])

    @staticmethod
    def _left_out(chosen: models.QuerySet[Hold], number: int) -> str:
        others = chosen.filter(record_id__isnull=True).count()
        if number == 0 and others:
            return " Paused topics and keys have no record of their own: release them, or pick a record's hold."
        return ""

    @staticmethod
    def _records(chosen: models.QuerySet[Hold]) -> list[int]:
        records = chosen.values_list("record_id", flat=True)
        return [identity for identity in records if identity is not None]


@admin.register(Console)
class ConsoleAdmin(ConsoleAdminBase):
    """The console, below the address where a model would have its list."""

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of the page, its files and its API."""
        view = console_view(self.admin_site)
        return [
            path("", view, name="outbox_django_console_changelist"),
            path("<path:path>", view, name="outbox_django_console_part"),
        ]

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show the link to users who may see the console."""
        return may_view(request.user)

    def has_view_permission(self, request: HttpRequest, obj: Console | None = None) -> bool:
        """Let users who may see outbox records and holds see the console."""
        del obj
        return may_view(request.user)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: there is one."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: Console | None = None) -> bool:
        """Refuse: there is nothing to change."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Console | None = None) -> bool:
        """Refuse: there is nothing to delete."""
        del request, obj
        return False


def _check_topic(topic: str) -> None:
    if not is_legal(topic):
        raise ValidationError("This is not a topic name that Kafka accepts: a-z A-Z 0-9 . _ - up to 249 characters.")


def _link(site: admin.AdminSite, model: str, pk: int, text: str) -> str:
    address = reverse(f"admin:outbox_django_{model}_change", args=[pk], current_app=site.name)  # of several sites
    return format_html('<a href="{}">{}</a>', address, text)


def as_text(value: Any) -> str:
    """Return a value for people: text if it is UTF-8, hexadecimal digits if not."""
    if value is None:
        return "NULL (tombstone)"
    if isinstance(value, str | list):  # a header's value may be an array, in a row that is held for that
        return str(value)
    octets = bytes(value)
    try:
        text = octets.decode()
    except UnicodeDecodeError:
        return f"0x{octets.hex(' ')}"
    return f"0x{octets.hex(' ')}" if _CONTROL_CHARACTERS.search(text) else text


def _indented(text: str) -> str:
    if not text.startswith(("{", "[")) or len(text) > _SHOWN_CHARACTERS:  # of a deep one indentation makes gigabytes
        return text
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text
