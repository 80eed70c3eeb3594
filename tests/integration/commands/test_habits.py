"""Habits of the commands: `outbox schema --apply`, `outbox peek`, `outbox hold` with care, settings from a file."""

import json
from io import StringIO

import psycopg
import pytest
from django.core.management import call_command
from django.db import transaction

import outbox_django
from outbox_core import OutboxRecord
from outbox_core.cli import hold, main
from outbox_core.schema import CHECKS, TableName, create_hold_sql, create_table_sql, drop_checks_sql
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.services import as_role

__all__ = ["django_db_modify_db_settings"]

RECORD = (
    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
    "VALUES (%s, %s, %s, %s, %s)"
)


@pytest.fixture
def connection(database, monkeypatch):
    """A connection to an empty database, which the environment names to the commands."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", database)
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def outbox(connection):
    """The connection, with an outbox of three records."""
    connection.execute(create_table_sql(TableName("outbox")))
    connection.execute(create_hold_sql(TableName("outbox")))
    connection.execute(RECORD, ("orders", "4711", '{"größe": 1}'.encode(), ["trace"], [b"\xff"]))
    connection.execute(RECORD, ("orders", "4711", b"\xff\x00", [], []))
    connection.execute(RECORD, ("emails", None, None, [], []))
    return connection


@pytest.fixture
def run(capsys):
    """Return a function that runs a command and returns its exit code, output and errors."""

    def run(*arguments):
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# -- schema ------------------------------------------------------------------------------------------------------------


def test_apply_makes_what_is_missing(connection, run):
    """`schema --apply` makes the tables, says so, does nothing the second time, and mends an older outbox."""
    code, told, error = run("schema", "--apply")
    assert (code, error) == (0, "")
    assert told.splitlines() == [
        "made      table public.outbox, binary layout",
        "made      table public.outbox_hold",
        "made      tables public.outbox_statistics and public.outbox_event",
    ]
    connection.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
    code, told, _ = run("schema", "--apply", "--notify")
    assert code == 0
    assert [line.split()[0] for line in told.splitlines()] == ["is", "is", "is", "is", "made"]
    connection.execute(drop_checks_sql(TableName("outbox")))
    connection.execute("DROP TABLE outbox_hold, outbox_statistics, outbox_event")
    assert run("schema", "--version")[1].splitlines() == [
        "0001  table public.outbox, binary layout",
        "0003  no table public.outbox_hold",
        f"0004  lacks {', '.join(sorted(CHECKS))}",
        "0005  no table public.outbox_statistics and public.outbox_event",
        "-     trigger for notify",
    ]
    assert "made      CHECK constraints" in run("schema", "--apply")[1]
    assert run("schema", "--version")[1].splitlines()[1:3] == [
        "0003  table public.outbox_hold",
        "0004  CHECK constraints, not validated",
    ]
    assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (1,)


def test_apply_in_another_schema_and_layout(connection, run, tmp_path):
    """The file of `outbox harvest` names the outbox; goharvest's layout keeps its own constraints."""
    connection.execute("CREATE SCHEMA billing")
    path = tmp_path / "outbox.yaml"
    path.write_text("harvest: {outboxTable: billing.outbox}\n")
    assert "table billing.outbox, text layout" in run("schema", "--apply", "--layout", "text", "-f", str(path))[1]
    assert run("schema", "--apply", "-f", str(path))[1].count("is there") == 4
    assert connection.execute("SELECT to_regclass('public.outbox')").fetchone() == (None,)


def test_apply_changes_no_table_of_another_kind(connection, run):
    """A table of that name that is no outbox is an error, and nothing is made."""
    connection.execute("CREATE TABLE outbox (id bigint)")
    code, told, error = run("schema", "--apply")
    assert (code, told) == (2, "")
    assert "table public.outbox is no outbox" in error
    assert connection.execute("SELECT to_regclass('outbox_hold')").fetchone() == (None,)
    code, _, error = run("schema", "--apply", "--only", "checks", "--table", "other")
    assert code == 2
    assert "there is no table public.other" in error


# -- peek --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("outbox")
def test_a_missing_right_names_the_role_once(database, connection, run):
    """The line about a missing right names the role once, although the DSN names it, too."""
    connection.execute("CREATE ROLE reader_of_none LOGIN")
    try:
        code, _, error = run("peek", "--dsn", as_role(database, "reader_of_none"))
        assert (code, error.count("reader_of_none")) == (2, 1)
    finally:
        connection.execute("DROP ROLE reader_of_none")


@pytest.mark.usefixtures("outbox")
def test_a_wrong_limit_is_named_as_it_was_typed(run):
    """`peek --limit 0` complains about `--limit`."""
    code, _, error = run("peek", "--limit", "0")
    assert (code, error) == (2, "outbox: error: --limit: must be a number from 1 to 1000\n")


@pytest.mark.usefixtures("outbox")
def test_peek(run):
    """`peek` shows pending records by topic, key, header and id, with the hold that keeps each."""
    assert main(["hold", "add", "--record", "1", "--reason", "why"]) == 0
    lines = [line.split("\t") for line in run("peek")[1].splitlines()]
    assert [(line[0], line[1], line[2], line[4], line[5]) for line in lines] == [
        ("1", "orders", "4711", "why", "14"),
        ("2", "orders", "4711", "why", "2"),
        ("3", "emails", "-", "-", "tombstone"),
    ]
    assert lines[0][6] == '{"größe": 1}'
    assert len(run("peek", "--topic", "emails")[1].splitlines()) == 1
    assert len(run("peek", "--topic", "orders", "--key", "4711", "--header", "trace")[1].splitlines()) == 1
    assert len(run("peek", "--after", "1", "--limit", "1")[1].splitlines()) == 1
    one, two, three = (json.loads(line) for line in run("peek", "--json")[1].splitlines())
    assert (one["value"], one["headers"], one["hold_reason"]) == (
        '{"größe": 1}',
        [["trace", {"base64": "/w=="}]],
        "why",
    )
    assert (two["value"], three["value"]) == ({"base64": "/wA="}, None)
    whole = run("peek", "--id", "1")[1]
    assert 'value         {"größe": 1}' in whole
    code, _, error = run("peek", "--id", "99")
    assert code == 2
    assert "there is no record 99" in error


def test_peek_without_holds_and_in_the_text_layout(connection, run):
    """`peek` needs no table of holds, and shows goharvest's text values as they are."""
    connection.execute(create_table_sql(TableName("outbox"), "text"))
    connection.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, "
        "kafka_header_values) VALUES (now(), 't', 'k', 'größe', '{h}', '{v}')"
    )
    (record,) = map(json.loads, run("peek", "--json")[1].splitlines())
    assert (record["value"], record["headers"], record["partition"]) == ("größe", [["h", "v"]], None)


@pytest.mark.django_db(transaction=True)
def test_peek_in_django():
    """`manage.py outbox_peek` looks into the database of the settings."""
    with transaction.atomic():
        outbox_django.stash(OutboxRecord("orders", "k", b"v"))
    out = StringIO()
    call_command("outbox_peek", "--json", stdout=out)
    assert json.loads(out.getvalue())["value"] == "v"


# -- hold --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("outbox")
def test_doubtful_pauses(run):
    """A topic or key for which no record waits is held, with a note that may show a typing error."""
    code, told, note = run("hold", "add", "--topic", "ordrs")
    assert (code, told) == (0, "topic ordrs is held\n")
    assert "none of the oldest 10,000 records is for topic ordrs" in note
    assert "did you mean orders?" in note
    assert "has key 4712 of orders" in run("hold", "add", "--topic", "orders", "--key", "4712")[2]
    assert run("hold", "add", "--topic", "orders", "--key", "4711")[2] == ""
    code, _, error = run("hold", "add", "--topic", "bad topic!")
    assert code == 2
    assert "is not a topic name" in error
    assert run("hold", "add", "--topic", "emails", "--dry-run")[1] == "topic emails would be held\n"
    assert "emails" not in run("hold", "list")[1]


@pytest.mark.usefixtures("outbox")
def test_what_a_hold_keeps(run):
    """The list counts the records that each hold keeps, and releases that end nothing say what stays held."""
    main(["hold", "add", "--record", "1"])
    main(["hold", "add", "--topic", "emails"])
    assert [line.split("\t")[4] for line in run("hold", "list")[1].splitlines()] == ["1", "2"]
    code, told, note = run("hold", "release", "--topic", "orders")
    assert (code, told) == (0, "released 0 holds\n")
    assert "held of topic orders: 1 record;" in note
    for action, told in (("release", "release 1 hold"), ("skip", "skip 1 record"), ("dead-letter", "ask for 1 record")):
        held, would = run("hold", action, "--all", "--dry-run")[1].splitlines()
        assert held.split("\t")[4] == "2"
        assert would == f"would {told}"
    assert run("hold", "release", "--all")[1] == "released 1 hold\n"
    assert "held: 1 topic;" in run("hold", "release", "--all")[2]


def test_skipping_needs_a_yes(outbox, run, monkeypatch):
    """Records are deleted only after a yes: of the person at the terminal, or as an option."""
    main(["hold", "add", "--record", "1"])
    code, _, error = run("hold", "skip", "--all")
    assert code == 2
    assert "deletes 1 record for good; say --yes" in error
    asked = []
    monkeypatch.setattr(hold, "asker", lambda: lambda question: asked.append(question) or len(asked) > 1)
    code, told, error = run("hold", "skip", "1")
    assert (code, error) == (1, "outbox: nothing was deleted\n")
    assert "record 1\torders\t4711" in told
    assert run("hold", "skip", "1")[1].endswith("skipped 1 record\n")
    assert asked == ["Delete 1 record for good?"] * 2
    assert outbox.execute("SELECT count(*) FROM outbox").fetchone() == (2,)


@pytest.mark.usefixtures("outbox")
def test_holds_of_a_locked_table(database, run, monkeypatch):
    """While a migration locks the tables, an action ends after some seconds and says who knows the session."""
    monkeypatch.setattr(hold, "LOCK_TIMEOUT", "100ms")
    with psycopg.connect(database) as migration:
        migration.execute("LOCK TABLE outbox, outbox_hold IN ACCESS EXCLUSIVE MODE")
        code, told, error = run("hold", "list")
    assert (code, told) == (2, "")
    assert error == "outbox: error: public.outbox is locked by another session; `outbox doctor` names it\n"


@pytest.mark.usefixtures("outbox")
def test_place_from_a_file(database, run, monkeypatch, tmp_path):
    """`-f` names database and table as for `outbox harvest`; environment variables and options win over it."""
    monkeypatch.delenv("OUTBOX_POSTGRES_DSN")
    path = tmp_path / "outbox.yaml"
    path.write_text(f"harvest:\n  dataSource: {database}\n  outboxTable: public.outbox\n")
    assert run("hold", "list", "-f", str(path))[0] == 0
    assert len(run("peek", "-f", str(path))[1].splitlines()) == 3
    code, _, error = run("hold", "list", "-f", str(path), "--table", "nowhere")
    assert code == 2
    assert "outbox table nowhere does not exist" in error
