"""The doors of the console: mounted in WSGI and ASGI applications, by its own server, and by the command."""

import asyncio
import http.client
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from flask import Flask, session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.testclient import TestClient
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from outbox_core.cli import main
from outbox_core.console import Console, Permission, User
from outbox_core.console.access import EVERYTHING
from outbox_core.console.asgi import ConsoleApp as AsgiConsole
from outbox_core.console.login import TokenLogin
from outbox_core.console.server import ConsoleServer
from outbox_core.console.wsgi import ConsoleApp as WsgiConsole
from outbox_core.errors import InvalidConfig
from tests.docs.blocks import ROOT, blocks_of
from tests.harvesting import wait_until
from tests.integration.console.console_fixtures import HOST, Browser, scene

__all__ = ["scene"]

PREFIX = "/ops/outbox"
TOKEN = "a token of the test's own"
ALICE = User("alice", EVERYTHING)


def by_header(headers):
    """Return the user that a header names."""
    name = headers.get("x-user", "alice")
    return None if name == "nobody" else User(name, EVERYTHING if name == "alice" else {"view"})


def through_flask(config, **options):
    """Return a browser of a console in a Flask application."""
    options.setdefault("authorize", lambda environ: by_header({"x-user": environ.get("HTTP_X_USER", "alice")}))
    app = Flask("shop")
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {PREFIX: WsgiConsole({"shop": config}, **options)})
    client = Client(app, use_cookies=False)

    def ask(method, path, query, headers, body):
        path = path if path.startswith(PREFIX) else PREFIX + path
        answer = client.open(path, method=method, query_string=query, headers=headers, data=body or None)
        return answer.status_code, list(answer.headers), answer.data

    return Browser(ask)


def through_starlette(config, **options):
    """Return a browser of a console in a Starlette application."""

    async def authorize(scope):
        await asyncio.sleep(0)
        return by_header({name.decode(): value.decode() for name, value in scope["headers"]})

    options.setdefault("authorize", authorize)
    app = Starlette(routes=[Mount(PREFIX, AsgiConsole({"shop": config}, **options))])
    client = TestClient(app, base_url=f"https://{HOST}", follow_redirects=False)

    def ask(method, path, query, headers, body):
        client.cookies.clear()
        path = path if path.startswith(PREFIX) else PREFIX + path
        answer = client.request(method, f"{path}?{query}" if query else path, headers=headers, content=body)
        return answer.status_code, answer.headers.multi_items(), answer.content

    return Browser(ask)


MOUNTED = pytest.mark.parametrize("through", [through_flask, through_starlette])


@MOUNTED
def test_a_mounted_console(scene, through):
    """Below a prefix the page is found, records are shown, and a topic is paused by the user that authorize names."""
    scene.fill("orders", 2)
    browser = through(scene.config())
    status, page = browser.request("GET", "/")
    assert status == 200
    assert b"<html" in page
    status, _ = browser.request("GET", PREFIX)
    assert (status, browser.last_headers["location"]) in ((308, "outbox/"), (307, f"https://{HOST}{PREFIX}/"))
    assert len(browser.data("records")["records"]) == 2
    assert browser.done("pause", topic="orders") == 1
    assert browser.data("events")["events"][0]["actor"] == "alice as postgres"


@MOUNTED
def test_a_mounted_console_knows_its_users(scene, through):
    """A user whom authorize refuses gets nothing, a viewer may not act, and a forged POST is refused."""
    scene.fill("orders", 2)
    browser = through(scene.config())
    pause = {"topic": "orders", "reason": "r"}
    assert browser.act("pause", pause, **{"x-user": "bob"})[1]["error"]["code"] == "no_permission"
    assert browser.act("pause", pause, **{"x-user": "nobody"})[1]["error"]["code"] == "refused"
    assert browser.act("pause", pause, origin="https://evil.example")[1]["error"]["code"] == "forged"
    assert browser.act("pause", pause, **{"x-outbox-console": "x" * 32})[1]["error"]["code"] == "forged"
    assert browser.act("pause", b" " * (5 * 2**20 + 1))[0] == 413
    assert scene.held() == []


def test_bodies_of_nobody_are_not_read(scene):
    """Before somebody is let in nothing of a body is read or kept, and of a login no more than a token needs."""
    config, answers = {"shop": scene.config()}, []
    path = "/api/outboxes/shop/actions/pause"
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": path, "CONTENT_LENGTH": "5000000", "wsgi.input": None}
    WsgiConsole(config, authorize=lambda _: None)(environ, lambda status, _: answers.append(status))

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        answers.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(AsgiConsole(config, authorize=lambda _: None)(scope, receive, send))
    assert answers == ["403 Forbidden", 403, None]


@MOUNTED
def test_a_mounted_console_lets_nobody_in_by_default(scene, through):
    """Without authorize everything is refused, with the text that says what is missing."""
    browser = through(scene.config(), authorize=None)
    status, page = browser.request("GET", "/")
    assert (status, b"pass authorize=" in page) == (403, True)
    for path in ("/api/outboxes", "/api/outboxes/shop/records"):
        status, document = browser.request("GET", path)
        assert status == 403
        assert "pass authorize=" in document["error"]["message"]
    session = browser.request("GET", "/api/session")[1]
    assert (session["user"], "pass authorize=" in session["refusal"]) == (None, True)


def test_proxies_may_change_the_host(scene):
    """A proxy that does not pass Host on is named as a trusted origin; no other origin is."""
    scene.fill("orders", 2)
    pause = {"topic": "orders", "reason": "r"}
    browser = through_flask(scene.config(), trusted_origins=["https://ops.public.example"])
    assert browser.act("pause", pause, origin="https://ops.public.example")[0] == 200
    assert browser.act("pause", pause, origin="https://other.public.example")[0] == 403


def test_an_asgi_application_lives(scene):
    """The application answers its server's lifespan, and closes a websocket."""
    app = AsgiConsole({"shop": scene.config()})
    asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    told = []

    async def receive():
        return next(asked)

    async def send(message):
        told.append(message["type"])

    asyncio.run(app({"type": "lifespan"}, receive, send))
    asyncio.run(app({"type": "websocket"}, receive, send))
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


def test_what_cannot_be_a_console(scene):
    """Consoles without outboxes or with unusable names, and users without names, are refused when they are made."""
    config = scene.config()
    for outboxes in ({}, {"": config}, {"a/b": config}, {"a\n": config}, {"shop": "outbox.yaml"}):
        with pytest.raises(InvalidConfig):
            Console(outboxes)
    for name, permissions in (("", {"view"}), (None, {"view"}), ("alice", {"views"}), ("alice", "view")):
        with pytest.raises(InvalidConfig):
            User(name, permissions)
    with pytest.raises(InvalidConfig, match="16 characters"):
        TokenLogin("short", EVERYTHING, "c")
    with pytest.raises(InvalidConfig, match="authorize: expected"):
        through_flask(config, authorize=lambda _: True).get("records")


@contextmanager
def served(console, user):
    """Serve a console on a free port; yield a browser at its address."""
    with ConsoleServer(console, "127.0.0.1", 0, user) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()

        def ask(method, path, query, headers, body):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request(method, f"{path}?{query}" if query else path, body=body or None, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), content

        browser = Browser(ask)
        browser.headers = {"host": f"127.0.0.1:{server.port}"}
        try:
            yield browser
        finally:
            server.stop()
            thread.join()


def test_the_server_answers_its_own_names_only(scene):
    """Without a token, a name that some DNS leads here is not answered; the machine's own names are."""
    scene.fill("orders", 2)
    with served(Console({"shop": scene.config()}), ALICE) as browser:
        assert len(browser.data("records")["records"]) == 2
        origin = {"origin": f"http://{browser.headers['host']}"}
        assert browser.act("pause", {"topic": "orders", "reason": "r"}, **origin)[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example:80", "[::2]", ""):
            assert browser.request("GET", "/api/session", headers={"host": host})[0] == 421, host
        for host in ("localhost:99", "[::1]:99", "LOCALHOST"):
            assert browser.request("GET", "/api/session", headers={"host": host})[0] == 200, host
        assert "Python" not in str(browser.last_headers)


def test_login_with_a_token(scene):
    """With a token the page is served to all, and its data only after a login, which a cookie remembers."""
    login = TokenLogin(TOKEN, {Permission.VIEW}, "outbox_console_1")
    with served(Console({"shop": scene.config()}, login=login), None) as browser:
        assert browser.request("GET", "/")[0] == 200
        assert browser.get("records")[1]["error"]["code"] == "login_needed"
        session = browser.request("GET", "/api/session")[1]
        assert (session["user"], session["login"]) == (None, "token")

        def log_in(token, **more):
            headers = browser.post_headers() | {"origin": f"http://{browser.headers['host']}"}
            return browser.request("POST", "/api/login", body={"token": token, **more}, headers=headers)

        assert log_in("another token of the test")[0] == 401
        assert log_in("ü")[0] == 401
        assert log_in([{}] * 10_000)[0] == 413, "it is not taken apart"
        assert browser.get("records")[0] == 401
        status, document = log_in(TOKEN, name="Ålice")
        assert (status, document) == (200, {"user": {"name": "Ålice", "permissions": ["view"]}})
        cookie = browser.last_headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert browser.get("records")[0] == 200
        kept = browser.cookies["outbox_console_1"]
        for forged in (f"9{kept}", kept[:-1], kept.replace(".", "..", 1), "1.2.3", ""):
            browser.cookies["outbox_console_1"] = forged
            assert browser.get("records")[0] == 401, forged
        browser.cookies["outbox_console_1"] = kept
        headers = browser.post_headers() | {"origin": f"http://{browser.headers['host']}"}
        assert browser.request("POST", "/api/logout", body={}, headers=headers)[0] == 200
        assert browser.get("records")[0] == 401


def test_a_login_runs_out(scene, monkeypatch):
    """A cookie is good for twelve hours."""
    login = TokenLogin(TOKEN, EVERYTHING, "c")
    with served(Console({"shop": scene.config()}, login=login), None) as browser:
        headers = browser.post_headers() | {"origin": f"http://{browser.headers['host']}"}
        assert browser.request("POST", "/api/login", body={"token": TOKEN}, headers=headers)[0] == 200
        monkeypatch.setattr("outbox_core.console.login._SECONDS", 0)
        assert browser.request("GET", "/api/session")[1]["user"]["name"] == "console"
        from time import time

        monkeypatch.setattr("outbox_core.console.login.time.time", lambda: time.__call__() + 12 * 3600 + 1)
        assert browser.get("records")[0] == 401


def recipe(framework, monkeypatch, tmp_path, scene):
    """Run a recipe of the page in a folder with an outbox's settings; return its application."""
    (block,) = (
        block
        for block in blocks_of(ROOT / "docs" / "console.md")
        if block.language == "python" and f"import {framework}" in block.text
    )
    (tmp_path / "outbox.yaml").write_text(f"harvest:\n  dataSource: {scene.database}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SESSION_KEY", "k")
    names = {"__name__": "app"}
    exec(compile(block.text, block.place, "exec"), names)  # noqa: S102  the page's own code
    return names["app"]


def test_the_recipe_for_fastapi(scene, monkeypatch, tmp_path):
    """In the application of the page, those who have logged in see the console, and others are refused."""
    app = recipe("FastAPI", monkeypatch, tmp_path, scene)

    @app.get("/login/{name}")
    def log_in(request: Request, name: str):
        request.session["user"] = name

    client = TestClient(app)
    assert client.get(f"{PREFIX}/api/outboxes").status_code == 403
    client.get("/login/bob")
    assert client.get(f"{PREFIX}/api/outboxes/shop/records").json()["data"]["records"] == []
    assert client.get(f"{PREFIX}/api/session").json()["user"]["permissions"] == ["view"]


def test_the_recipe_for_flask(scene, monkeypatch, tmp_path):
    """In the application of the page, those who have logged in see the console, and others are refused."""
    app = recipe("Flask", monkeypatch, tmp_path, scene)

    @app.get("/login/<name>")
    def log_in(name):
        session["user"] = name
        return ""

    client = app.test_client()
    assert client.get(f"{PREFIX}/api/outboxes").status_code == 403
    client.get("/login/alice")
    assert client.get(f"{PREFIX}/api/outboxes/shop/records").json["data"]["records"] == []
    assert client.get(f"{PREFIX}/api/session").json["user"]["permissions"] == ["view", "operate"]


REFUSED = (
    (["--host", "192.0.2.1"], "everyone who reaches this address could act"),
    (["--token", "short"], "at least 16 characters"),
    (["--token", TOKEN, "--token-file", "x"], "leave out either --token or --token-file"),
    (["--token-file", "/none"], "cannot be read"),
    (["--port", "99999"], "cannot listen there"),
    (["-f", "one/shop.yaml", "-f", "two/shop.yaml"], "another is called shop, too"),
    (["-f", "one/shop.yaml", "-f", "two/till.yaml", "--table", "t"], "leave out outbox_table"),
    (["-f", "one/shop.yaml", "-f", "none.yaml"], "none.yaml"),
)


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_commands_that_cannot_start(tmp_path, monkeypatch, capsys, arguments, told):
    """A command that would be open to all, or cannot be understood, ends with one line that says why."""
    monkeypatch.chdir(tmp_path)
    for name in ("OUTBOX_CONSOLE_TOKEN", "OUTBOX_POSTGRES_DSN", "OUTBOX_TABLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one/shop.yaml", "two/shop.yaml", "two/till.yaml"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("harvest: {}\n")
    assert main(["console", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert TOKEN not in error
    assert error.count("\n") == 1


def test_the_command(scene, tmp_path):
    """`outbox console` serves several outboxes, prints its address, and ends with Ctrl-C."""
    for name in ("shop", "till"):
        (tmp_path / f"{name}.yaml").write_text(f"harvest:\n  dataSource: {scene.database}\n")
    command = [sys.executable, "-m", "outbox_core", "console", "-f", "shop.yaml", "-f", "till.yaml", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--read-only"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("console on http://127.0.0.1:")
        port = int(line.strip().rstrip("/").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/outboxes")
        assert [b"shop" in (body := connection.getresponse().read()), b"till" in body] == [True, True]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/session")
        assert b'"permissions":["view"]' in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: process.returncode is not None, "the console did not end")
