"""Holds in Django: functions, `manage.py outbox_hold`, and the admin's actions."""

import io
import re
from contextlib import closing
from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

import outbox_django as outbox
from outbox_core.stores.postgres import connection as sessions
from outbox_django.management.commands import outbox_hold
from outbox_django.models import Event, Hold, Outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db

_HOLDS = "/admin/outbox_django/hold/"
_RECORDS = "/admin/outbox_django/outbox/"


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
    with pytest.raises(CommandError, match="say --yes"):
        command("skip", "--all", "--topic", "orders")
    assert "would skip 1 record" in command("skip", "--all", "--topic", "orders", "--dry-run")
    assert command("skip", "--all", "--topic", "orders", "--yes") == "skipped 1 record\n"
    assert command("release", "--topic", "orders") == "released 1 hold\n"
    assert not Outbox.objects.exists()


def test_options_behind_the_action():
    """Options of the command and of Django may stand behind the action, as they do in Django's own commands."""
    told = command("add", "--topic", "orders", "--database", "default", "--verbosity", "1", "--no-color", "--traceback")
    assert told == "topic orders is held\n"
    assert command("--database", "default", "list").startswith("topic\torders\t-\t")
    with pytest.raises(CommandError, match="elsewhere"):
        command("list", "--database", "elsewhere")


def test_command_says_what_is_wrong():
    """The command reports a mistake as a CommandError."""
    with pytest.raises(CommandError, match="name a --topic"):
        command("add")
    with pytest.raises(CommandError, match="no record 99"):
        command("add", "--record", "99")


def act(client, action, *holds, **more):
    """Run an admin action."""
    chosen = {"action": action, "_selected_action": [hold.pk for hold in holds], **more}
    response = client.post(_HOLDS, chosen, follow=True)
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


@pytest.mark.django_db(transaction=True)
def test_holds_of_a_locked_table(monkeypatch):
    """While a migration locks the tables, an action ends after some seconds; the connection's own patience returns."""
    monkeypatch.setattr(outbox_hold, "LOCK_TIMEOUT", "100ms")
    with closing(connection.copy()) as migration:
        migration.set_autocommit(False)
        with migration.cursor() as cursor:
            cursor.execute("LOCK TABLE outbox, outbox_hold IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(CommandError, match="outbox is locked by another session"):
            command("list")
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('lock_timeout'), current_setting('search_path')")
        assert cursor.fetchone() == ("0", '"$user", public')


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("command", ["outbox_hold list", "prune_inbox --older-than 1d", "outbox_restash --topic t"])
def test_pooler_of_transactions_is_refused(monkeypatch, command):
    """Behind a pooler that lends its connections for a transaction, commands are refused before they set anything."""
    monkeypatch.setattr("psycopg.ConnectionInfo.backend_pid", -1)
    monkeypatch.setattr(sessions, "is_lent_by_transaction", lambda *_: True)
    with CaptureQueriesContext(connection) as queries, pytest.raises(CommandError, match="pool_mode=transaction"):
        call_command(*command.split())
    assert not [query["sql"] for query in queries if "set_config" in query["sql"]]


def test_admin_actions(admin_client):
    """Release, skip and dead-letter act on the selected holds as the command does."""
    holds = [refuse(stash(f"k{number}")) for number in range(3)]
    page = admin_client.get(_HOLDS).content.decode()
    assert "too large" in page
    assert act(admin_client, "send_to_dead_letters", holds[0]) == ["Asked for: 1."]
    assert Hold.objects.get(pk=holds[0].pk).dead_letter
    asked = admin_client.post(_HOLDS, {"action": "skip", "_selected_action": [holds[1].pk]}).content.decode()
    assert "Yes, delete them" in asked
    assert "key k1: too large" in asked
    assert Outbox.objects.filter(pk=holds[1].record_id).exists(), "nothing is deleted before that is confirmed"
    assert act(admin_client, "skip", holds[1], confirmed="yes") == ["Skipped records: 1."]
    assert not Outbox.objects.filter(pk=holds[1].record_id).exists()
    assert act(admin_client, "release", holds[2]) == ["Released: 1."]
    assert Outbox.objects.filter(pk=holds[2].record_id).exists()
    assert list(Hold.objects.values_list("pk", flat=True)) == [holds[0].pk]
    entries = LogEntry.objects.order_by("pk").values_list("user__username", "object_repr", "change_message")
    told = [(user, shown.split()[0], what.split()[0]) for user, shown, what in entries]
    assert told == [("admin", "record", "Asked"), ("admin", "record", "Skipped:"), ("admin", "record", "Released")]


def test_admin_links_records_and_holds(admin_client):
    """A record's row names its hold, the hold its record; a hold cannot be deleted, which would publish its record."""
    held = refuse(stash("held"))
    stash("other")
    stash("held")
    page = admin_client.get("/admin/outbox_django/outbox/").content.decode()
    assert page.count(f'href="{_HOLDS}{held.pk}/change/"') == 2, "the record and the one behind it"
    shown = admin_client.get(f"{_HOLDS}{held.pk}/change/").content.decode()
    assert f'href="/admin/outbox_django/outbox/{held.record_id}/change/"' in shown
    assert "too large" in shown
    assert "deletelink" not in shown
    assert admin_client.post(f"{_HOLDS}{held.pk}/delete/", {"post": "yes"}).status_code == 403
    assert "delete_selected" not in admin_client.get(_HOLDS).content.decode()


ops = admin.AdminSite("ops")
for model in (Outbox, Hold):
    ops.register(model, type(admin.site.get_model_admin(model)))
urlpatterns = [path("admin/", admin.site.urls), path("ops/", ops.urls)]


def test_a_second_admin_site_stays_its_own(admin_client, settings):
    """Links and redirects of another site than `admin` lead to that site."""
    settings.ROOT_URLCONF = __name__
    held = refuse(stash("held"))
    page = admin_client.get("/ops/outbox_django/outbox/").content.decode()
    assert f'href="/ops/outbox_django/hold/{held.pk}/change/"' in page
    shown = admin_client.get(f"/ops/outbox_django/hold/{held.pk}/change/").content.decode()
    assert f'href="/ops/outbox_django/outbox/{held.record_id}/change/"' in shown
    assert 'href="/admin/' not in shown
    add = {"kafka_topic": "t", "kafka_key": "", "reason": ""}
    assert admin_client.post("/ops/outbox_django/hold/add/", add).headers["Location"] == "/ops/outbox_django/hold/"


def test_admin_says_what_it_has_not_done(admin_client):
    """A second pause, a topic without records, and a skip of a pause are answered with the reason."""
    add = {"kafka_topic": "ordrs", "kafka_key": "", "reason": ""}
    stash()
    for told in ("Held: topic ordrs.", "It was held already: topic ordrs."):
        response = admin_client.post(f"{_HOLDS}add/", add, follow=True)
        shown = [str(message) for message in response.context["messages"]]
        doubt = "None of the oldest 10,000 records is for topic ordrs (they are for orders); did you mean orders?"
        assert shown == [doubt, told]
    pause = Hold.objects.get()
    page = admin_client.post(_HOLDS, {"action": "skip", "_selected_action": [pause.pk]}).content.decode()
    assert "pause a topic or a key" in page
    assert "have no record of their own" in act(admin_client, "send_to_dead_letters", pause)[0]


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
    client.post(_HOLDS, {"action": "skip", "_selected_action": [hold.pk], "confirmed": "yes"})
    assert Hold.objects.exists()
    assert Outbox.objects.exists()


def test_record_list_filters_and_ages(admin_client):
    """Records are filtered by what holds keep, of each kind, and their age is shown to the second."""
    held, topic, key, free = (stash(name) for name in ("held", "paused", "key", "free"))
    Outbox.objects.filter(pk=topic.pk).update(kafka_topic="emails")
    refuse(held)
    outbox.holds().add("emails")
    outbox.holds().add("orders", "key")
    long_ago = timezone.now() - timedelta(days=1, hours=2, seconds=5)
    Outbox.objects.filter(pk=free.pk).update(create_time=long_ago)

    def listed(**chosen):
        return {row.pk for row in admin_client.get(_RECORDS, chosen).context["cl"].result_list}

    assert listed(held="yes") == {held.pk, topic.pk, key.pk}
    assert listed(held="no") == {free.pk}
    assert listed(held="no", in_flight="yes") == set()
    page = admin_client.get(_RECORDS).content.decode()
    assert re.search(r'class="field-age">1 day, 2:00:0\d<', page)
    assert "held (of the oldest 10,000)" in page


def test_hold_list_counts_what_each_keeps(admin_client):
    """Each hold shows how many records it keeps; the filter separates records, keys and topics."""
    refuse(stash("bad"))
    stash("bad")
    outbox.holds().add("orders", "quiet")
    outbox.holds().add("emails")
    response = admin_client.get(_HOLDS)
    kept = {str(hold): hold.kept_records for hold in response.context["cl"].result_list}
    assert kept == {f"record {Hold.objects.get(record_id__isnull=False).record_id} of orders": 2} | dict.fromkeys(
        ("key quiet of orders", "topic emails"), 0
    )
    for what, number in (("record", 1), ("key", 1), ("topic", 1), ("", 3)):
        assert admin_client.get(_HOLDS, {"what": what} if what else {}).context["cl"].result_count == number


def test_pause_form_offers_topics_and_checks_names(admin_client):
    """The form offers the topics of waiting records, escaped, and refuses what can be no topic."""
    stash()
    Outbox.objects.create(kafka_topic='<"x">', kafka_key="k")
    page = admin_client.get(f"{_HOLDS}add/").content.decode()
    assert '<option value="orders">' in page
    assert '<option value="&lt;&quot;x&quot;&gt;">' in page
    refused = admin_client.post(f"{_HOLDS}add/", {"kafka_topic": "bad topic!", "kafka_key": "", "reason": ""})
    assert "is not a topic name that Kafka accepts" in refused.content.decode()
    assert not Hold.objects.exists()


def test_summary_above_the_lists(admin_client, client, django_user_model):
    """The application's page and both lists tell users who may see records what waits, what is held and who leads."""
    refuse(stash("bad"))
    stash("good")
    Event.objects.create(outbox="public.outbox", kind="leader_fenced", actor="h1", reason="no heartbeat", term=42)
    for page in ("/admin/outbox_django/", _RECORDS, _HOLDS):
        shown = " ".join(admin_client.get(page).content.decode().split())
        assert re.search(r"<b>1 record to publish</b>, the oldest for 0:00:\d\d; <b>1 held</b>", shown)
        assert re.search(r"Last leadership: h1 lost leadership 0:00:\d\d ago, term 42: no heartbeat\.", shown)
    user = django_user_model.objects.create_user("holder", password="x", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_hold"))
    client.force_login(user)
    assert "to publish" not in client.get(_HOLDS).content.decode()


def test_summary_without_the_history_or_the_holds(admin_client):
    """Without the history the summary has no leadership; without the holds it says that nothing is known."""
    stash()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE outbox_event RENAME TO elsewhere")
        shown = admin_client.get("/admin/outbox_django/").content.decode()
        assert "1 record to publish" in shown
        assert "Last leadership" not in shown
        cursor.execute("ALTER TABLE outbox_hold RENAME TO gone")
    assert "What waits is not known" in admin_client.get("/admin/outbox_django/").content.decode()


class _OutboxRouter:
    def db_for_write(self, model, **_):
        return "other" if model is Outbox else None


@pytest.mark.django_db(databases=["default", "other"])
def test_holds_are_in_the_database_of_the_outbox(settings, admin_client):
    """A router that knows the outbox alone leads function, command and admin to the holds beside it."""
    settings.DATABASE_ROUTERS = [_OutboxRouter()]
    outbox.holds().add("function")
    command("add", "--topic", "command")
    admin_client.post(f"{_HOLDS}add/", {"kafka_topic": "admin", "kafka_key": "", "reason": ""})
    topics = Hold.objects.using("other").order_by("kafka_topic").values_list("kafka_topic", flat=True)
    assert list(topics) == ["admin", "command", "function"]
    assert not Hold.objects.using("default").exists()
