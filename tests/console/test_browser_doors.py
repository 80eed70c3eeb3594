"""The console by its other doors: mounted below a prefix in an ASGI application, in Django's admin, with a token."""

import re
import socket
import threading

import psycopg
import pytest
import uvicorn
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from devstack.processes import wait_until
from outbox_core.config import load_file
from outbox_core.console import User
from outbox_core.console.asgi import ConsoleApp
from outbox_core.holds import Holds
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

TOKEN = "a token of sixteen characters and more"


@pytest.fixture(autouse=True, scope="module")
def _django_beside_playwright():
    """Let Django work in the thread whose event loop Playwright runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield


def _host(world):
    """Return an application with users by cookie, and the console below `/ops/outbox`."""

    def whose(scope):
        cookie = dict(scope["headers"]).get(b"cookie", b"").decode()
        found = re.search(r"who=(\w+)", cookie)
        return User(found[1], {"view", "operate"} if found[1] == "olga" else {"view"}) if found else None

    def log_in(request):
        answer = RedirectResponse("/ops/outbox")
        answer.set_cookie("who", request.path_params["name"], samesite="strict", httponly=True)
        return answer

    console = ConsoleApp({"shop": load_file(world.shop)}, authorize=whose)
    return Starlette(routes=[Route("/login/{name}", log_in), Mount("/ops/outbox", console)])


@pytest.fixture
def mounted(world):
    """Yield the address of the application, served by uvicorn."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(_host(world), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        assert wait_until(lambda: server.started, 30)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


def _pause(page, topic):
    """Pause a topic by the page."""
    page.get_by_role("button", name="Pause a topic or key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Topic", exact=True).fill(topic)
    dialog.get_by_label("Reason").fill("a look at it")
    dialog.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".result")).to_contain_text(topic)
    expect(page.get_by_role("article").filter(has_text=topic)).to_contain_text("a look at it")


def test_mounted_below_a_prefix(mounted, open_page, world):  # pages ask until they are closed, which is before its end
    """A stranger sees nothing; a user acts under their own name; one who may only look sees no action."""
    topic = "orders"
    world.stash(topic, b"1")
    page = open_page(allowed=["403", "404"])
    page.goto(f"{mounted}/ops/outbox/")
    expect(page.get_by_text("lets nobody in")).to_be_visible()
    page.goto(f"{mounted}/login/olga")
    page.goto(f"{mounted}/ops/outbox/#/shop/holds")
    _pause(page, topic)
    with psycopg.connect(world.dsn) as connection:
        actors = connection.execute("SELECT actor FROM outbox_event WHERE kind = 'held'").fetchall()
        Holds().release(connection, topic=topic)
    assert [actor.split(" as ")[0] for (actor,) in actors] == ["olga"]

    reader = open_page()
    reader.goto(f"{mounted}/login/rita")
    reader.goto(f"{mounted}/ops/outbox/#/shop/holds")
    expect(reader.get_by_text("Nothing is held:")).to_be_visible()
    expect(reader.get_by_role("button", name="Pause a topic or key")).to_have_count(0)


@pytest.mark.complete
def test_with_a_token(open_page, world):
    """The command's door with a token asks for it, takes no other, and lets out again."""
    page = open_page(allowed=["401"])
    page.goto(world.start_console(token=TOKEN))
    page.get_by_label("Token").fill("another token of that length")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).not_to_be_empty()
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("[data-tile=deliverable] strong")).to_have_text(re.compile(r"\d"))
    page.get_by_role("link", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.django_db(transaction=True, databases=["default"])
def test_in_the_admin(open_page, live_server, settings, kafka, django_user_model):
    """In Django's admin: who logs in there sees the console, and acts with the permissions of a superuser."""
    settings.STATIC_ROOT = "/nowhere"
    settings.OUTBOX = {"KAFKA": {"bootstrap.servers": kafka.bootstrap}}
    django_user_model.objects.create_superuser("root", password="secret")
    from django.db import transaction

    import outbox_django

    with transaction.atomic():
        outbox_django.stash(outbox_django.OutboxRecord("orders", "k", b"1"))
    page = open_page(allowed=["404"])  # the admin's style sheets are not served here
    page.goto(f"{live_server.url}/admin/outbox_django/console/")
    page.get_by_label("Username").fill("root")
    page.get_by_label("Password").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("[data-tile=deliverable] strong")).to_have_text("1")
    page.get_by_role("link", name="Holds").click()
    _pause(page, "orders")
    from django.contrib.admin.models import LogEntry

    assert LogEntry.objects.filter(user__username="root", change_message__contains="a look at it").exists()
    expect(page.get_by_role("link", name=re.compile("administration"))).to_have_attribute("href", "/admin/")
