"""A console over one outbox, and a browser's way of asking it: with cookies, an origin and the CSRF header."""

import json
from contextlib import contextmanager

import pytest

from outbox_core.console import Console, User
from outbox_core.console.access import EVERYTHING
from outbox_core.console.messages import Request
from outbox_core.schema import TableName, create_history_sql
from tests.harvesting import Scene

HOST = "ops.example:8443"
NOWHERE = "127.0.0.1:1"  # nothing listens there


class Browser:
    """Requests of a page at one origin; `ask` is how they reach the console. Each answer is (status, document)."""

    def __init__(self, ask, *, name="shop"):
        self._ask = ask
        self._name = name
        self.headers = {"host": HOST}
        self.cookies = {}
        self.last_headers = {}

    def request(self, method, path, *, query="", body=None, headers=None):
        """Send one request with the cookies that were set before."""
        sent = {**self.headers, **(headers or {})}
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        status, told, answer = self._ask(method, path, query, sent, content)
        self.last_headers = {name.lower(): value for name, value in told}
        for name, value in told:
            if name.lower() == "set-cookie":
                cookie, _, rest = value.partition("=")
                self.cookies[cookie] = rest.partition(";")[0]
        is_json = self.last_headers.get("content-type", "").startswith("application/json")
        return status, json.loads(answer) if is_json and answer else answer

    def get(self, path, query=""):
        """Read something of the outbox."""
        return self.request("GET", f"/api/outboxes/{self._name}/{path}", query=query)

    def data(self, path, query=""):
        """Return the data of a route that has to answer."""
        status, document = self.get(path, query)
        assert status == 200, document
        assert document["unavailable"] is None, document
        return document["data"]

    def post_headers(self):
        """Return the headers of a POST as the page sends them."""
        _, session = self.request("GET", "/api/session")
        csrf = session["csrf"]
        return {"origin": f"https://{HOST}", "content-type": "application/json", csrf["header"].lower(): csrf["token"]}

    def act(self, action, body, **headers):
        """Carry out an action."""
        path = f"/api/outboxes/{self._name}/actions/{action}"
        return self.request("POST", path, body=body, headers={**self.post_headers(), **headers})

    def done(self, action, **body):
        """Carry out an action that has to work, and return its count."""
        status, document = self.act(action, {"reason": "because", **body})
        assert status == 200, document
        return document["count"]


def asking(console, user):
    """Return a way to ask a console itself, for this user."""

    def ask(method, path, query, headers, body):
        request = Request(method=method, path=path, query=query, headers=headers, body=body, user=user)
        answer = console.handle(request)
        return answer.status, answer.headers, answer.body

    return ask


@pytest.fixture
def scene(database):
    """Return an outbox with holds and history, and no Kafka."""
    scene = Scene(database, NOWHERE)
    scene.execute(create_history_sql(TableName("outbox")))
    yield scene
    scene.close()


@pytest.fixture
def console(scene):
    """Return a console of it, named shop."""
    return Console({"shop": scene.config()})


@pytest.fixture
def browser(console):
    """Return the browser of alice, who may do everything."""
    return Browser(asking(console, User("alice", EVERYTHING)))


@contextmanager
def small_bounds(monkeypatch, rows):
    """Lower the bounds of the statements that walk the table's head."""
    import outbox_core.console.reading
    import outbox_core.doctor.pending
    import outbox_core.doctor.postgres
    import outbox_core.holds

    with monkeypatch.context() as patch:
        patch.setattr(outbox_core.doctor.pending, "SEARCHED_ROWS", rows)
        patch.setattr(outbox_core.doctor.postgres, "HEAD_ROWS", rows)
        patch.setattr(outbox_core.doctor.postgres, "_COUNT_BOUND", rows)
        patch.setattr(outbox_core.holds, "_HEAD_ROWS", rows)
        patch.setattr(outbox_core.console.reading, "HEAD_ROWS", rows)
        yield
