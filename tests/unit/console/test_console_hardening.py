"""Troubles of a console: threads that cannot be had, names that no file system takes, origins that are none."""

import threading

import pytest

from outbox_core.console.access import checked_origins
from outbox_core.console.caching import Cached
from outbox_core.console.console import Console
from outbox_core.console.dead_letters import _time
from outbox_core.console.files import read_page_file
from outbox_core.console.messages import Request
from outbox_core.console.server import ConsoleServer
from outbox_core.errors import InvalidConfig


@pytest.mark.parametrize("path", ["a" * 300 + ".js", "a/" * 3000 + "a.js"])
def test_names_that_no_file_system_takes(path):
    """An address that is too long for a file is one of no file, not a defect."""
    assert read_page_file(path) is None


def refuse_threads(patch):
    """Let no thread be had, as where a limit of processes is reached."""

    def start(_):
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)


def test_a_reading_without_a_thread_is_tried_again(monkeypatch):
    """A request fails when no thread can be had, and a later one reads."""
    cached = Cached(lambda: 7, 1000.0, "test")
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(RuntimeError):
            cached.get(0)
    assert cached.get(60).value == 7


def test_a_request_without_a_thread_keeps_no_place(monkeypatch):
    """The place of a request is free again when no thread can be had."""
    with ConsoleServer(object(), "127.0.0.1", 0, None) as server, monkeypatch.context() as patch:
        refuse_threads(patch)
        for _ in range(100):
            with pytest.raises(RuntimeError):
                server._server.process_request(object(), ("127.0.0.1", 1))
        assert not server._server._unfinished


@pytest.mark.parametrize(
    "origins",
    [
        "https://ops.example",
        ["https://ops.example/"],
        ["ops.example"],
        ["null"],
        [None],
        ["https://Ops.example"],
        ["*"],
    ],
)
def test_trusted_origins_that_no_browser_sends(origins):
    """An origin that could never match is refused when the console is made, not with each action."""
    with pytest.raises(InvalidConfig, match="trusted_origins"):
        checked_origins(origins)


@pytest.mark.parametrize("milliseconds", [2**60, -(2**60), 253402300800000])
def test_times_that_no_calendar_has(milliseconds):
    """A letter may say any time: one that cannot be expressed is none."""
    assert _time(milliseconds) is None


def test_trusted_origins():
    """Origins as browsers send them are taken."""
    origins = ["https://ops.example", "http://10.0.0.1:8080", "https://[::1]:1"]
    assert checked_origins(origins) == set(origins)


def test_the_redirect_stays_where_it_is():
    """Whatever the prefix is, the redirect is of one segment."""
    from outbox_core.console import User

    console = Console.__new__(Console)
    console._login = None
    for base, location in (("/ops/outbox", "outbox/"), ("/a\r\nb", "a%0D%0Ab/"), ("/x:y", "x%3Ay/"), ("/служба", None)):
        request = Request(method="GET", path="", base_path=base, user=User("alice"))
        told = dict(console.handle(request).headers)["Location"]
        assert told.isascii()
        assert location in (None, told)
