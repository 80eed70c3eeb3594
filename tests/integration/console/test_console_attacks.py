"""Attacks on the console by people, programs and their races."""

import json
import logging
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka import Producer
from psycopg.conninfo import make_conninfo

import outbox_core.console.reading
import outbox_core.console.server
import outbox_core.console.values
from outbox_core.console import Console, Permission, User
from outbox_core.console.access import EVERYTHING
from outbox_core.console.server import ConsoleServer
from outbox_core.doctor.session import DatabaseSession
from outbox_core.record import OutboxRecord
from tests.integration.console.console_fixtures import Browser, asking, browser, console, scene, small_bounds

__all__ = ["browser", "console", "scene"]


@pytest.fixture
def held(scene):
    """Hold records 1 and 2 of four."""
    scene.fill("orders", 4, keys=4)
    for record in (1, 2):
        scene.hold("add_record", record, reason="too large")


@pytest.mark.parametrize("action", ["release", "skip", "dead-letter"])
@pytest.mark.usefixtures("held")
def test_what_came_after_the_dry_run_is_left_alone(scene, browser, action):
    """An action for more than was agreed to changes nothing, and says so; nothing of it is in the history."""
    select = {"matching": {"topic": "orders"}}
    count = browser.act(action, {"select": select, "dry_run": True})[1]["count"]
    scene.hold("add_record", 3, reason="too large")
    body = {"reason": "r", "select": select, "at_most": count}
    status, document = browser.act(action, body)
    assert (status, document["error"]["code"], document["error"]["where"]) == (409, "more_by_now", "body.at_most")
    assert [hold.record_id for hold in scene.held() if not hold.dead_letter] == [1, 2, 3]
    assert len(scene.rows()) == 4
    assert {event["kind"] for event in browser.data("events")["events"]} == {"held"}
    assert browser.act(action, {**body, "at_most": 3})[1]["count"] == 3


@pytest.mark.parametrize("member", ["topic", "key", "cause_pattern"])
@pytest.mark.usefixtures("held")
def test_null_is_not_everything(scene, browser, member):
    """A program that does not know its topic must not skip all topics."""
    matching = {"topic": "orders", member: None}
    status, document = browser.act("skip", {"reason": "r", "select": {"matching": matching}})
    assert (status, document["error"]["where"]) == (400, f"body.select.matching.{member}")
    assert len(scene.rows()) == 4


@pytest.mark.usefixtures("held")
def test_who_may_not_view_may_not_act(console):
    """Answers to actions tell topics and numbers: they are for those who may view."""
    for permission in (Permission.OPERATE, Permission.RESTASH):
        blind = Browser(asking(console, User("eve", {permission})))
        for action in ("pause", "restash"):
            body = {"topic": "x", "dry_run": True}
            assert blind.act(action, body)[1]["error"]["code"] == "no_permission"


@pytest.mark.usefixtures("held")
def test_actions_are_logged(scene, browser, caplog):
    """Without a history, too, there is a line for each action, which nobody can break into two."""
    scene.execute("DROP TABLE outbox_event")
    with caplog.at_level(logging.INFO, "outbox_core.console"):
        browser.act("skip", {"select": {"records": ["1"]}, "dry_run": True})
        browser.done("skip", select={"records": ["1"]}, reason="one\ntwo")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("outbox_core.console")]
    assert lines == ["console of shop: skip: deleted 1 record for good (one\\ntwo), by alice"]


def test_a_search_leaves_out_no_record(scene, browser, monkeypatch):
    """Deletes by the harvester while a search is answered do not have the next page begin behind a match."""
    scene.fill("orders", 6)
    scene.stash(OutboxRecord("refunds", None, b"v"))
    scene.fill("orders", 3)
    found = outbox_core.console.reading.peek

    def peek(session, query):
        page = found(session, query)
        if query.after is None:
            scene.execute("DELETE FROM outbox WHERE id <= 4")
        return page

    monkeypatch.setattr(outbox_core.console.reading, "peek", peek)
    with small_bounds(monkeypatch, 4):
        first = browser.data("records", "topic=refunds")
        assert first["records"] == []
        second = browser.data("records", f"topic=refunds&after={first['next_after']}")
    assert [record["topic"] for record in second["records"]] == ["refunds"]


def test_records_that_two_holds_keep_count_once(scene, browser):
    """Held records of one key keep the same followers: the cause says how many records wait, not how many times."""
    scene.fill("orders", 5, keys=1)
    scene.fill("refunds", 2, keys=2)
    for record in (2, 1, 6, 7):
        scene.hold("add_record", record, reason="too large")
    causes = {one["topic"]: (one["holds"], one["waiting"]) for one in browser.data("holds")["causes"]}
    assert causes == {"orders": (2, 5), "refunds": (2, 2)}


def test_sessions_notice_a_server_that_has_vanished(scene):
    """Nobody waits two hours for a database whose machine is gone; what the data source says itself is kept."""
    for own, told in (({}, "10000"), ({"tcp_user_timeout": "7000"}, "7000")):
        source = make_conninfo(scene.database, **own)
        with DatabaseSession(source, "outbox", application_name="test") as session:
            parameters = session.connection.info.get_parameters()
        assert (parameters["tcp_user_timeout"], parameters["keepalives_idle"]) == (told, "5")


def test_records_of_many_headers(scene, browser, monkeypatch):
    """Of each the first headers are listed, cut, with their number, and as many records as one answer may have."""
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values) SELECT 't', "
        "repeat('k', 20000), ARRAY['n' || repeat('n', 900)] || array_fill('a'::text, ARRAY[5000]), "
        "ARRAY[convert_to(repeat('v', 900), 'UTF8')] || array_fill(''::bytea, ARRAY[5000]) FROM generate_series(1, 20)"
    )
    document = browser.data("records", "limit=50")
    assert len(document["records"]) == 20
    first = document["records"][0]
    assert (len(first["headers"]), first["header_count"]) == (20, 5001)
    assert (len(first["headers"][0][0]), first["headers"][0][1]["size_bytes"]) == (400, 900)
    assert first["headers"][0][1]["is_cut"]
    assert len(json.dumps(document)) < 600_000
    whole = browser.data(f"records/{first['id']}")
    assert (len(whole["headers"]), whole["header_count"]) == (1000, 5001)

    monkeypatch.setattr(outbox_core.console.values, "_ANSWER_BYTES", 150_000)
    seen, after = [], ""
    while True:
        page = browser.data("records", f"limit=10{after}")
        assert len(page["records"]) <= 6
        seen += [int(one["id"]) for one in page["records"]]
        if page["is_end"]:
            break
        after = f"&after={page['next_after']}"
    assert seen == [row.id for row in scene.rows()]


RESTASH = {"letter": {"partition": 0, "offset": "0"}, "record": {"topic": "orders", "value": None}}


def test_a_restash_without_kafka(scene, browser):
    """A letter that cannot be read is no lack of rights: the action is to be repeated, and has changed nothing."""
    status, document = browser.act("restash", {**RESTASH, "reason": "r"})
    assert (status, document["error"]["code"]) == (503, "unavailable")
    assert "nothing was changed" in document["error"]["message"]
    assert scene.rows() == []


def test_letters_that_were_not_written_by_a_harvester(scene, kafka_bootstrap, make_topic):
    """One letter with a partition that there is not does not hide the others."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(topic, b"v" * 1000, headers=[("outbox-original-partition", "9" * 5000)])
    producer.produce(topic, b"v")
    assert producer.flush(60) == 0
    config = scene.config(base_kafka_config={"bootstrap.servers": kafka_bootstrap}, dead_letter_topic=topic)
    browser = Browser(asking(Console({"shop": config}), User("alice", EVERYTHING)))
    last, first = browser.data("dead-letters")["letters"]
    assert (last["offset"], first["original_partition"]) == ("1", None)
    assert (first["size_bytes"], first["value"]["is_cut"], len(first["value"]["text"])) == (1000, True, 400)


@contextmanager
def listening(console):
    """Serve a console; yield its port."""
    with ConsoleServer(console, "127.0.0.1", 0, User("alice")) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server.port
        finally:
            server.stop()
            thread.join()


@pytest.mark.parametrize(
    "half",
    [
        b"GET /api/session HTT",
        b"POST /api/login HTTP/1.0\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
        b"POST /api/outboxes/shop/actions/skip HTTP/1.0\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n{",
    ],
    ids=["head", "login", "body"],
)
def test_idle_clients_keep_nobody_out(console, half):
    """However many connect and send half a request, who sends a whole one is answered."""
    with listening(console) as port, ExitStack() as idle:
        for turn in range(5):
            for _ in range(40):
                client = idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                client.sendall(half)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(b"GET /api/session HTTP/1.0\r\nHost: localhost\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.0 200"), turn


@pytest.mark.parametrize(("path", "limit"), [("login", "_HEAD_SECONDS"), ("logout", "_REQUEST_SECONDS")])
def test_a_byte_now_and_then_is_no_request(console, monkeypatch, path, limit):
    """A client that never comes to the end of its request is cut off, however busy it looks."""
    for name in ("_HEAD_SECONDS", "_REQUEST_SECONDS"):
        monkeypatch.setattr(outbox_core.console.server, name, 0.5 if name == limit else 3600)
    with listening(console) as port, socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
        client.sendall(b"POST /api/%s HTTP/1.0\r\nHost: localhost\r\n" % path.encode())
        client.sendall(b"Content-Length: 1000000\r\n\r\n")
        give_up_at = time.monotonic() + 60
        answer = b""
        while time.monotonic() < give_up_at and not answer:
            try:
                client.sendall(b" ")
                answer = client.recv(100)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.0 4")


def test_bodies_without_a_length(console):
    """A body whose length is not told is refused as that, not as an empty one."""
    with listening(console) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(
            b"POST /api/login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.0 411")
