"""What others chose is shown so that it can do nothing to a terminal or to a log."""

import json
import re
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest

import outbox_core
from outbox_core.cli import doctor, hold
from outbox_core.cli.harvest import fail
from outbox_core.config import HarvestConfig
from outbox_core.examination import warning
from outbox_core.holds import Hold
from outbox_core.printable import get_logger, printable, printable_json

HOSTILE = "\x1b]0;owned\x07\x9b2J\u202ex\nWARNING forged\r"
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def test_printable():
    """Control characters, line breaks and marks of direction become escapes; text of every script stays."""
    assert printable("größe ☃ 中文") == "größe ☃ 中文"
    assert printable(HOSTILE) == r"\x1b]0;owned\x07\x9b2J\u202ex\nWARNING forged\r"


def test_printable_json():
    """JSON is shown with the same care, and reads back as it was."""
    document = {"key": HOSTILE, "größe": [1, None, "\U000e0001"]}
    shown = printable_json(document)
    assert shown.isprintable()
    assert "größe" in shown
    assert json.loads(shown) == document
    with pytest.raises(ValueError, match="JSON"):
        printable_json(float("inf"))


@pytest.mark.parametrize("argument", [HOSTILE, ValueError(HOSTILE), [HOSTILE]], ids=["text", "error", "list"])
def test_log_lines(caplog, argument):
    """A line of a log is one line, whatever its arguments say; numbers are formatted as numbers."""
    logger = get_logger("outbox_core.test_log_lines")
    get_logger(logger.name)
    assert len(logger.filters) == 1
    logger.warning("records of %s wait for %.1f s, %d", argument, 1.25, 3)
    logger.warning("records of " + str(argument))  # noqa: G003  as some lines are made before they are logged
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "forged" in record.getMessage()
    assert "wait for 1.2 s, 3" in caplog.text


def test_tracebacks_keep_their_lines(caplog):
    """What is escaped is the line, not the traceback behind it."""
    try:
        int(HOSTILE)
    except ValueError:
        get_logger("outbox_core.test_tracebacks").exception("ended by %s", HOSTILE)
    assert "\n  File " in caplog.text


def test_every_logger_of_ours_escapes():
    """No module makes a logger of its own by other means: it would log names of topics as they are."""
    packages = [Path(outbox_core.__file__).parent.parent / name for name in ("outbox_core", "outbox_queue")]
    own = re.compile(r"^\w+ = logging\.getLogger\(", re.MULTILINE)
    assert not [file for package in packages for file in package.rglob("*.py") if own.search(file.read_text())]


@pytest.fixture
def config(monkeypatch):
    """Settings, with examinations that find hostile names."""
    status = {
        "outbox": "shop.public.outbox",
        "pending": 1,
        "oldest_age_seconds": None,
        "topics": [{"topic": HOSTILE, "waiting": 1, "marked": 1}],
        "held": {"records": 1, "keys": 0, "topics": [HOSTILE]},
        "leader_group": HOSTILE,
        "harvesters": [{"client_id": HOSTILE, "host": HOSTILE, "leads": True}],
    }
    monkeypatch.setattr(doctor, "_status", lambda _: status)
    monkeypatch.setattr(doctor, "_findings", lambda _: [warning("topic", HOSTILE, HOSTILE)])
    return HarvestConfig()


@pytest.mark.parametrize("show", [doctor.print_status, doctor.print_findings])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_status_and_doctor(config, show, as_json):
    """Names of topics, groups and clients reach the terminal escaped, in text and in JSON."""
    out = StringIO()
    show(config, out, as_json=as_json)
    assert "forged" in out.getvalue()
    assert not _UNPRINTABLE.search(out.getvalue())
    assert not [line for line in out.getvalue().splitlines() if line.startswith("WARNING")]
    if as_json:
        json.loads(out.getvalue())


def test_errors_of_commands(capsys):
    """An error is one line, too."""
    fail(f"topic {HOSTILE} is no topic")
    assert capsys.readouterr().err.rstrip("\n").isprintable()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_holds(as_json):
    """What is held is listed with its names escaped."""
    held = Hold(1, HOSTILE, HOSTILE, 1, HOSTILE, HOSTILE, dead_letter=False, create_time=datetime.now(UTC))
    shown = (hold._as_json if as_json else hold._as_line)(held)
    assert printable(shown.replace("\t", "")) == shown.replace("\t", "")
