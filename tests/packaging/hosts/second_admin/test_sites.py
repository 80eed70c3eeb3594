"""The project's own suite."""

import json
import re

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import transaction
from django.test import Client

import outbox_django as outbox
from outbox_django.models import Hold, Outbox

pytestmark = pytest.mark.django_db(transaction=True)

HOLDS, CONSOLE = "/ops/outbox_django/hold/", "/ops/outbox_django/console/"


@pytest.fixture
def operator():
    """The client of an operator, who has no access to the other site."""
    user = User.objects.create_user("ops-olga")
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="outbox_django"))
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    assert client.get("/admin/").status_code == 302
    return client


@pytest.fixture(autouse=True)
def record():
    """A record that waits."""
    with transaction.atomic():
        outbox.stash(outbox.OutboxRecord("orders", key="k", value=b"v"))
    return Outbox.objects.get()


def links(page):
    """Return the links of a page."""
    return re.findall(r'(?:href|action)="(/[^"]*)"', page.content.decode())


def of_the_other(found):
    """Return the links that lead to the other site."""
    return [link for link in found if link.startswith("/admin/")]


def test_lists_and_records(operator, record):
    """Lists, records and holds link within their site."""
    hold = Hold.objects.create(outbox="public.outbox", kafka_topic="orders", kafka_key="k", record_id=record.pk)
    pages = ["/ops/", "/ops/outbox_django/outbox/", f"/ops/outbox_django/outbox/{record.pk}/change/", HOLDS]
    pages.append(f"{HOLDS}{hold.pk}/change/")
    found = {page: links(operator.get(page)) for page in pages}
    assert not [link for page in pages for link in of_the_other(found[page])]
    assert f"{HOLDS}{hold.pk}/change/" in found["/ops/outbox_django/outbox/"]
    assert f"/ops/outbox_django/outbox/{record.pk}/change/" in found[f"{HOLDS}{hold.pk}/change/"]


def test_a_new_hold(operator):
    """Adding a hold goes back to the list of its site."""
    form = operator.get(f"{HOLDS}add/")
    token = form.context["csrf_token"]
    given = {"kafka_topic": "orders", "kafka_key": "", "reason": "why", "csrfmiddlewaretoken": str(token)}
    assert operator.post(f"{HOLDS}add/", given).headers["Location"] == HOLDS
    assert Hold.objects.get().reason == "why"


def test_the_console(operator):
    """The console works on the second site, with its own link home."""
    assert operator.get(CONSOLE).status_code == 200
    session = operator.get(f"{CONSOLE}api/session").json()
    assert session["home"]["href"] == "/ops/"
    (found,) = operator.get(f"{CONSOLE}api/outboxes/outbox/records").json()["data"]["records"]
    assert found["topic"] == "orders"
    answer = operator.post(
        f"{CONSOLE}api/outboxes/outbox/actions/pause",
        json.dumps({"topic": "orders", "reason": "why"}),
        content_type="application/json",
        headers={session["csrf"]["header"]: session["csrf"]["token"]},
    )
    assert (answer.status_code, Hold.objects.get().kafka_topic) == (200, "orders")


def test_checks():
    """Django's checks find nothing."""
    call_command("check", databases=["default"], fail_level="WARNING")
