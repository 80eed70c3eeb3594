"""Two roles with exactly the rights that `outbox schema --grants` prints: all features work, and nothing else does."""

import json
import subprocess
import sys
from contextlib import contextmanager
from io import StringIO

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import outbox_django
import outbox_sqlalchemy
from outbox_core.cli import main
from outbox_core.record import OutboxRecord
from outbox_core.schema import TEXT_LAYOUT, TableLayout, TableName, create_inbox_sql
from outbox_core.stasher import Stasher
from tests.harvesting import Scene
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.services import as_role

__all__ = ["django_db_modify_db_settings"]

_ALIAS = "granted"
_LAYOUTS = {"binary": TableLayout(), "text": TEXT_LAYOUT}

# Statements that a writer with more rights could harm its harvester with, by the column or right that they need.
_HOSTILE = {
    "id": "INSERT INTO outbox (id, create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values) "
    "VALUES (9223372036854775806, now(), 't', 'k', '{}', '{}')",
    "leader_id": "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values, "
    "leader_id) VALUES (now(), 't', 'k', '{}', '{}', gen_random_uuid())",
    "create_time": "INSERT INTO outbox (create_time, kafka_topic) VALUES ('2000-01-01', 't')",
    "SELECT": "SELECT * FROM outbox",
    "DELETE": "DELETE FROM outbox",
    "sequence": "SELECT setval('outbox_id_seq', 9223372036854775806)",
}


@pytest.fixture(params=["binary", "text"])
def layout(request):
    """The table's layout."""
    return request.param


@pytest.fixture
def scene(database, kafka_bootstrap, layout):
    """An outbox whose owner is neither of the two roles."""
    scene = Scene(database, kafka_bootstrap, layout=layout)
    yield scene
    scene.close()


@pytest.fixture
def roles(scene, topic_name, layout):
    """The DSNs of an application and of a harvester, with the printed grants."""
    names = [topic_name("writer"), topic_name("harvester")]
    for name in names:
        scene.execute(f'CREATE ROLE "{name}" LOGIN')
    command = [sys.executable, "-m", "outbox_core", "schema", "--layout", layout, "--grants", *names]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    scene.execute(printed)
    yield [as_role(scene.database, name) for name in names]
    for name in names:
        scene.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


@pytest.fixture
def run(kafka_bootstrap, monkeypatch, capsys):
    """Return a function that runs a command on the database of a DSN and returns its output."""

    def run(dsn, *arguments):
        monkeypatch.setenv("OUTBOX_POSTGRES_DSN", dsn)
        monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", kafka_bootstrap)
        capsys.readouterr()
        assert main(list(arguments)) == 0, arguments
        return capsys.readouterr().out

    return run


@pytest.fixture(autouse=True)
def _databases(django_db_blocker):
    """Unblock Django's databases: each test closes its own alias, and Django's own databases are not used."""
    with django_db_blocker.unblock():
        yield


@contextmanager
def django_alias(dsn):
    """Yield an alias in Django's DATABASES for this role."""
    server = conninfo_to_dict(dsn)
    names = {"NAME": "dbname", "HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
    found = {key: server.get(name, "") for key, name in names.items()}
    connections.settings[_ALIAS] = {**connections.settings["default"], **found}
    try:
        yield _ALIAS
    finally:
        connections[_ALIAS].close()
        del connections[_ALIAS]
        del connections.settings[_ALIAS]


def stash_by_every_adapter(dsn, topic, layout):
    """Write one record with each adapter's `stash`, and two more with its `stash_many`; return their number."""
    records = [OutboxRecord(topic, "a", str(number)) for number in range(3)]
    stasher = Stasher(layout=_LAYOUTS[layout])
    with psycopg.connect(dsn) as connection:
        stasher.stash(connection, records[0])
        stasher.stash_many(connection, records[1:])
    engine = create_engine(outbox_sqlalchemy.sqlalchemy_url(dsn))
    outbox = outbox_sqlalchemy.Outbox(layout=_LAYOUTS[layout])
    with Session(engine) as session, session.begin():
        outbox.stash(session, records[0])
        outbox.stash_many(session, records[1:])
    engine.dispose()
    table = outbox_django.OutboxTable("outbox", layout=_LAYOUTS[layout])
    with django_alias(dsn) as alias, transaction.atomic(using=alias):
        table.stash(records[0], using=alias)
        table.stash_many(records[1:], using=alias)
    return 9


@pytest.mark.real_broker
def test_everything_works_with_the_printed_grants(scene, roles, layout, make_topic, run):
    """Three adapters stash and both deliveries harvest; status, doctor and holds work and report no missing right."""
    writer, harvester = roles
    topic = make_topic(1)
    count = stash_by_every_adapter(writer, topic, layout)
    scene.drain(config={"data_source": harvester})
    count += stash_by_every_adapter(writer, topic, layout)
    scene.drain(config={"data_source": harvester, "delivery": "exactly-once"})
    stash_by_every_adapter(writer, topic, layout)
    assert len(scene.read(topic, isolation="read_committed")) == count
    first = str(scene.rows()[0].id)
    for arguments in (["add", "--record", first], ["list"], ["dead-letter", first], ["release", first], ["skip", "77"]):
        run(harvester, "hold", *arguments)
    assert json.loads(run(harvester, "status", "--json"))["pending"] == 9
    findings = json.loads(run(harvester, "doctor", "--json"))
    odd = {found["subject"]: found["detail"] for found in findings if found["verdict"] != "ok"}
    assert set(odd) <= {"leader group", "old snapshot"}, odd


def test_writers_can_do_nothing_else(roles, layout):
    """A writer may set neither id, mark nor (where the database sets it) time, nor read or delete rows."""
    allowed = {"create_time"} if layout == "text" else set()
    with psycopg.connect(roles[0], autocommit=True) as connection:
        for what in _HOSTILE.keys() - allowed:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(_HOSTILE[what])


def test_harvesters_can_change_nothing_but_marks(roles):
    """A harvester's role can mark rows; it cannot change or add any."""
    with psycopg.connect(roles[1], autocommit=True) as connection:
        connection.execute("UPDATE outbox SET leader_id = NULL")
        for column in ("kafka_value", "kafka_topic", "create_time", "id"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"UPDATE outbox SET {column} = NULL")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_one_role_may_be_both(scene, topic_name):
    """An application that harvests its own outbox can have one role: the grants for both do not undo each other."""
    role = topic_name("both")
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    command = [sys.executable, "-m", "outbox_core", "schema", "--grants", role, role]
    scene.execute(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    dsn = as_role(scene.database, role)
    try:
        with psycopg.connect(dsn) as connection:
            Stasher().stash(connection, OutboxRecord("orders", "k"))
            connection.execute("UPDATE outbox SET leader_id = gen_random_uuid()")
            connection.execute("DELETE FROM outbox")
    finally:
        scene.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


# Each fits its arguments better than PostgreSQL's own, and is taken from any schema on the search path (CVE-2018-1058).
_TRAPS = """
CREATE FUNCTION public.trap(text, varchar) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$;
CREATE FUNCTION public.trap(varchar, varchar) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$;
CREATE FUNCTION public.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$;
CREATE FUNCTION public.trap(interval, integer) RETURNS timestamptz LANGUAGE plpgsql
    AS $$ BEGIN RAISE 'trapped'; END $$;
CREATE OPERATOR public.= (FUNCTION = public.trap, LEFTARG = text, RIGHTARG = varchar);
CREATE OPERATOR public.= (FUNCTION = public.trap, LEFTARG = varchar, RIGHTARG = varchar);
"""


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_commands_run_nobody_elses_functions(scene, run):
    """An operator's commands, Django's included, use PostgreSQL's own functions, not others' functions in public."""
    scene.execute(_TRAPS)
    with pytest.raises(psycopg.errors.RaiseException, match="trapped"):
        scene.execute(
            "SELECT outbox.id FROM outbox_hold JOIN outbox ON outbox_hold.kafka_topic = outbox.kafka_topic, "
            "unnest('{a}'::text[])"
        )
    scene.stash(OutboxRecord("orders", "k"), OutboxRecord("orders", "k"))
    scene.execute(create_inbox_sql(TableName("inbox")))
    scene.execute("INSERT INTO inbox VALUES ('s', '1', now() - interval '1 day')")
    for arguments in (
        ["hold", "add", "--record", "1"],
        ["hold", "list", "--topic", "orders", "--key", "k"],
        ["hold", "dead-letter", "1"],
        ["hold", "skip", "1"],
        ["hold", "add", "--topic", "orders", "--key", "k"],
        ["hold", "release", "--topic", "orders", "--key", "k"],
        ["inbox", "prune", "--older-than", "1h"],
        ["status"],
        ["doctor"],
    ):
        run(scene.database, *arguments)
    scene.execute("INSERT INTO inbox VALUES ('s', '1', now() - interval '1 day')")
    with django_alias(scene.database) as alias:
        call_command("outbox_hold", "--database", alias, "add", "--record", "2", stdout=StringIO())
        call_command("outbox_hold", "--database", alias, "skip", "2", stdout=StringIO())
        call_command("prune_inbox", "--database", alias, "--older-than", "1h", stdout=StringIO())
        with connections[alias].cursor() as cursor:
            cursor.execute("SHOW search_path")
            assert cursor.fetchone() == ('"$user", public',)
    assert scene.count() == 0
    assert not scene.execute("SELECT FROM inbox")
