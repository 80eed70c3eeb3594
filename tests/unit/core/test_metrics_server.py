"""The metrics port with slow, rude and numerous clients."""

import http.client
import json
import logging
import resource
import select
import socket
import threading
import time
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from outbox_core import http_server
from outbox_core.metrics import HarvestMetrics, Health, MetricsServer
from tests.resources import held, settles

WELL = Health(ok=True, leader=True, detail="leading")


@pytest.fixture
def server():
    """Yield a server that is well."""
    with MetricsServer("127.0.0.1", 0, HarvestMetrics(outbox_name="o").registry, lambda: WELL) as server:
        yield server


@pytest.fixture
def connect(server):
    """Yield a factory for connections to the server, closed at the end."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))


def health_of(server):
    """Return status and text of /healthz."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())["status"]
    connection.close()
    return found


def is_closed(client):
    """Tell whether the server has closed the connection."""
    readable, _, _ = select.select([client], [], [], 0)
    try:
        return bool(readable) and client.recv(1) == b""
    except ConnectionError:
        return True


def exchange(client, request):
    """Send a request; return head and body of the answer."""
    client.sendall(request)
    received = b""
    while part := client.recv(65536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode(), body


def test_slow_clients_do_not_keep_health_from_answering(server, connect):
    """With five hundred slow clients health answers, and threads and descriptors stay few."""
    before = held()
    clients = []
    for number in range(500):
        client = connect()
        client.sendall(b"G")
        clients.append(client)
        if number % 50 == 49:
            assert health_of(server) == (200, "ok")
    now = settles(before.threads, before.descriptors + 500 + http_server.MOST_CONNECTIONS)
    assert now.threads <= before.threads
    assert now.descriptors <= before.descriptors + 500 + http_server.MOST_CONNECTIONS
    assert sum(not is_closed(client) for client in clients) <= http_server.MOST_CONNECTIONS


def test_request_has_a_deadline_as_a_whole(connect, monkeypatch):
    """A client that sends a byte now and then does not keep its connection for ever."""
    monkeypatch.setattr(http_server, "_REQUEST_SECONDS", 0.5)
    client = connect()
    began = time.monotonic()
    while not is_closed(client):
        assert time.monotonic() - began < 5
        try:
            client.sendall(b"G")
        except ConnectionError:
            break
        time.sleep(0.05)
    assert time.monotonic() - began >= 0.4


def test_answer_that_is_not_read_has_a_deadline_too(monkeypatch):
    """A client that never reads the answer is dropped like one that never finishes its request."""
    monkeypatch.setattr(http_server, "_REQUEST_SECONDS", 0.5)
    answer = http_server.Answer(200, "OK", [("Content-Type", "text/plain")], b"x" * 50_000_000)
    before = held()
    with http_server.HttpServer("127.0.0.1", 0, lambda _: answer, "test-http") as server:
        client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        # Our own end, the server's end of it, and the server's other descriptors.
        settles(before.threads + 1, before.descriptors + 10)
        deadline = time.monotonic() + 5
        while server.connections:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.close()


def test_nothing_reaches_stderr(server, connect, capfd, caplog):
    """Resets, garbage and silence write nothing to stderr, and at most debug lines to the log."""
    caplog.set_level(logging.DEBUG)
    for request in (b"", b"\x16\x03\x01\x02\x00\x01garbage\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET\r\n\r\n"):
        client = connect()
        client.sendall(request)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets
        client.close()
    assert health_of(server) == (200, "ok")
    assert capfd.readouterr().err == ""
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_what_an_answer_tells(connect):
    """HEAD gives the same head without a body; no answer names the server or its version."""
    got, body = exchange(connect(), b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    head, nothing = exchange(connect(), b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got == head
    assert nothing == b""
    assert body
    assert f"Content-Length: {len(body)}" in got
    assert got.startswith("HTTP/1.1 200 OK\r\n")
    assert "server" not in got.lower()
    assert "python" not in got.lower()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\n\r\n", 400),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"DELETE /metrics HTTP/1.0\r\n\r\n", 405),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET http://there/healthz?x=1 HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics?name[]=outbox_leader HTTP/1.0\nAccept: */*\n\n", 200),
    ],
)
def test_requests(connect, request_, status):
    """A wrong request is answered with its error code, a valid one with 200."""
    head, _ = exchange(connect(), request_)
    assert head.split()[1] == str(status)


def test_request_may_come_in_pieces(connect):
    """A request may come in any pieces."""
    client = connect()
    for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r":
        client.sendall(bytes([byte]))
    assert exchange(client, b"\n")[0].startswith("HTTP/1.1 200")


def test_metrics_are_compressed_for_who_asks(connect):
    """Metrics are compressed for clients that accept it, as Prometheus does."""
    head, body = exchange(connect(), b"GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
    assert "Content-Encoding: gzip" in head
    assert body.startswith(b"\x1f\x8b")


def test_few_descriptors_left(server):
    """Without a descriptor for another connection the server does not spin, and answers as soon as there is one."""
    clients = [socket.socket() for _ in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(client.fileno() for client in clients) + 1, limits[1]))
    try:
        used = time.process_time()
        for client in clients:
            client.connect(("127.0.0.1", server.port))
        time.sleep(0.5)
        assert time.process_time() - used < 0.25
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for client in clients:
            client.close()
    assert health_of(server) == (200, "ok")


def test_health_that_fails_to_answer_ends_nothing():
    """An exception behind a page is answered with 500, and ends neither thread nor server."""

    def broken(_):
        raise RuntimeError("no")

    with http_server.HttpServer("127.0.0.1", 0, broken, "test-http") as server:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
                assert exchange(client, b"GET / HTTP/1.1\r\n\r\n")[0].startswith("HTTP/1.1 500")


def test_close_drops_who_waits():
    """Closing drops waiting clients at once."""
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: WELL)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"GET /he")
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 2
        assert is_closed(client)
    assert not [thread for thread in threading.enumerate() if thread.name == "outbox-metrics"]
