"""The outbox in Django's admin: records of every kind are shown, and none can be changed."""

import pytest
from django.contrib import admin
from django.contrib.staticfiles import finders
from django.db import connection
from django.test.utils import CaptureQueriesContext

import outbox_django as outbox
from outbox_django import admin as outbox_admin
from outbox_django.models import Outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db

_LIST = "/admin/outbox_django/outbox/"
_HOLDS = "/admin/outbox_django/hold/"


def _stash(**fields):
    outbox.stash(outbox.OutboxRecord(**{"topic": "orders", "key": "order-1", "value": b"v", **fields}))
    return Outbox.objects.latest("id")


def _detail(client, row):
    response = client.get(f"{_LIST}{row.pk}/change/")
    assert response.status_code == 200
    return response.content.decode()


def test_the_list_shows_records_in_the_order_of_publishing(admin_client):
    """The list names topic, key and size, lowest id first."""
    _stash(key="first", value=b"12345")
    _stash(key="second", value=None)
    page = admin_client.get(_LIST).content.decode()
    assert page.index("first") < page.index("second")
    assert '<td class="field-size">5</td>' in page
    assert '<td class="field-size">tombstone</td>' in page


def test_the_list_does_not_fetch_values_or_count_without_bound(admin_client):
    """The list's queries leave large columns out, and every one has a limit."""
    outbox.stash_many(outbox.OutboxRecord("orders", key=str(number)) for number in range(60))
    with CaptureQueriesContext(connection) as queries:
        admin_client.get(_LIST)
    of_outbox = [query["sql"] for query in queries if '"outbox"' in query["sql"]]
    assert of_outbox
    for sql in of_outbox:
        assert "LIMIT" in sql
        assert '"outbox"."kafka_value",' not in sql
        assert "kafka_header_values" not in sql


def test_the_list_shows_as_many_pages_as_the_bound_allows(admin_client, monkeypatch):
    """With more rows than the bound the list still renders, and counts no further."""
    monkeypatch.setattr(outbox_admin, "_COUNT_BOUND", 3)
    outbox.stash_many(outbox.OutboxRecord("orders", key=str(number)) for number in range(5))
    response = admin_client.get(_LIST)
    assert response.context["cl"].result_count == 3


@pytest.mark.parametrize(("words", "found"), [("orders", 2), ("order-2", 1), ("payments", 1), ("rder-2", 0)])
def test_search_by_topic_and_key(admin_client, words, found):
    """The search box finds the beginning of a topic or a key."""
    _stash(key="order-1")
    _stash(key="order-2")
    _stash(topic="payments", key="x")
    assert admin_client.get(_LIST, {"q": words}).context["cl"].result_count == found


def test_the_filter_finds_what_is_in_flight(admin_client):
    """The filter separates marked records from waiting ones."""
    _stash()
    Outbox.objects.update(leader_id="7f3de2ca-8c9c-4d6b-9a39-91d5d6b0a9c8")
    _stash()
    assert admin_client.get(_LIST, {"in_flight": "yes"}).context["cl"].result_count == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"plain text", "plain text"),
        (b"\x00\xff\x01", "0x00 ff 01"),
        (b"tab\tbell\x07", "0x74 61 62"),
        (None, "NULL (tombstone)"),
        (b"", "<pre"),
        ({"b": [1, "Zoë"]}, "  &quot;b&quot;: [\n    1,\n    &quot;Zoë&quot;"),
        ("{not json", "{not json"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("x" * 30_000, "10000 more characters"),
        ("[" * 10_000, "[[[["),
        ("[" * 900 + "1," * 100_000 + "1" + "]" * 900, "181801 more characters"),
    ],
)
def test_a_value_is_shown_as_what_it_is(admin_client, value, shown):
    """The admin shows text as text, JSON indented and other bytes as digits, and escapes HTML."""
    assert shown in _detail(admin_client, _stash(value=value))


def test_headers_are_shown_and_escaped(admin_client):
    """The admin shows each header's name and value, escaped."""
    page = _detail(admin_client, _stash(headers=[("a&b", "<i>"), ("bin", b"\xff"), ("none", None)]))
    for expected in ("<b>a&amp;b</b>: &lt;i&gt;", "<b>bin</b>: 0xff", "<b>none</b>: NULL"):
        assert expected in page


@pytest.mark.parametrize("page", [_LIST, _HOLDS, "/admin/outbox_django/", f"{_LIST}{{pk}}/change/"])
def test_pages_need_no_inline_style(admin_client, page):
    """A site's Content-Security-Policy may forbid it: the style sheet is a file, which is there."""
    row = _stash(headers=[("h", b"v")])
    outbox.holds().add("orders", reason="why")
    content = admin_client.get(page.format(pk=row.pk)).content.decode()
    assert "style=" not in content.replace("style=display:none", "")
    assert "outbox_django/admin.css" in content
    assert finders.find("outbox_django/admin.css")


def test_headers_that_are_none_are_shown(admin_client):
    """The admin shows a row whose headers are no pairs of texts, and which is held for that."""
    row = _stash(headers=[("a", b"1"), ("b", b"2")])
    with connection.cursor() as cursor:
        cursor.execute("UPDATE outbox SET kafka_header_keys = '{{a,b}}', kafka_header_values = '{{1,2}}'")
        assert "&#x27;b&#x27;" in _detail(admin_client, row)
        cursor.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_headers_in_pairs")
        cursor.execute("UPDATE outbox SET kafka_header_keys = '{c,d,e}', kafka_header_values = '{3}'")
    assert "<b>c</b>: 3" in _detail(admin_client, row)


def test_a_huge_row_is_shown_in_part(admin_client):
    """The admin reads the beginning of a value, and no headers beyond what a stash allows."""
    row = _stash(value=b"x" * 3_000_000)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE outbox SET kafka_key = repeat('k', 100000),"
            " kafka_header_keys = array_fill(''::text, ARRAY[200000]),"
            " kafka_header_values = array_fill(''::bytea, ARRAY[200000])"
        )
    page = _detail(admin_client, row)
    assert "3000000 bytes in all" in page
    assert "(the headers are too large to be shown)" in page
    assert "k" * 65_536 in page
    assert "k" * 65_537 not in page


@pytest.mark.parametrize("time", ["infinity", "-infinity", "4000-01-01 BC", "200000-01-01"])
def test_times_that_python_lacks_are_shown(admin_client, time):
    """The admin's lists, their summary and a record's page work with any time that a writer made up."""
    row = _stash()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_create_time_in_range")
        cursor.execute("UPDATE outbox SET create_time = %s", [time])
    assert str(row.pk) in admin_client.get("/admin/outbox_django/outbox/").content.decode()
    assert "orders" in _detail(admin_client, row)
    assert Outbox.objects.get().create_time is None


def test_nothing_can_be_changed(admin_client, rf, admin_user):
    """Even a superuser cannot add, change or delete a record here."""
    row = _stash()
    assert admin_client.get(f"{_LIST}add/").status_code == 403
    assert admin_client.post(f"{_LIST}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin_client.post(f"{_LIST}{row.pk}/change/", {"kafka_key": "x"}).status_code == 403
    assert Outbox.objects.get().kafka_key == "order-1"
    request = rf.get("/")
    request.user = admin_user
    assert admin.site.get_model_admin(Outbox).get_actions(request) == {}


@pytest.mark.django_db(databases=["default", "other"])
def test_pages_show_the_database_that_stash_writes_to(admin_client, settings):
    """Lists, pages and actions work on OUTBOX["DATABASE"], whatever the routers read from."""
    settings.OUTBOX = {"DATABASE": "other"}
    outbox.stash(outbox.OutboxRecord("orders", "elsewhere"))
    row = Outbox.objects.using("other").get()
    assert "elsewhere" in _detail(admin_client, row)
    assert "elsewhere" in admin_client.get(_LIST).content.decode()
    outbox.holds().add("orders", "elsewhere")
    (hold,) = outbox.holds().list()
    assert "elsewhere" in admin_client.get(_HOLDS).content.decode()
    admin_client.post(_HOLDS, {"action": "release", "_selected_action": [hold.id]})
    assert outbox.holds().list() == []
