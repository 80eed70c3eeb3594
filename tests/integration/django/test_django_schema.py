"""The migration: the table it makes, under any name, and back again."""

import json
import os
import subprocess
import sys
from io import StringIO

import psycopg
import pytest
from django.core.management import call_command
from psycopg.conninfo import conninfo_to_dict

from outbox_core.schema import STORAGE_PARAMETERS, TableName, create_table_sql
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

_PROJECT = """
import json, os, sys
import django
from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction

server = json.loads(os.environ["TEST_DATABASE"])
settings.configure(
    INSTALLED_APPS=["outbox_django"],
    OUTBOX=json.loads(os.environ["TEST_OUTBOX"]),
    USE_TZ=True,
    DATABASES={
        "default": {"ENGINE": "django.db.backends.postgresql", "NAME": server["dbname"], "USER": server["user"],
                    "PASSWORD": server.get("password", ""), "HOST": server["host"], "PORT": server["port"]},
        "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    },
)
django.setup()
import outbox_django as outbox
from outbox_django.models import Outbox
"""

_STORAGE = "SELECT array_to_string(reloptions, ',') FROM pg_class WHERE oid = to_regclass(%s)"


@pytest.fixture
def project(database, tmp_path):
    """Return a function that runs a script in a new Django project on a fresh database and returns its output."""

    def run(script, **outbox):
        ran = subprocess.run(
            [sys.executable, "-c", _PROJECT + script],
            env={
                **os.environ,
                "TEST_DATABASE": json.dumps(conninfo_to_dict(database)),
                "TEST_OUTBOX": json.dumps(outbox),
                "TEST_DUMP": str(tmp_path / "dump.json"),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


@pytest.mark.django_db
def test_the_models_are_migrated():
    """`makemigrations --check` finds no change."""
    out = StringIO()
    call_command("makemigrations", "--check", "--dry-run", stdout=out)
    assert "No changes" in out.getvalue()


def test_the_migration_can_be_read_as_sql(project):
    """`sqlmigrate` shows the table and its storage parameters, for projects whose DDL others run."""
    sql = project('call_command("sqlmigrate", "outbox_django", "0001")')
    assert 'CREATE TABLE "outbox"' in sql
    assert 'ALTER TABLE "outbox" SET (fillfactor = 50' in sql


def test_forwards_and_backwards(project, database):
    """`migrate` makes the table with its storage parameters and one index, its key; `migrate zero` removes it."""
    project('call_command("migrate", verbosity=0)')
    with psycopg.connect(database) as connection:
        assert _storage(connection, "outbox") == STORAGE_PARAMETERS
        indexes = connection.execute("SELECT indexname FROM pg_indexes WHERE tablename = 'outbox'").fetchall()
        assert indexes == [("outbox_pkey",)]
    project('call_command("migrate", "outbox_django", "zero", verbosity=0)')
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT to_regclass('outbox')").fetchone() == (None,)


@pytest.mark.parametrize("table", ["billing_outbox", "Camel Outbox", "billing.outbox"])
def test_the_table_has_the_name_of_the_setting(project, database, table):
    """Under another name, quoted or in a schema, migrations find no change, and stash, model and table agree."""
    name = TableName.parse(f'"{table}"' if " " in table else table)
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA billing")
    out = project(
        """
call_command("migrate", verbosity=0)
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
with transaction.atomic():
    outbox.stash(outbox.OutboxRecord("orders", key="k", headers={"h": b"1"}))
print(Outbox.objects.get().headers)
""",
        TABLE=name.quoted,
    )
    assert "Header(key='h', value=b'1')" in out
    with psycopg.connect(database) as connection:
        assert connection.execute(f"SELECT kafka_key FROM {name.quoted}").fetchall() == [("k",)]
        assert _storage(connection, name.quoted) == STORAGE_PARAMETERS


def test_an_existing_table_of_goharvest(project, database):
    """One column, `--fake-initial` and LAYOUT take over a table of goharvest's layout, its rows untouched."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox"), "text"))
        connection.execute("ALTER TABLE outbox ADD COLUMN kafka_partition integer")
        connection.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, "
            "kafka_header_values) VALUES (now(), 't', 'go', 'v', '{h}', '{w}')"
        )
    out = project(
        """
call_command("migrate", fake_initial=True, verbosity=0)
call_command("check", databases=["default"], fail_level="WARNING")
with transaction.atomic():
    outbox.stash(outbox.OutboxRecord("t", key="django", value="v", headers={"h": "w"}))
print([(row.kafka_key, row.kafka_value, row.headers[0]) for row in Outbox.objects.order_by("id")])
""",
        LAYOUT="text",
    )
    assert "[('go', 'v', Header(key='h', value='w')), ('django', 'v', Header(key='h', value='w'))]" in out


def test_a_dump_can_be_loaded(project):
    """`dumpdata` of the whole project reads every table, and `loaddata` restores each row as it was."""
    out = project(
        """
call_command("migrate", verbosity=0)
with transaction.atomic():
    outbox.stash(outbox.OutboxRecord("orders", "k", b"v", headers=[("it's", b"\\xff"), ("none", None)]))
    outbox.stash(outbox.OutboxRecord("orders"))
    outbox.accept("source", "id")
call_command("dumpdata", output=os.environ["TEST_DUMP"], verbosity=0)
before = list(Outbox.objects.order_by("id").values())
call_command("flush", interactive=False, verbosity=0)
call_command("loaddata", os.environ["TEST_DUMP"], verbosity=0)
after = list(Outbox.objects.order_by("id").values())
print([row["kafka_header_values"] for row in after])
for row in (*before, *after):
    del row["create_time"]  # milliseconds in JSON
print(before == after, outbox.models.Inbox.objects.count())
"""
    )
    assert out.splitlines() == ["[[b'\\xff', None], []]", "True 1"]


def test_a_database_that_is_not_postgresql_is_left_alone(project):
    """`migrate` of a database other than PostgreSQL passes and makes no outbox there; a stash there is refused."""
    out = project(
        """
call_command("migrate", database="lite", verbosity=0)
from django.db import connections
print("outbox" in connections["lite"].introspection.table_names())
try:
    outbox.stash(outbox.OutboxRecord("t"), using="lite")
except outbox.OutboxError as error:
    print(error)
"""
    )
    found, refusal = out.splitlines()
    assert found == "False"
    assert refusal.startswith("database 'lite' is sqlite; the outbox needs PostgreSQL. In tests use `in_memory_outbox`")


def _storage(connection, table):
    (options,) = connection.execute(_STORAGE, [table]).fetchone()
    return dict(option.split("=") for option in options.split(","))
