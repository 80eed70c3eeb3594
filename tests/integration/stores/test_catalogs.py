"""The same table by plain SQL, SQLAlchemy, Alembic and Django, as PostgreSQL's catalogs show it.

Plain SQL, Alembic and Django also upgrade an older table, with its rows, to the same state.
"""

import json
import os
import subprocess
import sys

import psycopg
import pytest
from alembic import command
from alembic.migration import MigrationContext
from alembic.operations import Operations
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import MetaData, create_engine
from sqlalchemy.orm import DeclarativeBase

from outbox_core.schema import (
    CHECKS,
    STORAGE_PARAMETERS,
    TEXT_LAYOUT,
    TableName,
    add_checks_sql,
    create_history_sql,
    create_hold_sql,
    create_inbox_sql,
    create_table_sql,
    drop_checks_sql,
    drop_notify_sql,
    notify_sql,
    validate_checks_sql,
    violations_sql,
)
from outbox_sqlalchemy import (
    OutboxMixin,
    make_history_tables,
    make_hold_table,
    make_inbox_table,
    make_outbox_table,
    sqlalchemy_url,
)
from outbox_sqlalchemy.alembic import alembic_config, migrations_folder, outbox_grants

_QUERIES = {
    "relation": """
        SELECT relkind, relpersistence, relhastriggers, relrowsecurity, relreplident, relispartition, relhassubclass,
               (SELECT array_agg(option ORDER BY option) FROM unnest(reloptions) AS option) AS options,
               (SELECT spcname FROM pg_tablespace WHERE oid = reltablespace) AS tablespace,
               (SELECT amname FROM pg_am WHERE oid = relam) AS access_method
          FROM pg_class WHERE oid = %(oid)s""",
    "columns": """
        SELECT attname, format_type(atttypid, atttypmod) AS type, attnotnull, attidentity, attgenerated, attstorage,
               attcompression, attndims > 0 AS is_array, attstattarget, attcollation::regcollation::text AS collation,
               regexp_replace(pg_get_expr(adbin, adrelid), 'nextval.*', 'nextval') AS "default"
          FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
         WHERE attrelid = %(oid)s AND attnum > 0 ORDER BY attnum""",
    "constraints": """
        SELECT contype, CASE contype WHEN 'c' THEN conname END AS name, condeferrable, condeferred,
               convalidated, conkey, pg_get_constraintdef(oid) AS definition
          FROM pg_constraint WHERE conrelid = %(oid)s ORDER BY contype, conkey, name""",
    "indexes": """
        SELECT indisunique, indisprimary, indisvalid, indkey::text, indoption::text, indclass::text, reloptions,
               (SELECT amname FROM pg_am WHERE oid = relam) AS access_method,
               pg_get_expr(indpred, indrelid) AS predicate, pg_get_expr(indexprs, indrelid) AS expressions
          FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
         WHERE indrelid = %(oid)s ORDER BY indkey::text""",
    "sequences": """
        SELECT seqtypid::regtype::text AS type, seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle, deptype,
               refobjsubid AS column, relpersistence
          FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid
          JOIN pg_depend ON classid = 'pg_class'::regclass AND objid = seqrelid AND refobjid = %(oid)s
         ORDER BY refobjsubid""",
    "triggers": "SELECT tgtype, pg_get_triggerdef(oid) AS definition FROM pg_trigger WHERE tgrelid = %(oid)s",
    "policies": "SELECT polcmd FROM pg_policy WHERE polrelid = %(oid)s",
    "rules": "SELECT pg_get_ruledef(oid) AS definition FROM pg_rewrite WHERE ev_class = %(oid)s",
    "comments": """
        SELECT objsubid, description FROM pg_description
         WHERE classoid = 'pg_class'::regclass AND objoid = %(oid)s ORDER BY objsubid""",
}


_TABLES = ["outbox", "inbox", "outbox_hold", "outbox_statistics", "outbox_event"]


def catalog(database: str, table: str = "outbox") -> dict[str, list[dict[str, object]]]:
    """Return the catalogs' description of a table, without the names of its dependent objects."""
    with psycopg.connect(database, row_factory=dict_row) as connection:
        oid = connection.execute("SELECT %s::regclass::oid AS oid", [TableName.parse(table).quoted]).fetchone()
        return {part: connection.execute(query, oid).fetchall() for part, query in _QUERIES.items()}


def by_sql(database: str) -> None:
    """Make the tables by the statements of `outbox schema`."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(create_inbox_sql(TableName("inbox")))
        connection.execute(create_hold_sql(TableName("outbox")))
        connection.execute(create_history_sql(TableName("outbox")))


def by_sqlalchemy_table(database: str) -> None:
    """Make the tables by `create_all`, from Tables of an application's metadata."""
    _create_all(database, make_outbox_table)
    _create_all(database, make_inbox_table)
    _create_all(database, make_hold_table)
    _create_all(database, make_history_tables)


def by_sqlalchemy_model(database: str) -> None:
    """Make the table by `create_all`, from a mapped class."""

    class Base(DeclarativeBase):
        pass

    class Outbox(OutboxMixin, Base):
        __tablename__ = "outbox"

    _create_all(database, Outbox.__table__.to_metadata)


def by_alembic(database: str, target: str = "head") -> None:
    """Make the tables by `alembic upgrade head` in the checkout."""
    subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", target],
        cwd=migrations_folder().parent,
        env={**os.environ, "OUTBOX_POSTGRES_DSN": database},
        check=True,
        capture_output=True,
    )


_DJANGO_MIGRATE = """
import sys
import django
from django.conf import settings
from django.core.management import call_command
from psycopg.conninfo import conninfo_to_dict

given = conninfo_to_dict(sys.argv[1])
target = sys.argv[2:]
settings.DATABASES["default"].update(
    NAME=given["dbname"], USER=given["user"], HOST=given["host"], PORT=given["port"], PASSWORD=given.get("password", "")
)
django.setup()
call_command("migrate", "outbox_django", *target, verbosity=0)
"""


def by_django(database: str, *target: str) -> None:
    """Make the tables by `manage.py migrate outbox_django`."""
    ran = subprocess.run(
        [sys.executable, "-c", _DJANGO_MIGRATE, database, *target],
        cwd=migrations_folder().parent,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.django_settings"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def _create_all(database: str, add_table) -> None:
    metadata = MetaData()
    add_table(metadata)
    engine = create_engine(sqlalchemy_url(database))
    metadata.create_all(engine)
    engine.dispose()


@pytest.fixture
def references(postgres):
    """The catalogs of the tables that plain SQL makes, by table name."""
    name = f"reference_{os.getpid()}"
    database = postgres.create_database(name)
    by_sql(database)
    yield {table: catalog(database, table) for table in _TABLES}
    postgres.drop_database(name)


@pytest.fixture
def reference(references):
    """The catalog of the outbox table that plain SQL makes."""
    return references["outbox"]


@pytest.mark.parametrize(
    ("make", "tables"),
    [
        (by_sqlalchemy_table, _TABLES),
        (by_sqlalchemy_model, ["outbox"]),
        (by_alembic, _TABLES),
        (by_django, _TABLES),
    ],
)
def test_same_catalog(make, tables, references, database):
    """Every schema route makes the tables that plain SQL makes, up to the names of constraints and sequences."""
    make(database)
    for table in tables:
        made = catalog(database, table)
        for part in _QUERIES:
            assert made[part] == references[table][part], (table, part)


def test_the_reference_is_what_the_design_asks_for(reference):
    """The reference has the design's identity, defaults, types with their lengths, and storage parameters."""
    columns = {column["attname"]: column for column in reference["columns"]}
    assert columns["id"]["attidentity"] == "d"
    assert columns["kafka_topic"]["type"] == "character varying(249)"
    assert columns["create_time"]["default"] == "now()"
    assert columns["kafka_header_values"]["default"] == "'{}'::bytea[]"
    assert reference["relation"][0]["options"] == sorted(f"{key}={value}" for key, value in STORAGE_PARAMETERS.items())
    assert [(s["seqcache"], s["seqincrement"], s["deptype"]) for s in reference["sequences"]] == [(1, 1, "i")]
    assert [index["indisprimary"] for index in reference["indexes"]] == [True]


def test_the_inbox_is_what_the_inbox_needs(references):
    """The key is source and id, in this order; no column is nullable; one more index serves pruning."""
    inbox = references["inbox"]
    assert [(column["attname"], column["type"], column["attnotnull"]) for column in inbox["columns"]] == [
        ("source", "text", True),
        ("message_id", "text", True),
        ("accept_time", "timestamp with time zone", True),
    ]
    keys = [c["definition"] for c in inbox["constraints"] if c["contype"] == "p"]
    assert keys == ["PRIMARY KEY (source, message_id)"]
    assert [(index["indkey"], index["indisunique"]) for index in inbox["indexes"]] == [("1 2", True), ("3", False)]


def test_comparison_sees_a_difference(reference, database):
    """The comparison finds each single difference in a table."""
    by_sql(database)
    details = {
        "relation": "ALTER TABLE outbox SET (fillfactor = 90)",
        "columns": "ALTER TABLE outbox ALTER kafka_header_keys DROP DEFAULT",
        "constraints": "ALTER TABLE outbox ADD CHECK (kafka_partition >= 0)",
        "indexes": "CREATE INDEX ON outbox (leader_id)",
        "sequences": "ALTER TABLE outbox ALTER id SET CACHE 20",
    }
    with psycopg.connect(database) as connection:
        for statement in details.values():
            connection.execute(statement)
    made = catalog(database)
    assert {part for part in _QUERIES if made[part] != reference[part]} == set(details)


def old_by_sql(database: str) -> None:
    """Make the outbox as version 0.2 did."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(drop_checks_sql(TableName("outbox")))


def checks_by_sql(database: str) -> None:
    """Add the constraints with the statements of `outbox schema --only checks`."""
    printed = subprocess.run(
        [sys.executable, "-m", "outbox_core", "schema", "--only", "checks"], check=True, capture_output=True, text=True
    ).stdout
    with psycopg.connect(database) as connection:
        connection.execute(printed)


_HOSTILE = {
    "outbox_id_in_range": "INSERT INTO outbox (id, kafka_topic) VALUES (-1, 't')",
    "outbox_create_time_in_range": "INSERT INTO outbox (create_time, kafka_topic) VALUES ('294276-12-31', 't')",
    "outbox_headers_in_pairs": "INSERT INTO outbox (kafka_topic, kafka_header_keys) VALUES ('t', '{a}')",
    "outbox_partition_in_range": "INSERT INTO outbox (kafka_topic, kafka_partition) VALUES ('t', -5)",
}


@pytest.mark.parametrize(
    ("make_old", "upgrade"),
    [
        pytest.param(old_by_sql, checks_by_sql, id="sql"),
        pytest.param(
            lambda database: by_alembic(database, "outbox_0003"), by_alembic, id="alembic", marks=pytest.mark.complete
        ),
        pytest.param(lambda database: by_django(database, "0003"), by_django, id="django", marks=pytest.mark.complete),
    ],
)
def test_upgrade_with_rows_that_violate(make_old, upgrade, reference, database):
    """An older table gets the constraints despite violating rows; they hold for new rows, once validated for all."""
    make_old(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("INSERT INTO outbox (kafka_topic) VALUES ('a good one')")
        for statement in _HOSTILE.values():
            connection.execute(statement)
        upgrade(database)
        assert {c["name"] for c in catalog(database)["constraints"] if not c["convalidated"]} == set(CHECKS)
        for name, statement in _HOSTILE.items():
            with pytest.raises(psycopg.errors.CheckViolation, match=name):
                connection.execute(statement)
        found = violations_sql(TableName("outbox")).replace("id, create_time, kafka_topic", "id")
        violators = [row[0] for row in connection.execute(found)]
        assert len(violators) == len(_HOSTILE)
        connection.execute("DELETE FROM outbox WHERE id = ANY (%s)", [violators])
        connection.execute(validate_checks_sql(TableName("outbox")))
        assert catalog(database)["constraints"] == reference["constraints"]
        assert connection.execute("SELECT kafka_topic FROM outbox").fetchall() == [("a good one",)]


@pytest.mark.parametrize("statements", [add_checks_sql, drop_checks_sql, notify_sql, drop_notify_sql])
def test_changes_of_a_table_in_use_do_not_wait_for_long(database, statements):
    """Behind an open transaction they give up at a lock timeout, the session's own if it has one, and keep that."""
    script = statements(TableName("outbox"))
    old_by_sql(database)
    with psycopg.connect(database) as writer, psycopg.connect(database) as connection:
        connection.execute(notify_sql(TableName("outbox")))
        connection.commit()
        writer.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
        for change in (script.replace("'5s'", "'50ms'"), f"SET LOCAL lock_timeout = '51ms'; {script}"):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                connection.execute(change)
            connection.rollback()
        writer.commit()
        connection.execute(script)
        connection.execute(script)
        assert connection.execute("SHOW lock_timeout").fetchone() == ("0",)


@pytest.mark.parametrize("route", ["alembic", "django"])
def test_downgrade_removes_the_constraints(route, database):
    """A downgrade by one step removes the constraints."""
    if route == "alembic":
        by_alembic(database)
        command.downgrade(alembic_config(database), "outbox_0003")
    else:
        by_django(database)
        by_django(database, "0003")
    assert not [c for c in catalog(database)["constraints"] if c["contype"] == "c"]


def test_every_name_may_have_the_constraints(database):
    """The constraints can be added to tables with quotes, percent signs, colons and dollar signs in their names."""
    name = TableName("""it's "100%" :x $checks$""")
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(name))
        connection.execute(drop_checks_sql(name))
        connection.execute(add_checks_sql(name))
        connection.execute(validate_checks_sql(name))


def notify_by_sql(database: str) -> None:
    """Add the trigger with the statements of `outbox schema --notify`."""
    printed = subprocess.run(
        [sys.executable, "-m", "outbox_core", "schema", "--notify"], check=True, capture_output=True, text=True
    ).stdout
    with psycopg.connect(database) as connection:
        connection.execute(printed)


def notify_by_alembic(database: str) -> None:
    """Add the trigger with the outbox's own environment."""
    command.upgrade(alembic_config(database, notify=True), "head")


def notify_by_django(database: str) -> None:
    """Add the trigger with the operation of a project's migration, to the library's own table."""
    script = (
        _DJANGO_MIGRATE
        + """
from django.apps import apps
from django.db import connection
from django.db.migrations.state import ProjectState
from outbox_django.operations import NotifyOnInsert
state = ProjectState.from_apps(apps)
for method in ("database_forwards", "database_backwards", "database_forwards"):
    with connection.schema_editor() as editor:
        getattr(NotifyOnInsert(), method)("shop", editor, state, state)
"""
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.django_settings"}
    subprocess.run([sys.executable, "-c", script, database], check=True, env=environment)


def test_same_trigger(postgres, topic_name):
    """Plain SQL, Alembic and Django add the same trigger and function for NOTIFY, and Alembic drops them again."""
    function = "SELECT prosrc, prosecdef, provolatile, prolang FROM pg_proc WHERE proname = 'outbox_notify'"
    made = []
    for add in (notify_by_sql, notify_by_alembic, notify_by_django):
        name = topic_name("triggers").replace("-", "_")
        database = postgres.create_database(name)
        add(database)
        with psycopg.connect(database) as connection:
            made.append((catalog(database)["triggers"], connection.execute(function).fetchall()))
        if add is notify_by_alembic:
            command.upgrade(alembic_config(database, notify=False), "head")
            assert not catalog(database)["triggers"]
        postgres.drop_database(name)
    assert len(made[0][0]) == len(made[0][1]) == 1
    assert made[0] == made[1] == made[2]


# Rights by grantee on the outbox, its columns, its sequence, its holds and the schema.
_RIGHTS = """
SELECT what, coalesce(rolname, 'PUBLIC') AS grantee, privilege_type
FROM (
    SELECT relname::text AS what, relacl AS acl FROM pg_class
    WHERE oid IN ('outbox'::regclass, 'outbox_id_seq'::regclass, 'outbox_hold'::regclass,
                  'outbox_statistics'::regclass, 'outbox_event'::regclass)
    UNION ALL
    SELECT attname::text, attacl FROM pg_attribute WHERE attrelid = 'outbox'::regclass
    UNION ALL
    SELECT nspname::text, nspacl FROM pg_namespace WHERE nspname = 'public'
) AS granted CROSS JOIN aclexplode(acl) AS given LEFT JOIN pg_roles AS r ON r.oid = given.grantee
WHERE grantee = 0 OR rolname <> current_user AND rolname <> 'pg_database_owner'
ORDER BY 1, 2, 3
"""


def rights_by_sql(database: str, layout: str, writer: str, harvester: str) -> None:
    """Grant with the statements of `outbox schema --grants`."""
    command = [sys.executable, "-m", "outbox_core", "schema", "--layout", layout, "--grants", writer, harvester]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with psycopg.connect(database) as connection:
        connection.execute(printed)


def rights_by_alembic(database: str, layout: str, writer: str, harvester: str, step: str = "upgrade") -> None:
    """Grant with the revision of a host's chain."""
    engine = create_engine(sqlalchemy_url(database))
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        getattr(outbox_grants(writer, harvester, layout=layout), step)()
    engine.dispose()


_DJANGO_GRANT = """
import json
from django.conf import settings
layout, writer, harvester, step = json.loads(sys.argv.pop())
settings.OUTBOX = {"LAYOUT": layout}
from django.apps import apps
from django.db import connection
from django.db.migrations.state import ProjectState
from outbox_django.operations import GrantRights
state = ProjectState.from_apps(apps)
with connection.schema_editor() as editor:
    getattr(GrantRights(writer=writer, harvester=harvester), step)("shop", editor, state, state)
"""


def rights_by_django(database: str, layout: str, writer: str, harvester: str, step: str = "database_forwards") -> None:
    """Grant with the operation of a project's migration."""
    script = _DJANGO_MIGRATE.replace('call_command("migrate", "outbox_django", *target, verbosity=0)', _DJANGO_GRANT)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.django_settings"}
    arguments = json.dumps([layout, writer, harvester, step])
    subprocess.run([sys.executable, "-c", script, database, arguments], check=True, env=environment)


@pytest.fixture
def odd_roles(postgres, topic_name):
    """The names of an application's role and of a harvester's, which need quotes and contain special characters."""
    names = [f"""it's "100%" :{topic_name(role)}""" for role in ("app", "relay")]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    database = postgres.create_database(topic_name("roles").replace("-", "_"))
    with psycopg.connect(database, autocommit=True) as connection:
        for name in quoted:
            connection.execute(f"CREATE ROLE {name}")
        yield names
        for name in quoted:
            connection.execute(f"DROP ROLE {name}")
    postgres.drop_database(database.rpartition("/")[2].partition("?")[0])


_RIGHTS_ON_HISTORY = {"SELECT", "INSERT", "DELETE"}


@pytest.mark.complete
@pytest.mark.parametrize("layout", ["binary", "text"])
def test_same_rights(layout, postgres, topic_name, odd_roles):
    """Plain SQL, Alembic and Django grant the same rights, column by column; the last two also revoke them."""

    def rights(database: str) -> list[tuple[str, ...]]:
        with psycopg.connect(database) as connection:
            return connection.execute(_RIGHTS).fetchall()

    writer, harvester = odd_roles
    made = []
    for make, grant, back in (
        (by_sql, rights_by_sql, None),
        (by_alembic, rights_by_alembic, "downgrade"),
        (by_django, rights_by_django, "database_backwards"),
    ):
        name = topic_name("rights").replace("-", "_")
        database = postgres.create_database(name)
        if layout == "binary":
            make(database)
        else:
            with psycopg.connect(database) as connection:
                connection.execute(create_table_sql(TableName("outbox"), layout))
                connection.execute(create_hold_sql(TableName("outbox")))
                connection.execute(create_history_sql(TableName("outbox")))
        with psycopg.connect(database) as connection:
            connection.execute(sql.SQL("GRANT ALL ON TABLE outbox TO {}").format(sql.Identifier(writer)))
            connection.execute(sql.SQL("REVOKE SELECT, DELETE ON TABLE outbox FROM {}").format(sql.Identifier(writer)))
        grant(database, layout, writer, harvester)
        made.append(rights(database))
        if back:
            grant(database, layout, writer, harvester, back)
            ours = {(what, privilege) for what, grantee, privilege in rights(database) if grantee in odd_roles}
            assert {what for what, _ in ours} == {"public", "outbox"}
            assert not {privilege for _, privilege in ours} & {"SELECT", "INSERT", "UPDATE", "DELETE"}
        postgres.drop_database(name)
    assert made[0] == made[1] == made[2]
    assert ("outbox", writer, "INSERT") not in made[0]
    assert ("create_time", writer, "INSERT") in made[0] or layout == "binary"
    assert ("kafka_topic", writer, "INSERT") in made[0]
    assert ("leader_id", harvester, "UPDATE") in made[0]
    assert ("outbox_hold", harvester, "DELETE") in made[0]
    for table in ("outbox_statistics", "outbox_event"):
        assert {right for what, who, right in made[0] if (what, who) == (table, harvester)} == _RIGHTS_ON_HISTORY
    assert not [what for what, _, privilege in made[0] if (what, privilege) == ("public", "CREATE")]


def test_text_layout_by_sqlalchemy(database):
    """Plain SQL and `make_outbox_table` make the same table of the text layout, too."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox"), "text"))
        connection.execute("CREATE SCHEMA other")
    _create_all(database, lambda metadata: make_outbox_table(metadata, "other.outbox", layout=TEXT_LAYOUT))
    assert catalog(database, "other.outbox") == catalog(database, "outbox")
