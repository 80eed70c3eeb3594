"""The console in Django's admin: its session, its permissions, its protection of POSTs, its log of actions.

The database is that of Django's settings; the console has sessions of its own there, as `manage.py outbox_status` has.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import RequestDataTooBig
from django.db import DatabaseError, router, transaction
from django.http import HttpResponse
from django.middleware.csrf import get_token
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt, csrf_protect

from outbox_core.errors import OutboxError
from outbox_django.databases import direct_alias, option_of
from outbox_django.models import Hold
from outbox_django.settings import outbox_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.contrib.admin import AdminSite
    from django.http import HttpRequest

    from outbox_core.console import Console, User
    from outbox_core.console.messages import Done, Request, Response

_logger = logging.getLogger(__name__)

_LONGEST_ENTRY = 1_000
_LONGEST_NAME = 200
_SEEN = ("outbox_django.view_outbox", "outbox_django.view_hold")
_OPERATED = ("outbox_django.add_hold", "outbox_django.delete_hold")
_RESTASHED = ("outbox_django.restash_dead_letter",)
_HEADER_PREFIX = "HTTP_"


def may_view(user: Any) -> bool:
    """Tell whether a user of Django's may see the console."""
    return bool(user.is_active and user.has_perms(_SEEN))


def console_view(site: AdminSite) -> Callable[..., HttpResponse]:
    """Return the view of the console and of everything below its address, for an admin site."""

    def page(request: HttpRequest, path: str = "") -> HttpResponse:
        return _answer(site, request, path)

    @csrf_protect
    def api(request: HttpRequest, path: str) -> HttpResponse:
        return _answer(site, request, path)

    logged_in = site.admin_view(page)

    # Django's own refusal of a forged POST is a page, which a program cannot read.
    @csrf_exempt
    def view(request: HttpRequest, path: str = "") -> HttpResponse:
        if not path.startswith("api/"):
            return logged_in(request, path)
        response = api(request, path)
        return response if hasattr(response, "is_of_console") else _forged()

    return view


class _Kept:
    """The console of this process, made anew when the settings change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settings: object = None
        self._console: Console | None = None

    def get(self) -> Console:
        from outbox_core.console import Console
        from outbox_core.doctor.findings import ManagePy
        from outbox_django.harvesting import data_source, harvest_config

        alias, current = direct_alias(), outbox_settings()
        known = alias, data_source(alias), current
        with self._lock:
            if self._console is None or self._settings != known:
                name = str(current.table)
                self._console = Console(
                    {name: harvest_config(current, alias)}, commands={name: ManagePy(option_of(alias))}
                )
                self._settings = known
            return self._console


_kept = _Kept()


def _answer(site: AdminSite, request: HttpRequest, path: str) -> HttpResponse:
    try:
        from outbox_core.console.messages import ApiError

        console, asked = _kept.get(), _request_of(site, request, path)
    except RequestDataTooBig:
        text, remedy = "the body is longer than Django's DATA_UPLOAD_MAX_MEMORY_SIZE", "raise that setting"
        return _sent(ApiError(413, "too_large", text, remedy=remedy).response())
    except ModuleNotFoundError as error:
        text = f"The console needs {error.name}, which is not installed: pip install 'kafka-outbox[harvester]'"
        return _marked(HttpResponse(text, status=503, content_type="text/plain"))
    except OutboxError as error:
        return _sent(ApiError(503, "unavailable", str(error), remedy="mend the setting OUTBOX").response())
    answer = console.handle(asked)
    if answer.done is not None:
        _log(request, answer.done)
    return _sent(answer)


def _request_of(site: AdminSite, request: HttpRequest, path: str) -> Request:
    from outbox_core.console.access import Csrf
    from outbox_core.console.messages import Request

    index = reverse("admin:index", current_app=site.name)
    return Request(
        method=request.method or "",
        path=f"/{path}",
        base_path=request.path.removesuffix(path).rstrip("/"),
        query=request.META.get("QUERY_STRING", ""),
        headers={name.lower(): value for name, value in request.headers.items()},
        body=request.body,
        is_secure=request.is_secure(),
        user=_user_of(site, request),
        refusal="log in to the admin as a user who may view outbox records and holds",
        csrf=Csrf(_csrf_header(), get_token(request)),
        home=(index, str(site.site_header)),
    )


def _user_of(site: AdminSite, request: HttpRequest) -> User | None:
    from outbox_core.console.access import Permission, User

    user = request.user
    if not site.has_permission(request) or not may_view(user):
        return None
    wanted = {Permission.OPERATE: _OPERATED, Permission.RESTASH: _RESTASHED}
    given = {permission for permission, needed in wanted.items() if user.has_perms(needed)}
    return User(user.get_username() or str(user.pk), frozenset({Permission.VIEW, *given}))


def _csrf_header() -> str:
    name: str = settings.CSRF_HEADER_NAME
    return name.removeprefix(_HEADER_PREFIX).replace("_", "-")


def _log(request: HttpRequest, done: Done) -> None:
    """Write an action into Django's log of admin actions; the outbox's history has each of its records, too.

    The action is done: that it cannot be written down there must not look as if it had failed.
    """
    try:
        with transaction.atomic(router.db_for_write(LogEntry)):
            LogEntry.objects.create(
                user_id=str(request.user.pk),
                content_type=ContentType.objects.get_for_model(Hold),
                object_repr=f"{done.outbox}: {done.text}"[:_LONGEST_NAME],
                action_flag=CHANGE,
                change_message=f"Console: {done.action}: {done.text} ({done.reason})"[:_LONGEST_ENTRY],
            )
    except DatabaseError:
        _logger.exception("an action of the console is done, and is missing in Django's log of admin actions")


def _forged() -> HttpResponse:
    from outbox_core.console.messages import ApiError

    text = "Django's check of the CSRF token has failed"
    return _sent(ApiError(403, "forged", text, remedy="reload the page").response())


def _sent(answer: Response) -> HttpResponse:
    return _marked(HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers)))


def _marked(response: HttpResponse) -> HttpResponse:
    """Mark an answer as the console's own: any other is Django's refusal of a forged POST."""
    response.is_of_console = True  # type: ignore[attr-defined]
    return response
