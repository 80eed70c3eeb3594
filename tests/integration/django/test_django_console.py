"""The console in Django's admin: its link, its permissions, its protection of POSTs, and its log of actions."""

import json
import sys

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import DatabaseError, transaction
from django.test import Client

import outbox_django as outbox
from outbox_django.models import Hold
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

# The console has sessions of its own on the database: they see what is committed.
pytestmark = pytest.mark.django_db(transaction=True)

_CONSOLE = "/admin/outbox_django/console/"
_NAME = "outbox"


def client_of(*permissions, name="carol", is_staff=True):
    """Return a client that checks CSRF tokens, of a user with these permissions."""
    user = User.objects.create_user(name, password="p", is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def act(client, action, body, **headers):
    """Post an action as the page does; return status and document."""
    csrf = client.get(f"{_CONSOLE}api/session").json()["csrf"]
    answer = client.post(
        f"{_CONSOLE}api/outboxes/{_NAME}/actions/{action}",
        json.dumps(body),
        content_type="application/json",
        headers={csrf["header"]: csrf["token"], **headers},
    )
    return answer.status_code, answer.json()


VIEWER = ("view_outbox", "view_hold")
OPERATOR = (*VIEWER, "add_hold", "delete_hold")
PAUSE = {"topic": "orders", "reason": "the consumer is down"}


def test_viewers_see_and_operators_act():
    """A viewer sees records and may not act; an operator pauses a topic, which both logs have."""
    with transaction.atomic():
        outbox.stash(outbox.OutboxRecord("orders", key="k", value=b"v"))
    viewer, operator = client_of(*VIEWER), client_of(*OPERATOR, name="olga")
    for client in (viewer, operator):
        assert "admin/outbox_django/console/" in client.get("/admin/").content.decode()
        assert client.get(_CONSOLE).status_code == 200
        records = client.get(f"{_CONSOLE}api/outboxes/{_NAME}/records").json()["data"]["records"]
        assert [record["topic"] for record in records] == ["orders"]
    session = operator.get(f"{_CONSOLE}api/session").json()
    assert session["user"] == {"name": "olga", "permissions": ["view", "operate"]}
    assert session["home"]["href"] == "/admin/"
    assert act(viewer, "pause", PAUSE)[1]["error"]["code"] == "no_permission"
    assert act(operator, "restash", {"reason": "r"})[1]["error"]["code"] == "no_permission"
    assert Hold.objects.count() == 0
    assert act(operator, "pause", PAUSE)[0] == 200
    assert Hold.objects.get().kafka_topic == "orders"
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr) == ("olga", "outbox: topic orders is paused")
    assert "the consumer is down" in entry.change_message
    event = operator.get(f"{_CONSOLE}api/outboxes/{_NAME}/events").json()["data"]["events"][0]
    assert event["actor"].startswith("olga as ")
    assert act(operator, "pause", {**PAUSE, "dry_run": True})[0] == 200
    assert LogEntry.objects.count() == 1, "a dry run is no action"


def test_an_action_that_django_cannot_log_is_done(monkeypatch, caplog):
    """Without Django's log the action is done all the same, and the answer says so."""

    def create(**_):
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(LogEntry.objects, "create", create)
    status, document = act(client_of(*OPERATOR), "pause", {**PAUSE, "force": True})
    assert (status, document["count"]) == (200, 1)
    assert Hold.objects.count() == 1
    assert "missing in Django's log" in caplog.text


def test_others_see_nothing():
    """Users without both permissions, or who are no staff, get no data; whoever is not logged in, the admin's login."""
    for client in (client_of("view_outbox"), client_of(*OPERATOR, name="n", is_staff=False), Client()):
        answer = client.get(f"{_CONSOLE}api/outboxes")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "refused")
        assert act(client, "pause", PAUSE)[0] == 403
        assert "admin/outbox_django/console/" not in client.get("/admin/").content.decode()
    assert Client().get(_CONSOLE).url.startswith("/admin/login/")


def test_forged_posts():
    """Without Django's token, or from another origin, nothing is done, and the refusal is one for programs."""
    client = client_of(*OPERATOR)
    for headers in ({"X-CSRFToken": ""}, {"X-CSRFToken": "x" * 64}, {"Origin": "https://evil.example"}):
        status, document = act(client, "pause", {**PAUSE, "force": True}, **headers)
        assert (status, document["error"]["code"]) == (403, "forged")
    assert client.get(f"{_CONSOLE}api/outboxes/{_NAME}/actions/pause").status_code == 405
    assert Hold.objects.count() == 0


def test_a_body_that_django_does_not_take(settings):
    """A body beyond Django's limit is refused with the setting's name."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    status, document = act(client_of(*OPERATOR), "pause", {**PAUSE, "reason": "r" * 200})
    assert (status, document["error"]["code"]) == (413, "too_large")
    assert "DATA_UPLOAD_MAX_MEMORY_SIZE" in document["error"]["message"]


def test_the_page_keeps_its_policy():
    """The page may not be framed, and its policy is the console's own."""
    answer = client_of(*VIEWER).get(_CONSOLE)
    assert "frame-ancestors 'none'" in answer["Content-Security-Policy"]
    assert answer["X-Frame-Options"] == "DENY"


def test_the_migration_goes_both_ways():
    """The permission comes with the migration; back and forth changes no table."""
    assert Permission.objects.filter(codename="restash_dead_letter").exists()
    call_command("migrate", "outbox_django", "0005", verbosity=0)
    call_command("migrate", "outbox_django", verbosity=0)


@pytest.mark.parametrize("path", ["", "api/outboxes"])
def test_a_web_application_without_the_extra(admin_client, monkeypatch, path):
    """Page and API name the extra `[harvester]` if it is not installed."""
    monkeypatch.setitem(sys.modules, "outbox_core.console.messages", None)
    response = admin_client.get(f"{_CONSOLE}{path}")
    assert response.status_code == 503
    assert "pip install 'kafka-outbox[harvester]'" in response.content.decode()
