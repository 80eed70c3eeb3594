"""The inbox through Django: the contract, databases, checks and `manage.py prune_inbox`."""

from contextlib import contextmanager
from datetime import timedelta
from io import StringIO

import psycopg
import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

import outbox_django as outbox
from outbox_core.errors import InvalidConfig, OutboxError
from outbox_core.schema import TableName, create_inbox_sql
from outbox_core.testing.kafka import InProcessKafka
from outbox_django.models import Inbox
from outbox_django.settings import inbox_model_table, outbox_settings
from tests.contract.accept_contract import AcceptContract, accepted
from tests.integration.django.django_fixtures import alias, django_db_modify_db_settings

__all__ = ["alias", "django_db_modify_db_settings"]

_ALIAS = "contract"
_OLD = "INSERT INTO {} SELECT 'old', n, now() - interval '8 days' FROM generate_series(1, 25) n"


class _Receiver:
    def __init__(self, accept):
        self._accept = accept

    def accept(self, source, message_id):
        return self._accept(source, message_id, using=_ALIAS)

    def savepoint(self):
        return transaction.atomic(using=_ALIAS)

    def execute(self, sql):
        with connections[_ALIAS].cursor() as cursor:
            cursor.execute(sql)


class _Django:
    """The adapter for Django, which opens a connection for each thread and closes it with the transaction."""

    def __init__(self, accept):
        self._receiver = _Receiver(accept)

    @contextmanager
    def transaction(self):
        try:
            with transaction.atomic(using=_ALIAS):
                yield self._receiver
        finally:
            connections[_ALIAS].close()

    @contextmanager
    def autocommit(self):
        yield self._receiver


class TestConfiguredTable(AcceptContract):
    """`outbox_django.accept`, on the table of the OUTBOX setting."""

    @pytest.fixture
    def adapter(self, alias):
        """The function itself."""
        del alias
        return _Django(outbox.accept)


class TestInboxTable(AcceptContract):
    """An InboxTable."""

    @pytest.fixture
    def adapter(self, alias):
        """A handle on the table."""
        del alias
        return _Django(outbox.InboxTable("public.inbox").accept)


@pytest.fixture
def inbox_database(database):
    """A fresh database with an inbox."""
    with psycopg.connect(database) as made:
        made.execute(create_inbox_sql(TableName("inbox")))
    return database


@pytest.mark.django_db(databases=["default", "other"])
def test_the_database(settings):
    """The call's alias comes first, then the handle's, then the setting's, then the routers'."""
    handle = outbox.InboxTable("inbox", using="other")
    assert outbox.accept("api", "a")
    assert handle.accept("api", "a")
    assert not handle.accept("api", "a", using="default")
    settings.OUTBOX = {"DATABASE": "other"}
    assert not outbox.accept("api", "a")
    assert not outbox.accept("api", "a", using="default")
    for name in ("default", "other"):
        assert [(row.source, row.message_id) for row in Inbox.objects.using(name)] == [("api", "a")]


@pytest.mark.django_db
def test_the_model_reads_what_was_accepted():
    """The model finds a message by source and id, and shows when it was accepted."""
    outbox.accept("api", 7)
    found = Inbox.objects.get(pk=("api", "7"))
    assert str(found) == "7 of api"
    assert found.accept_time is not None


@pytest.mark.django_db(databases=["default"])
def test_wrong_databases(settings, monkeypatch):
    """An alias that does not exist, and one of a database other than PostgreSQL, are refused."""
    lite = {**connections.settings["default"], "ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    monkeypatch.setitem(connections.settings, "lite", lite)
    with pytest.raises(InvalidConfig, match="'nowhere' is not in DATABASES"):
        outbox.accept("api", "a", using="nowhere")
    settings.OUTBOX = {"DATABASE": "lite"}
    with pytest.raises(InvalidConfig, match="'lite' is sqlite"):
        outbox.accept("api", "a")


def test_the_setting(settings):
    """INBOX_TABLE is read like TABLE; with a wrong one the model falls back, so that the check can report it."""
    assert outbox_settings().inbox_table == TableName("inbox")
    settings.OUTBOX = {"INBOX_TABLE": "billing.inbox"}
    assert outbox_settings().inbox_table == TableName("inbox", "billing")
    assert inbox_model_table() == '"billing"."inbox"'
    settings.OUTBOX = {"INBOX_TABLE": "a b"}
    assert inbox_model_table() == "inbox"
    (error,) = [found for found in run_checks() if str(found.id).startswith("outbox_django.")]
    assert (error.id, "OUTBOX['INBOX_TABLE']: 'a b'" in error.msg) == ("outbox_django.E003", True)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("ddl", "expected", "said"),
    [
        ("SELECT 1", "W004", "There is no table mine in database 'default'"),
        ("CREATE TABLE mine (source text, message_id text)", "E008", "is no inbox: it lacks accept_time"),
        (
            create_inbox_sql(TableName("mine")) + "ALTER TABLE mine DROP CONSTRAINT mine_pkey",
            "E008",
            "no primary key of source and message_id",
        ),
        (
            create_inbox_sql(TableName("mine"))
            + "ALTER TABLE mine DROP CONSTRAINT mine_pkey; CREATE UNIQUE INDEX ON mine (message_id)",
            "E008",
            "no primary key",
        ),
    ],
)
def test_a_table_that_is_not_right(settings, ddl, expected, said):
    """The database check names the fault of the inbox, and its hint mends a missing key."""
    with connection.cursor() as cursor:
        cursor.execute(ddl)
        settings.OUTBOX = {"INBOX_TABLE": "mine"}
        (message,) = _about_tables()
        assert (message.id, said in message.msg) == (f"outbox_django.{expected}", True)
        if "primary key" in said:
            cursor.execute(message.hint)
            assert _about_tables() == []


def _about_tables():
    return [found for found in run_checks(databases=["default"]) if str(found.id).startswith("outbox_django.")]


def test_prune_inbox(alias, inbox_database, settings):
    """The command prunes the configured table, or another, in the alias's database, and reports the number."""
    with psycopg.connect(inbox_database) as connection_:
        connection_.execute(create_inbox_sql(TableName("received")))
        for table in ("inbox", "received"):
            connection_.execute(_OLD.format(table))
            connection_.execute(f"INSERT INTO {table} VALUES ('young', 'a')")
    out = StringIO()
    call_command("prune_inbox", "--older-than=7d", "--batch=10", database=alias, stdout=out)
    settings.OUTBOX = {"DATABASE": alias}
    call_command("prune_inbox", older_than="192h", table="received", stdout=out)
    assert out.getvalue() == "pruned 25 messages from inbox\npruned 25 messages from received\n"
    assert [accepted(inbox_database, table) for table in ("inbox", "received")] == [[("young", "a")]] * 2


@pytest.mark.django_db(transaction=True)
def test_prune_inbox_without_its_table():
    """Without its table the command says how it is made."""
    with pytest.raises(CommandError, match=r"there is no table nowhere\.inbox; `manage.py migrate` .* --inbox nowhere"):
        call_command("prune_inbox", "--older-than=7d", "--table=nowhere.inbox")
    with pytest.raises(CommandError, match="there is no table missing; "):
        call_command("prune_inbox", "--older-than=7d", "--table=missing")


def test_prune_inbox_refuses(alias):
    """A mistake is one CommandError: an age without a unit, an unknown alias, a transaction around the command."""
    with pytest.raises(CommandError, match="'7' is not an age"):
        call_command("prune_inbox", "--older-than=7", database=alias)
    with pytest.raises(CommandError, match="'nowhere' is not in DATABASES"):
        call_command("prune_inbox", "--older-than=7d", "--database=nowhere")
    with transaction.atomic(using=alias), pytest.raises(CommandError, match=r"outside `transaction\.atomic"):
        call_command("prune_inbox", "--older-than=7d", database=alias)


def test_prune_in_python(alias, inbox_database):
    """An InboxTable prunes too, with autocommit on or off."""
    with psycopg.connect(inbox_database) as connection_:
        connection_.execute(_OLD.format("inbox"))
    handle = outbox.InboxTable("inbox", using=alias)
    assert handle.prune(timedelta(days=9)) == 0
    transaction.set_autocommit(False, using=alias)
    try:
        assert handle.prune(timedelta(days=7), batch=10) == 25
    finally:
        transaction.set_autocommit(True, using=alias)
    assert accepted(inbox_database) == []


def _consume(records, handled):
    consumer = InProcessKafka(records).consumer("orders", group="billing")
    return outbox.consume(consumer, handled.append, stop=consumer.drained)


@pytest.mark.django_db(transaction=True)
def test_consume_refuses_a_transaction_that_it_cannot_commit(outbox_records):
    """Inside `atomic`, and with autocommit off, no record is handled: its offset would outlive a rollback."""
    handled = []
    with transaction.atomic():
        outbox.stash(outbox.OutboxRecord("orders", "k"))
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        _consume(outbox_records, handled)
    transaction.set_autocommit(False)
    try:
        with pytest.raises(OutboxError, match="autocommit is off on database 'default'"):
            _consume(outbox_records, handled)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert handled == []


@pytest.mark.django_db
def test_consume_works_in_a_test_case(outbox_records):
    """The transaction of a test case, which Django knows, is no reason to refuse."""
    handled = []
    outbox.stash(outbox.OutboxRecord("orders", "k"))
    assert _consume(outbox_records, handled).handled == len(handled) == 1
