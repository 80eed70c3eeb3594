"""Foreign text, shown so that it can do nothing to a terminal or to a log."""

import io
import json
import logging
import re
from datetime import UTC, datetime
from io import StringIO

import pytest

from outbox_core.cli import doctor, hold
from outbox_core.cli.harvest import fail
from outbox_core.cli.logs import configure_logging
from outbox_core.cli.terminal import write_table
from outbox_core.config import HarvestConfig
from outbox_core.doctor import examination, kafka, postgres, status
from outbox_core.doctor.findings import CommandLine, warning
from outbox_core.holds import Hold
from outbox_core.printable import escape_log_lines, printable, printable_json

HOSTILE = "\x1b]0;owned\x07\x9b2J\u202ex\nWARNING forged\r"
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def test_printable():
    """Control characters, line breaks and marks of direction become escapes; text of every script stays."""
    assert printable("größe ☃ 中文") == "größe ☃ 中文"
    assert printable(HOSTILE) == r"\x1b]0;owned\x07\x9b2J\u202ex\nWARNING forged\r"


def test_printable_json():
    """JSON is escaped with the same care, and reads back as it was."""
    document = {"key": HOSTILE, "größe": [1, None, "\U000e0001"]}
    shown = printable_json(document)
    assert shown.isprintable()
    assert "größe" in shown
    assert json.loads(shown) == document
    with pytest.raises(ValueError, match="JSON"):
        printable_json(float("inf"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_on_any_terminal(monkeypatch, encoding):
    """The output is JSON, whatever encoding stdout has."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", stdout)
    document = {"key": "größe 中文 \U0001f600"}
    stdout.write(printable_json(document))
    stdout.flush()
    assert json.loads(stdout.buffer.getvalue()) == document


@pytest.fixture
def logger():
    """Return a logger of ours, below that of its package."""
    logger = logging.getLogger("outbox_core.harvest.test_printable")
    escape_log_lines("outbox_core")
    escape_log_lines("outbox_core")
    assert len(logger.filters) == 1
    return logger


@pytest.mark.parametrize("argument", [HOSTILE, ValueError(HOSTILE), [HOSTILE]], ids=["text", "error", "list"])
def test_log_lines(logger, caplog, argument):
    """A log line stays one line with any arguments; numbers are formatted as numbers."""
    logger.warning("records of %s wait for %.1f s, %d", argument, 1.25, 3)
    logger.warning("records of " + str(argument))  # noqa: G003  as some lines are made before they are logged
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "forged" in record.getMessage()
    assert "wait for 1.2 s, 3" in caplog.text


def test_tracebacks_keep_their_lines(logger, caplog):
    """The line is escaped, and the traceback behind it keeps its own lines."""
    try:
        int(HOSTILE)
    except ValueError:
        logger.exception("ended by %s", HOSTILE)
    assert "\n  File " in caplog.text


def test_log_of_commands(capsys):
    """The commands' log escapes the lines of every logger, librdkafka's included."""
    before = logging.root.handlers[:]
    configure_logging(logging.INFO)
    logging.getLogger("some.library").warning("topic %s", HOSTILE)
    logging.root.handlers[:] = before
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert not _UNPRINTABLE.search(told)


@pytest.fixture
def config(monkeypatch):
    """Return settings, with examinations that find hostile names."""
    held = postgres.Held(1, 0, [HOSTILE])
    topic = postgres.TopicAtHead(
        HOSTILE, 1, 1, 0, has_keyless=False, oldest_deliverable_seconds=1.0, oldest_held_seconds=None
    )
    backlog = status.Backlog(1, False, None, 1.0, None, 0, (topic,), held)
    group = status.KafkaStatus(HOSTILE, (kafka.Contender(HOSTILE, HOSTILE, leads=True),))
    halves = status.DatabaseStatus(HOSTILE, backlog), group
    monkeypatch.setattr(status, "read_halves", lambda *_, **__: iter(halves))
    monkeypatch.setattr(examination, "examine", lambda *_, **__: iter([warning("topic", HOSTILE, HOSTILE)]))
    return HarvestConfig()


@pytest.mark.parametrize("command", ["status", "doctor"])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_status_and_doctor(config, command, as_json):
    """Names of topics, groups and clients reach the terminal escaped, in text and in JSON."""
    out = StringIO()
    options = {"json": as_json, "timeout": 1.0, "watch": None}
    if command == "status":
        doctor.run_status(config, out, options)
    else:
        doctor.run_doctor(config, out, options, CommandLine())
    assert "forged" in out.getvalue()
    assert not _UNPRINTABLE.search(out.getvalue())
    assert not [line for line in out.getvalue().splitlines() if line.startswith("WARNING")]
    if as_json:
        json.loads(out.getvalue())


def test_errors_of_commands(capsys):
    """An error of a command is one line, with hostile names escaped."""
    fail(f"topic {HOSTILE} is no topic")
    assert capsys.readouterr().err.rstrip("\n").isprintable()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_holds(as_json):
    """Holds are listed with their names escaped."""
    held = Hold(1, HOSTILE, HOSTILE, 1, HOSTILE, HOSTILE, dead_letter=False, create_time=datetime.now(UTC))
    out = StringIO()
    write_table(out, hold._TITLES, [hold._as_row(held, 3)])
    shown = hold._as_json(held, 3) if as_json else out.getvalue().rstrip("\n")
    assert printable(shown.replace("\t", "")) == shown.replace("\t", "")
