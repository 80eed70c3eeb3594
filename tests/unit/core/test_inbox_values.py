"""The inbox without a database: its names and DDL, ages on the command line, the text of ids."""

import subprocess
import sys
from datetime import timedelta
from enum import IntEnum, StrEnum

import pytest

from outbox_core.cli import main
from outbox_core.cli.inbox import parse_age
from outbox_core.errors import InvalidMessageId
from outbox_core.inbox import Inbox, inbox_key
from outbox_core.schema import (
    TableName,
    create_history_sql,
    create_hold_sql,
    create_inbox_sql,
    create_table_sql,
    inbox_beside,
    inbox_index,
)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], TableName("inbox")),
        (["billing.inbox"], TableName("inbox", "billing")),
        (['"My Inbox"'], TableName("My Inbox")),
    ],
)
def test_schema_prints_the_inbox(arguments, name, capsys):
    """`outbox schema --inbox` prints the inbox's DDL, under its name, and nothing else."""
    assert main(["schema", "--inbox", *arguments]) == 0
    assert capsys.readouterr().out == create_inbox_sql(name)


def test_schema_without_inbox_is_what_it_was(capsys):
    """Without `--inbox` no inbox is printed; `--inbox` together with `--table`, or with a wrong name, is refused."""
    assert main(["schema"]) == 0
    name = TableName("outbox")
    assert capsys.readouterr().out == create_table_sql(name) + create_hold_sql(name) + create_history_sql(name)
    with pytest.raises(SystemExit):
        main(["schema", "--table", "mine", "--inbox"])
    assert main(["schema", "--inbox", "a b"]) == 2
    assert "--inbox: 'a b' is not a table name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "index"),
    [
        ("inbox", "inbox_accept_time_idx"),
        ("x" * 63, "x" * 47 + "_accept_time_idx"),
        ("é" * 31, "é" * 23 + "_accept_time_idx"),
    ],
)
def test_the_index_has_a_legal_name(table, index):
    """The index's name fits for any length of the table's, and is never cut within a character."""
    assert inbox_index(TableName(table, "billing")) == index
    assert len(index.encode()) <= 63


@pytest.mark.parametrize(
    ("outbox", "inbox"),
    [
        ("outbox", "inbox"),
        ("payments_outbox", "payments_inbox"),
        ("outbox_2", "inbox_2"),
        ("outbox_of_outbox", "outbox_of_inbox"),
        ("mailbox", "mailbox_inbox"),
    ],
)
def test_the_inbox_beside_an_outbox(outbox, inbox):
    """Each outbox has an inbox of its own, named after it, in the same schema."""
    assert inbox_beside(TableName(outbox, "billing")) == TableName(inbox, "billing")


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("7d", timedelta(days=7)),
        ("12h", timedelta(hours=12)),
        ("90m", timedelta(minutes=90)),
        ("45s", timedelta(seconds=45)),
        ("1d12h30m", timedelta(days=1, hours=12, minutes=30)),
    ],
)
def test_ages(text, age):
    """An age is written in days, hours, minutes and seconds."""
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "7", "d", "7 d", "-7d", "7w", "1.5d", "7dd", "0d", "40000d", "٣d"])
def test_what_is_no_age(text):
    """Text that is no age, an age of zero and one of 40,000 days are refused."""
    with pytest.raises(ValueError, match="is not an age"):
        parse_age(text)


@pytest.mark.parametrize("batch", ["0", "-1", "many", "²"])
def test_what_is_no_batch(batch, capsys):
    """A batch that is not a positive number is refused."""
    with pytest.raises(SystemExit):
        main(["inbox", "prune", "--older-than", "7d", "--batch", batch])
    assert "is not a positive number" in capsys.readouterr().err


def test_enums_are_their_values():
    """A member of an enum of numbers or texts becomes the plain text of its value."""
    kinds = inbox_key(StrEnum("Api", {"ORDERS": "orders"}).ORDERS, IntEnum("Number", {"SEVEN": 7}).SEVEN)
    assert kinds == ("orders", "7")
    assert {type(text) for text in kinds} == {str}


def test_a_number_too_long_to_print():
    """A number that Python will not print is refused like any other id that is too long."""
    with pytest.raises(InvalidMessageId, match="message_id: "):
        inbox_key("api", 10**5000)


def test_a_name_shows():
    """The repr of an inbox shows its table."""
    assert repr(Inbox("billing.inbox")) == "Inbox('billing.inbox')"


def test_accepting_needs_nothing_else():
    """Importing the inbox imports no driver, framework or Kafka client, and its command not even a site-package."""
    program = (
        "import sys; sys.path.insert(0, '.'); from outbox_core import Inbox; from outbox_core.cli import main;"
        "sys.exit(main(['schema', '--inbox']))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, create_inbox_sql(TableName("inbox"))), done.stderr
