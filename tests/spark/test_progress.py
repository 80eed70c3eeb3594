"""Lines of progress on a terminal and in a log."""

import io
import logging

import pytest

from outbox_spark.cli import progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Return a terminal of 30 columns that is the process's stderr and gets its log."""
    made, root = _Terminal(), logging.getLogger()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(made)])
    monkeypatch.setattr(root, "level", logging.INFO)
    progress.use_one_line()
    yield made
    root.handlers[0].close()


def test_progress_stays_on_one_line(terminal):
    """A batch replaces the line of the one before, cut to the width; anything else has a line of its own."""
    progress.say_progress("batch 1: " + "x" * 40)
    progress.say_progress("batch 2")
    logging.getLogger("other").warning("Kafka is away")
    progress.say("done")
    assert terminal.getvalue() == f"batch 1: {'x' * 20}\r\x1b[Kbatch 2\r\x1b[KKafka is away\ndone\n"


def test_the_last_line_of_progress_ends(terminal):
    """The terminal's prompt comes in the line after."""
    progress.say_progress("batch 7")
    logging.getLogger().handlers[0].close()
    assert terminal.getvalue() == "batch 7\n"
