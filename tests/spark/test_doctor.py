"""The doctor's check of a database: every privilege that a projection needs, each by itself."""

import uuid

import psycopg
import pytest

from outbox_core.doctor.findings import Verdict
from outbox_spark.cli.doctor import _postgres as check_postgres
from outbox_spark.cli.doctor import check
from outbox_spark.config import ProjectSettings


@pytest.fixture
def role(database):
    """Yield a role without any rights, and a DSN that uses it."""
    name = f"limited_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name}")
        yield name, psycopg.conninfo.make_conninfo(database, options=f"-c role={name}")
        connection.execute(f"DROP OWNED BY {name}")
        connection.execute(f"DROP ROLE {name}")


def test_each_right_is_looked_at(database, role):
    """One privilege of several on a table is not enough, and the finding has the statements that grant the others."""
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
        found = check("PostgreSQL", check_postgres, settings, settings.postgres)
        assert found.verdict is Verdict.PROBLEM
        remedies = found.detail.partition("; ")[2].split("; ")
        assert len(remedies) == 3
        for remedy in remedies:
            connection.execute(remedy)
    found = check("PostgreSQL", check_postgres, settings, settings.postgres)
    assert found.verdict is Verdict.OK, found.detail
    assert "lines is there" in found.detail
    assert "lines_quarantine will be made" in found.detail
    assert "totals will be made" in found.detail
