"""The outbox's own Alembic environment, and its revisions and tables in the Alembic project of a host application."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from outbox_core import OutboxRecord, Stasher
from outbox_core.errors import InvalidConfig
from outbox_core.schema import (
    STORAGE_PARAMETERS,
    TableName,
    create_history_sql,
    create_hold_sql,
    create_inbox_sql,
    create_table_sql,
)
from outbox_sqlalchemy import sqlalchemy_url
from outbox_sqlalchemy.alembic import (
    alembic_config,
    migrations_folder,
    outbox_0001,
    outbox_0002,
    outbox_0003,
    outbox_0004,
    outbox_0005,
    outbox_archive,
    outbox_grants,
    outbox_notify,
)
from tests.integration.stores.test_catalogs import catalog

CHECKOUT = migrations_folder().parent

HOST_ENV = """
import os
from alembic import context
from sqlalchemy import create_engine, pool
from models import metadata

def include_name(name, kind, parents):
    return kind != "table" or not name.startswith(("outbox_archive", "outbox_alembic_version"))

engine = create_engine(os.environ["HOST_URL"], poolclass=pool.NullPool)
with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        compare_server_default=True,
        include_schemas=True,
        include_name=include_name,
    )
    with context.begin_transaction():
        context.run_migrations()
"""

HOST_TABLE = """
from sqlalchemy import Column, Integer, MetaData, Table
from outbox_sqlalchemy import make_inbox_table, make_outbox_table

metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True))
make_outbox_table(metadata)
make_outbox_table(metadata, "billing.outbox")
make_inbox_table(metadata)
make_inbox_table(metadata, "billing.inbox")
"""

HOST_MODEL = """
from sqlalchemy.orm import DeclarativeBase
from outbox_sqlalchemy import OutboxMixin, make_inbox_table

class Base(DeclarativeBase):
    pass

class Outbox(OutboxMixin, Base):
    __tablename__ = "outbox"

class BillingOutbox(OutboxMixin, Base):
    __tablename__ = "outbox"
    __table_args__ = {**OutboxMixin.__table_args__, "schema": "billing"}

metadata = Base.metadata
make_inbox_table(metadata)
make_inbox_table(metadata, "billing.inbox")
"""

HOST_REVISION = """
from outbox_sqlalchemy.alembic import outbox_0001

revision = "host2"
down_revision = "host1"

upgrade, downgrade = outbox_0001({argument})
"""

HOST_INBOX_REVISION = """
from outbox_sqlalchemy.alembic import outbox_0002

revision = "host3"
down_revision = "host2"

upgrade, downgrade = outbox_0002({argument})
"""

HOST_CHECKS_REVISION = """
from outbox_sqlalchemy.alembic import outbox_0004

revision = "host4"
down_revision = "host3"

upgrade, downgrade = outbox_0004({argument})
"""

HOST_HISTORY_REVISION = """
from outbox_sqlalchemy.alembic import outbox_0005

revision = "host5"
down_revision = "host4"

upgrade, downgrade = outbox_0005({argument})
"""

HOST_ARCHIVE_REVISION = """
from outbox_sqlalchemy.alembic import outbox_archive

revision = "host4"
down_revision = "host3"

upgrade, downgrade = outbox_archive()
"""

HOST_FIRST_REVISION = """
from alembic import op

revision = "host1"
down_revision = None

def upgrade():
    op.execute("CREATE TABLE orders (id serial PRIMARY KEY)")
    op.execute("CREATE SCHEMA billing")

def downgrade():
    op.execute("DROP SCHEMA billing")
    op.execute("DROP TABLE orders")
"""


def _run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{cwd}", **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def _alembic(*arguments: str, cwd: Path = CHECKOUT, **environment: str) -> str:
    ran = _run(*arguments, cwd=cwd, **environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _tables(database: str) -> set[str]:
    with psycopg.connect(database) as connection:
        rows = connection.execute(
            "SELECT schemaname || '.' || tablename FROM pg_tables WHERE schemaname !~ '^(pg_|information_schema)'"
        ).fetchall()
    return {name for (name,) in rows}


def _create_schema(database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA billing")


def test_upgrade_check_downgrade(database):
    """The checkout's environment makes the tables, finds no difference from the models, and removes them again."""
    _alembic("upgrade", "head", OUTBOX_POSTGRES_DSN=database)
    names = ("outbox", "inbox", "outbox_hold", "outbox_statistics", "outbox_event", "outbox_alembic_version")
    assert _tables(database) == {f"public.{name}" for name in names}
    assert "No new upgrade operations" in _alembic("check", OUTBOX_POSTGRES_DSN=database)
    _alembic("downgrade", "base", OUTBOX_POSTGRES_DSN=database)
    assert _tables(database) == {"public.outbox_alembic_version"}


def test_inbox_and_holds_come_after_the_outbox(database):
    """A database with the outbox gets the inbox and the holds by one step each; a downgrade removes them alone."""
    config = alembic_config(database)
    command.upgrade(config, "outbox_0001")
    with psycopg.connect(database) as connection:
        Stasher().stash(connection, OutboxRecord("orders", "kept"))
    command.upgrade(config, "outbox_0002")
    assert _tables(database) == {"public.outbox", "public.inbox", "public.outbox_alembic_version"}
    command.upgrade(config, "outbox_0003")
    assert "public.outbox_hold" in _tables(database)
    command.downgrade(config, "outbox_0001")
    assert _tables(database) == {"public.outbox", "public.outbox_alembic_version"}
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT kafka_key FROM outbox").fetchall() == [("kept",)]


def test_an_inbox_of_another_name(database):
    """`-x inbox=` and `alembic_config(inbox=)` name the inbox, also in another schema than its outbox."""
    _create_schema(database)
    arguments = ("-x", f"dsn={database}", "-x", "inbox=billing.received")
    _alembic(*arguments, "upgrade", "head")
    assert {"public.outbox", "billing.received"} < _tables(database)
    assert "No new upgrade operations" in _alembic(*arguments, "check")
    command.downgrade(alembic_config(database, inbox="billing.received"), "base")
    assert _tables(database) == {"public.outbox_alembic_version"}


def test_a_name_in_quotes(database):
    """An outbox and an inbox can have names that need quotes."""
    config = alembic_config(database, '"My Outbox"', '"My Inbox"')
    command.upgrade(config, "head")
    command.check(config)
    assert {"public.My Outbox", "public.My Inbox"} < _tables(database)


@pytest.mark.complete
def test_table_and_data_source_as_arguments(database):
    """`-x dsn=` and `-x table=` name another outbox; its inbox, holds and version table get names beside it."""
    _create_schema(database)
    for table in ("billing.outbox", "mailbox"):
        _alembic("-x", f"dsn={database}", "-x", f"table={table}", "upgrade", "head", OUTBOX_POSTGRES_DSN="host=nowhere")
    assert _tables(database) == {
        "billing.outbox",
        "billing.inbox",
        "billing.outbox_hold",
        "billing.outbox_statistics",
        "billing.outbox_event",
        "billing.outbox_alembic_version",
        "public.mailbox",
        "public.mailbox_inbox",
        "public.mailbox_hold",
        "public.mailbox_statistics",
        "public.mailbox_event",
        "public.mailbox_alembic_version",
    }
    _alembic("-x", f"dsn={database}", "-x", "table=billing.outbox", "check")
    _alembic("-x", f"dsn={database}", "-x", "table=billing.outbox", "downgrade", "base")
    assert {"billing.outbox", "public.mailbox"} & _tables(database) == {"public.mailbox"}


def test_application_with_alembic_of_its_own(database):
    """The version table of an application in the same database is not changed."""
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num text)")
        connection.execute("INSERT INTO alembic_version VALUES ('the application''s')")
    command.upgrade(alembic_config(database), "head")
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT * FROM alembic_version").fetchall() == [("the application's",)]


def test_from_python(database):
    """`alembic_config` runs the environment without an ini file."""
    _create_schema(database)
    config = alembic_config(database, "billing.outbox")
    command.upgrade(config, "head")
    with psycopg.connect(database) as connection:
        Stasher("billing.outbox").stash(connection, OutboxRecord("orders", "k"))
    command.check(config)
    command.downgrade(config, "base")
    assert _tables(database) == {"billing.outbox_alembic_version"}


def test_script_of_sql(database):
    """`--sql` prints statements that make the same table, without a database."""
    script = _alembic("-x", "table=outbox", "upgrade", "head", "--sql", OUTBOX_POSTGRES_DSN="")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(script)
        connection.execute("CREATE SCHEMA other")
        connection.execute(create_table_sql(TableName("outbox", "other")))
        connection.execute(create_inbox_sql(TableName("inbox", "other")))
    for table in ("outbox", "inbox"):
        assert catalog(database, table) == catalog(database, f"other.{table}")


@pytest.mark.parametrize(
    ("arguments", "dsn", "complaint"),
    [
        ((), "", "no database: set OUTBOX_POSTGRES_DSN or pass `-x dsn="),
        pytest.param((), "mysql://u:hidden@db/x", "the DSN is neither", marks=pytest.mark.complete),
        ((), "postgresql://u:hidden@127.0.0.1:1/x", "cannot connect to the database"),
        pytest.param(("-x", "tabel=x"), "", "-x tabel: unknown", marks=pytest.mark.complete),
        pytest.param(("-x", "table=a.b.c"), "", "'a.b.c' is not a table name", marks=pytest.mark.complete),
        pytest.param(("-x", f"table={'x' * 60}"), "", "version table is too long", marks=pytest.mark.complete),
    ],
    ids=["no-dsn", "wrong-dsn", "unreachable", "unknown", "no-name", "long-name"],
)
def test_wrong_arguments(arguments, dsn, complaint):
    """A wrong argument is an error without a password or a traceback."""
    ran = _run(*arguments, "upgrade", "head", cwd=CHECKOUT, OUTBOX_POSTGRES_DSN=dsn)
    assert ran.returncode != 0
    assert complaint in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert "hidden" not in ran.stdout + ran.stderr


def test_too_long_a_name_from_python(database):
    """Errors of the environment are Alembic's CommandError, so that callers need no other handler."""
    with pytest.raises(CommandError, match="version table is too long"):
        command.upgrade(alembic_config(database, "x" * 60), "head")


def test_an_asynchronous_driver():
    """A URL of an asynchronous engine is refused with the remedy."""
    with pytest.raises(CommandError, match="asyncpg is asynchronous; write postgresql://"):
        command.upgrade(alembic_config("postgresql+asyncpg://postgres@localhost/shop"), "head")


@pytest.mark.parametrize(
    ("table", "statement", "complaint"),
    [
        ("billing.outbox", "SELECT", 'schema "billing" does not exist'),
        ("outbox", "CREATE TABLE outbox ()", 'relation "outbox" already exists'),
    ],
)
def test_errors_of_the_database_are_one_line(database, table, statement, complaint):
    """A schema that is missing and a table that is there are errors of Alembic's, not tracebacks of SQLAlchemy's."""
    with psycopg.connect(database) as connection:
        connection.execute(statement)
    with pytest.raises(CommandError, match=f"^error of the database: {complaint}$"):
        command.upgrade(alembic_config(database, table), "head")


def test_a_table_that_another_session_locks(database):
    """A revision that waited for its lock in vain names the table, and what to do."""
    command.upgrade(alembic_config(database), "outbox_0003")
    impatient = make_url(database).update_query_dict({"options": "-clock_timeout=100ms"})
    with psycopg.connect(database) as connection:
        connection.execute("SELECT FROM outbox")
        with pytest.raises(CommandError, match=r"^outbox is locked by another session; `outbox doctor` names it"):
            command.upgrade(alembic_config(impatient.render_as_string(hide_password=False)), "head")


def test_tables_of_outbox_schema_are_stamped(database):
    """Tables that `outbox schema` made are taken over by a stamp."""
    outbox = TableName("outbox")
    with psycopg.connect(database) as connection:
        for script in (create_table_sql, create_hold_sql, create_history_sql):
            connection.execute(script(outbox))
        connection.execute(create_inbox_sql(TableName("inbox")))
    config = alembic_config(database)
    command.stamp(config, "head")
    command.check(config)


@pytest.fixture
def host(tmp_path, database):
    """Return `host(models, revisions={file: text})`, which makes a host's Alembic project and returns its alembic."""

    def make(models: str, *, revisions: dict[str, str]):
        versions = tmp_path / "migrations" / "versions"
        versions.mkdir(parents=True)
        (tmp_path / "alembic.ini").write_text("[alembic]\nscript_location = %(here)s/migrations\npath_separator = os\n")
        (tmp_path / "models.py").write_text(models)
        (tmp_path / "migrations" / "env.py").write_text(HOST_ENV)
        (tmp_path / "migrations" / "script.py.mako").write_text(_generic_template())
        for name, body in revisions.items():
            (versions / name).write_text(body)
        url = sqlalchemy_url(database).render_as_string(hide_password=False)
        return lambda *arguments: _alembic(*arguments, cwd=tmp_path, HOST_URL=url)

    return make


def _generic_template() -> str:
    """Return the template that `alembic init` gives to every project."""
    import alembic

    return (Path(alembic.__file__).parent / "templates" / "generic" / "script.py.mako").read_text()


@pytest.mark.parametrize("schema", [pytest.param("", marks=pytest.mark.complete), "billing."])
def test_one_line_in_the_hosts_chain(host, database, schema):
    """A host runs each of the library's revisions by one line in its own chain, and downgrades it again."""
    arguments = {table: f'"{schema}{table}"' if schema else "" for table in ("outbox", "inbox")}
    revisions = {
        "1.py": HOST_FIRST_REVISION,
        "2.py": HOST_REVISION.format(argument=arguments["outbox"]),
        "3.py": HOST_INBOX_REVISION.format(argument=arguments["inbox"]),
        "4.py": HOST_CHECKS_REVISION.format(argument=arguments["outbox"]),
        "5.py": HOST_HISTORY_REVISION.format(argument=arguments["outbox"]),
    }
    alembic = host("metadata = None", revisions=revisions)
    alembic("upgrade", "head")
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA other")
        connection.execute(create_table_sql(TableName("outbox", "other")))
        connection.execute(create_inbox_sql(TableName("inbox", "other")))
        connection.execute(create_history_sql(TableName("outbox", "other")))
    for table in (*arguments, "outbox_statistics", "outbox_event"):
        assert catalog(database, schema + table) == catalog(database, f"other.{table}")
    alembic("downgrade", "host1")
    assert _tables(database) == {"public.orders", "public.alembic_version"} | {
        f"other.{table}" for table in (*arguments, "outbox_statistics", "outbox_event")
    }


@pytest.mark.parametrize(
    "models", [pytest.param(HOST_TABLE, id="table"), pytest.param(HOST_MODEL, id="model", marks=pytest.mark.complete)]
)
def test_autogenerate(host, database, tmp_path, models):
    """Autogenerate in a host that imports the library's table gives a working migration, and `check` is clean then."""
    _create_schema(database)
    alembic = host(models, revisions={})
    alembic("revision", "--autogenerate", "-m", "outbox")
    (generated,) = (tmp_path / "migrations" / "versions").glob("*.py")
    assert "postgresql_with" not in generated.read_text()  # SQLAlchemy 2.0 refuses it, and may have to run this
    alembic("upgrade", "head")
    assert "No new upgrade operations" in alembic("check")
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA other")
        connection.execute(create_table_sql(TableName("outbox", "other")))
        connection.execute(create_inbox_sql(TableName("inbox", "other")))
    for table in ("outbox", "inbox"):
        assert catalog(database, table) == catalog(database, f"other.{table}"), generated.read_text()
        assert catalog(database, f"billing.{table}") == catalog(database, f"other.{table}")
    alembic("downgrade", "base")
    assert not {"public.outbox", "public.inbox"} & _tables(database)


def test_revision_then_imported_table_is_clean(host):
    """In a host that runs the library's revisions, imports its tables and leaves the archive out, `check` is clean."""
    models = HOST_TABLE.replace('make_outbox_table(metadata, "billing.outbox")', "")
    models = models.replace('make_inbox_table(metadata, "billing.inbox")', "")
    revisions = {
        "1.py": HOST_FIRST_REVISION,
        "2.py": HOST_REVISION.format(argument=""),
        "3.py": HOST_INBOX_REVISION.format(argument=""),
        "4.py": HOST_ARCHIVE_REVISION,
    }
    alembic = host(models, revisions=revisions)
    alembic("upgrade", "head")
    assert "No new upgrade operations" in alembic("check")


def test_revision_refuses_an_illegal_name():
    """An illegal name is refused when the host's revision is loaded."""
    for revision in (outbox_0001, outbox_0002, outbox_0004, outbox_0005):
        with pytest.raises(InvalidConfig):
            revision("a.b.c")


def test_frozen_revision_is_what_the_library_makes_now(database):
    """The storage parameters that the frozen revision sets are the current ones; otherwise add a revision."""
    command.upgrade(alembic_config(database), "head")
    options = catalog(database)["relation"][0]["options"]
    assert dict(option.split("=") for option in options) == STORAGE_PARAMETERS


def test_revisions_on_asyncpg(database):
    """Each revision runs in an asynchronous environment whose driver takes one statement at a time."""
    revisions = [
        *(make() for make in (outbox_0001, outbox_0002, outbox_0003, outbox_0004, outbox_0005)),
        outbox_notify(),
        outbox_archive(),
        outbox_grants("pg_monitor", "pg_read_all_stats"),
    ]

    def migrate(connection):
        with Operations.context(MigrationContext.configure(connection)):
            for revision in revisions:
                revision.upgrade()
            for revision in reversed(revisions):
                revision.downgrade()

    async def run():
        engine = create_async_engine(sqlalchemy_url(database).set(drivername="postgresql+asyncpg"), poolclass=NullPool)
        async with engine.begin() as connection:
            await connection.run_sync(migrate)

    asyncio.run(run())
    assert not _tables(database) - {"public.outbox_alembic_version"}
