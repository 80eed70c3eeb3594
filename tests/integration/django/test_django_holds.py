"""Holds in Django: functions, `manage.py outbox_hold`, and the admin's actions."""

import io

import pytest
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command

import outbox_django as outbox
from outbox_django.models import Hold, Outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db

_HOLDS = "/admin/outbox_django/hold/"


def stash(key="k"):
    """Stash a record; return its row."""
    outbox.stash(outbox.OutboxRecord("orders", key=key, value=b"v"))
    return Outbox.objects.latest("id")


def refuse(record):
    """Hold a record as the harvester does."""
    return Hold.objects.create(
        outbox="public.outbox",
        kafka_topic=record.kafka_topic,
        kafka_key=record.kafka_key,
        record_id=record.pk,
        reason="refused",
        error="too large",
    )


def command(*arguments):
    """Return the output of `manage.py outbox_hold`."""
    told = io.StringIO()
    call_command("outbox_hold", *arguments, stdout=told)
    return told.getvalue()


def test_functions():
    """The functions work on the project's own connection and table."""
    holds = outbox.holds()
    assert holds.add("orders", "a", reason="why")
    assert not holds.add("orders", "a")
    assert [(hold.topic, hold.key, hold.reason) for hold in holds.list()] == [("orders", "a", "why")]
    assert Hold.objects.get().outbox == "public.outbox"
    assert holds.release(topic="orders", key="a") == 1
    with pytest.raises(AttributeError):
        holds.nothing()


def test_command():
    """`outbox_hold` lists, adds, releases, skips and dead-letters, as `outbox hold` does."""
    refused = refuse(stash("bad"))
    assert command("add", "--topic", "orders") == "topic orders is held\n"
    assert [line.split("\t")[0] for line in command("list").splitlines()] == ["topic", f"record {refused.record_id}"]
    assert command("dead-letter", str(refused.record_id)).startswith("asked for 1 record")
    assert Hold.objects.get(pk=refused.pk).dead_letter
    assert command("skip", "--all", "--topic", "orders") == "skipped 1 record\n"
    assert command("release", "--topic", "orders") == "released 1 hold\n"
    assert not Outbox.objects.exists()


def test_command_says_what_is_wrong():
    """The command reports a mistake as a CommandError."""
    with pytest.raises(CommandError, match="name a --topic"):
        command("add")
    with pytest.raises(CommandError, match="no record 99"):
        command("add", "--record", "99")


def act(client, action, *holds):
    """Run an admin action."""
    chosen = {"action": action, "_selected_action": [hold.pk for hold in holds]}
    response = client.post(_HOLDS, chosen, follow=True)
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


def test_admin_actions(admin_client):
    """Release, skip and dead-letter act on the selected holds as the command does."""
    holds = [refuse(stash(f"k{number}")) for number in range(3)]
    page = admin_client.get(_HOLDS).content.decode()
    assert "too large" in page
    assert act(admin_client, "send_to_dead_letters", holds[0]) == ["Asked for: 1."]
    assert Hold.objects.get(pk=holds[0].pk).dead_letter
    assert act(admin_client, "skip", holds[1]) == ["Skipped records: 1."]
    assert not Outbox.objects.filter(pk=holds[1].record_id).exists()
    assert act(admin_client, "release", holds[2]) == ["Released: 1."]
    assert Outbox.objects.filter(pk=holds[2].record_id).exists()
    assert list(Hold.objects.values_list("pk", flat=True)) == [holds[0].pk]


def test_admin_pauses(admin_client):
    """A hold added in the admin pauses a topic or a key, and cannot be changed afterwards."""
    form = {"kafka_topic": "orders", "kafka_key": "", "reason": ""}
    assert admin_client.post(f"{_HOLDS}add/", form).status_code == 302
    assert admin_client.post(f"{_HOLDS}add/", form | {"kafka_key": "a", "reason": "why"}).status_code == 302
    rows = Hold.objects.order_by("create_time").values_list("kafka_topic", "kafka_key", "outbox", "reason")
    assert list(rows) == [("orders", None, "public.outbox", "by admin"), ("orders", "a", "public.outbox", "why")]
    hold = Hold.objects.first()
    assert admin_client.post(f"{_HOLDS}{hold.pk}/change/", form | {"kafka_topic": "x"}).status_code == 403


def test_admin_asks_for_permission(client, django_user_model):
    """A user who may only view holds can neither skip nor release them."""
    hold = refuse(stash())
    user = django_user_model.objects.create_user("looks", password="x", is_staff=True)

    user.user_permissions.add(Permission.objects.get(codename="view_hold"))
    client.force_login(user)
    assert "held records for good" not in client.get(_HOLDS).content.decode()
    client.post(_HOLDS, {"action": "skip", "_selected_action": [hold.pk]})
    assert Hold.objects.exists()
    assert Outbox.objects.exists()
