"""The log of a command on a stderr that nobody reads: a pipe to a log driver that blocks."""

import json
import logging
import os
import sys
import threading

import pytest

from outbox_core.cli import logs
from outbox_core.cli.logs import configure_logging

LOG = logging.getLogger("some.library")
LONG_SECONDS = 30.0


class _Pipe:
    """A pipe in place of stderr."""

    def __init__(self):
        self._reading, self._writing = os.pipe()
        self.stderr = os.fdopen(self._writing, "w", encoding="utf-8", errors="backslashreplace")

    def read(self):
        """Return what is in the pipe."""
        os.set_blocking(self._reading, False)
        found = b""
        try:
            while some := os.read(self._reading, 1 << 20):
                found += some
        except BlockingIOError:
            pass
        return found.decode()

    def close(self):
        """Close both ends."""
        os.close(self._reading)
        self.stderr.close()


@pytest.fixture
def pipe():
    """A pipe that can take the log of a command."""
    made = _Pipe()
    yield made
    made.close()


def log_into(pipe, patience, monkeypatch):
    """Log to a pipe as stderr, as JSON. Called within a test, as pytest replaces stderr and handlers before it."""
    monkeypatch.setattr(sys, "stderr", pipe.stderr)
    monkeypatch.setattr(logs, "_PATIENCE_SECONDS", patience)
    configure_logging(logging.INFO, "json")


def log(*lines):
    """Log lines on a thread, and fail if that waits for long."""
    thread = threading.Thread(target=lambda: [LOG.info("%s", line) for line in lines], daemon=True)
    thread.start()
    thread.join(LONG_SECONDS)
    assert not thread.is_alive(), "a thread waits for who reads the log"


def messages(text):
    """Return the messages of lines of the log."""
    return [json.loads(line)["message"] for line in text.splitlines()]


def test_a_log_that_nobody_reads(pipe, monkeypatch):
    """Logging holds nobody up; once the log is read again it tells how many lines are missing, and no line is torn."""
    log_into(pipe, 0.05, monkeypatch)
    told = [f"{number} " + "x" * 5000 for number in range(100)]
    log(*told)
    text = pipe.read()
    log("read again", "and on")
    *kept, dropped, again, on = messages(text + pipe.read())
    assert 1 < len(kept) < len(told)
    assert kept == told[: len(kept)]
    assert dropped.startswith(f"the log lacks {len(told) - len(kept)} lines here")
    assert [again, on] == ["read again", "and on"]


def test_a_log_that_is_read_slowly(pipe, monkeypatch):
    """A reader that is slow for a moment misses nothing."""
    log_into(pipe, LONG_SECONDS, monkeypatch)
    told, found = [f"{number} " + "x" * 5000 for number in range(100)], []
    writes = threading.Thread(target=lambda: log(*told))
    writes.start()
    while writes.is_alive():
        found.append(pipe.read())
        writes.join(0.01)
    found.append(pipe.read())
    assert messages("".join(found)) == told
