"""The doctor's look at a database: every right that a projection needs, each by itself."""

import uuid

import psycopg
import pytest

from outbox_spark.cli.doctor import _postgres as look_at_postgres
from outbox_spark.cli.doctor import look
from outbox_spark.config import ProjectSettings


@pytest.fixture
def role(database):
    """A role that may do nothing yet, and a DSN with which one has its rights."""
    name = f"limited_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name}")
        yield name, psycopg.conninfo.make_conninfo(database, options=f"-c role={name}")
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


def test_each_right_is_looked_at(database, role):
    """Having one right of several on a table is not enough, and the statement that grants the others is said."""
    name, dsn = role
    totals = {"table": "totals", "by": ["n"], "sums": {}}
    settings = ProjectSettings(
        name="p", topics="t", checkpoint="/c", schema="n BIGINT", keep="latest",
        postgres={"dsn": dsn, "table": "lines", "totals": totals},
    )  # fmt: skip
    with psycopg.connect(database, autocommit=True) as connection:
        for table in ("lines", "outbox_spark_positions"):
            connection.execute(f"CREATE TABLE {table} (a int)")
            connection.execute(f"GRANT SELECT, INSERT ON {table} TO {name}")
        found = look("PostgreSQL", look_at_postgres, settings, settings.postgres)
        assert not found.is_well
        remedies = found.words.partition("; ")[2].split("; ")
        assert len(remedies) == 3
        for remedy in remedies:
            connection.execute(remedy)
    found = look("PostgreSQL", look_at_postgres, settings, settings.postgres)
    assert found.is_well, found.words
    assert "lines is there" in found.words
    assert "lines_quarantine will be made" in found.words
    assert "totals will be made" in found.words
