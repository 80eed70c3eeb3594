"""Parts of the console by themselves: leaderships, shared readings, values, files and origins."""

import threading
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from outbox_core.console.access import why_forged
from outbox_core.console.caching import Cached
from outbox_core.console.files import read_page_file
from outbox_core.console.messages import Request
from outbox_core.console.server import is_own_name
from outbox_core.console.timeline import leaderships
from outbox_core.console.values import iso_time, value_as_json
from outbox_core.retention.history import EventKind, HistoryEvent

AT = datetime(2026, 11, 23, tzinfo=UTC)
ACQUIRED, HANDED_OVER, FENCED = EventKind.LEADER_ACQUIRED, EventKind.LEADER_HANDED_OVER, EventKind.LEADER_FENCED


def event(seconds, kind, instance, leader, *, term=None, reason=""):
    """Return an event of a leadership."""
    return HistoryEvent(
        seconds, AT + timedelta(seconds=seconds), kind, instance, reason, UUID(int=leader), term, *[None] * 3
    )


def told(*events):
    """Return the leaderships that events tell of, in short."""
    return [
        (one.instance, one.begin and (one.begin - AT).seconds, one.to and (one.to - AT).seconds, one.end, one.reason)
        for one in leaderships(events)
    ]


def test_leaderships_follow_each_other():
    """A hand-over, a fence and a leadership that goes on."""
    assert told(
        event(1, ACQUIRED, "a", 1, term=7),
        event(5, HANDED_OVER, "a", 1),
        event(6, ACQUIRED, "b", 2, term=8),
        event(9, FENCED, "b", 2, reason="no heartbeat"),
        event(10, ACQUIRED, "a", 3, term=9),
    ) == [("a", 1, 5, "handed_over", ""), ("b", 6, 9, "fenced", "no heartbeat"), ("a", 10, None, None, "")]


def test_a_killed_leader_has_no_end_of_its_own():
    """A leadership without an end ended when the next began, nobody knows how."""
    assert told(event(1, ACQUIRED, "a", 1), event(4, ACQUIRED, "b", 2)) == [
        ("a", 1, 4, "unknown", ""),
        ("b", 4, None, None, ""),
    ]


def test_a_fence_that_is_written_late():
    """A fenced leader may write its end after its successor has begun; both are told."""
    assert told(event(1, ACQUIRED, "a", 1), event(4, ACQUIRED, "b", 2), event(6, FENCED, "a", 1, reason="late")) == [
        ("a", 1, 6, "fenced", "late"),
        ("b", 4, None, None, ""),
    ]


def test_a_leadership_from_before_the_window():
    """An end without a beginning is that of a leadership that began earlier."""
    assert told(event(3, HANDED_OVER, "a", 1), event(4, ACQUIRED, "b", 2))[0] == ("a", None, 3, "handed_over", "")


def test_a_reading_is_shared():
    """However many ask at once, one thread reads; those who cannot wait get what there is."""
    begun, go_on, reads = threading.Event(), threading.Event(), []

    def read():
        begun.set()
        assert go_on.wait(60)
        reads.append(len(reads))
        return len(reads)

    cached = Cached(read, 1000.0, "test")
    assert cached.get(0) is None
    assert begun.wait(60)
    assert cached.is_running
    go_on.set()
    values = []
    threads = [threading.Thread(target=lambda: values.append(cached.get(60).value)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1] * 5
    assert reads == [0]


def test_what_was_changed_is_read_anew():
    """A reading that began before a change does not count as fresh after it."""
    begun, go_on, values = threading.Event(), threading.Event(), iter(["old", "new"])

    def read():
        value = next(values)
        begun.set()
        assert go_on.wait(60)
        return value

    cached = Cached(read, 1000.0, "test")
    cached.get(0)
    assert begun.wait(60)
    cached.expire()
    go_on.set()
    while (reading := cached.get(60)) is None or reading.value == "old":
        pass
    assert reading.value == "new"


def test_a_defect_in_a_reading_keeps_the_last_value(caplog):
    """A failed reading is logged, and the value that was there stays."""
    answers = iter([1, ZeroDivisionError()])

    def read():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cached = Cached(read, 1000.0, "the test's reading")
    assert cached.get(60).value == 1
    cached.expire()
    assert cached.get(60).value == 1
    assert "the test's reading failed" in caplog.text


@pytest.mark.parametrize(
    ("content", "size", "kind", "text"),
    [
        (b'{"a":1}', None, "json", '{"a":1}'),
        (b'{"a":1}', 99, "text", '{"a":1}'),
        (b"[1e999999, 00]", None, "text", "[1e999999, 00]"),
        ("ü".encode()[:1], 2, "text", ""),
        ("ü".encode()[:1], None, "binary", None),
        (b"a\0", None, "binary", None),
        (b"[" * 100_000, None, "text", "[" * 100_000),
        (b"9" * 10_000, None, "json", "9" * 10_000),
    ],
)
def test_values(content, size, kind, text):
    """A value is JSON, text or neither, and a cut one is never JSON."""
    shown = value_as_json(content, size)
    assert (shown["kind"], shown["text"]) == (kind, text)
    assert (shown["base64"] is None) == (kind != "binary")


def test_times():
    """PostgreSQL's times are told in ISO 8601; those that Python has no word for as they are."""
    assert iso_time("2026-11-23 06:00:00.5+00") == "2026-11-23T06:00:00.500000+00:00"
    assert iso_time("infinity") == "infinity"


@pytest.mark.parametrize(
    "path", ["", "../console.py", "a/../../login.py", "/etc/passwd", "..", "x.py", ".x", "a\\b.js"]
)
def test_files_are_those_of_the_page(path):
    """Nothing but the page's own files is served."""
    assert read_page_file(path) is None


def test_the_page_is_there():
    """The page has no inline scripts or styles, and asks no other origin: its policy would refuse them."""
    page = read_page_file("index.html")
    assert page.content_type.startswith("text/html")
    text = page.content.decode()
    assert "style=" not in text
    assert "<style" not in text
    assert "://" not in text.replace("http://www.w3.org", "")


ORIGINS = (
    ("https://ops.example", "ops.example", True),
    ("https://ops.example", "ops.example:443", True),
    ("http://ops.example:80", "ops.example", True),
    ("https://ops.example:444", "ops.example", False),
    ("https://ops.example.evil", "ops.example", False),
    ("https://evil@ops.example", "ops.example", True),
    ("null", "ops.example", False),
    ("https://[::1", "ops.example", False),
    ("https://ops.example:x", "ops.example", False),
    ("", "", False),
)


@pytest.mark.parametrize(("origin", "host", "is_own"), ORIGINS)
def test_origins(origin, host, is_own):
    """An origin is the console's own if host and port are."""
    token = "t" * 32
    headers = {"origin": origin, "host": host, "cookie": f"outbox_console_csrf={token}", "x-outbox-console": token}
    why = why_forged(Request(method="POST", path="/", headers=headers))
    assert (why == "") == is_own


def test_names_of_this_machine():
    """Only names that no DNS can give away are the machine's own."""
    assert all(map(is_own_name, ("localhost", "localhost:80", "127.0.0.1:8088", "[::1]:1", "LocalHost")))
    foreign = (
        "",
        "localhost.evil",
        "127.0.0.2",
        "[::1",
        "evil:127.0.0.1",
        "localhost:1@evil",
        "[::1].evil",
        "localhost:x",
    )
    assert not any(map(is_own_name, foreign))
