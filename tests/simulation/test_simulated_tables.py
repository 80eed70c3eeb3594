"""The simulated PostgreSQL that takes SQL against the real one: the same statements must have the same outcomes."""

from collections import Counter
from types import SimpleNamespace

import psycopg
import pytest

from outbox_core.errors import AcceptanceLost
from outbox_core.inbox import Inbox
from outbox_core.schema import TableName, create_inbox_sql
from tests.simulation.network import Network, Server
from tests.simulation.scheduling import Process, Scheduler
from tests.simulation.tables import FAILS, DriverConnection, Tables, parse
from tests.simulation.threads import patched

_EFFECT = "INSERT INTO effect (source, message_id) VALUES (%s, %s)"
_INBOX = Inbox()
_COUNT = "SELECT source FROM effect WHERE message_id = %s"

SCENARIOS = {
    "a transaction": (
        ["accept", "effect", "confirm", "commit", "count", "accept", "rollback"],
        [True, "INTRANS", "confirmed", "IDLE", 1, False, "IDLE"],
    ),
    "an error that the handler catches": (
        ["accept", "effect", FAILS, "effect", "confirm", "commit", "accept", "count"],
        [True, "INTRANS", "22012", "25P02", "lost", "IDLE", True, 0],
    ),
    "a rollback, and other statements": (
        ["accept", "effect", "ROLLBACK", "effect", "confirm", "commit", "count"],
        [True, "INTRANS", "IDLE", "INTRANS", "lost", "IDLE", 1],
    ),
    "a commit of the handler's own": (
        ["accept", "effect", "COMMIT", "confirm", "rollback", "accept", "count"],
        [True, "INTRANS", "IDLE", "lost", "IDLE", False, 1],
    ),
    "an error in a savepoint": (
        ["accept", "SAVEPOINT s", FAILS, "ROLLBACK TO SAVEPOINT s", "effect", "confirm", "commit", "count"],
        [True, "INTRANS", "22012", "INTRANS", "INTRANS", "confirmed", "IDLE", 1],
    ),
    "an acceptance in a savepoint that is rolled back": (
        ["SAVEPOINT s", "accept", "ROLLBACK TO SAVEPOINT s", "confirm", "rollback"],
        ["INTRANS", True, "INTRANS", "lost", "IDLE"],
    ),
    "an acceptance in a savepoint that is released": (
        ["effect", "SAVEPOINT s", "accept", "RELEASE SAVEPOINT s", "confirm", "commit"],
        ["INTRANS", "INTRANS", True, "INTRANS", "confirmed", "IDLE"],
    ),
    "autocommit that is changed in a transaction": (
        ["effect", "autocommit", "rollback", "autocommit", "effect", "rollback", "count"],
        ["INTRANS", "ProgrammingError", "IDLE", "IDLE", "IDLE", "IDLE", 1],
    ),
    "statements of a connection that is closed": (
        ["accept", "close", "effect", "commit", "autocommit"],
        [True, "UNKNOWN", "OperationalError", "OperationalError", "OperationalError"],
    ),
    "a savepoint that does not exist": (
        ["effect", "RELEASE SAVEPOINT s", "confirm", "rollback"],
        ["INTRANS", "3B001", "lost", "IDLE"],
    ),
}
"""Steps on one connection, and what each shows: an answer, the status of the transaction, or an error."""


def _step(connection, step):
    if step == "accept":
        return _INBOX.accept(connection, "a", "1")
    if step == "confirm":
        _INBOX.confirm(connection, "a", "1")
        return "confirmed"
    if step == "count":
        return len(connection.execute(_COUNT, ["1"]).fetchall())
    if step in ("commit", "rollback", "close"):
        getattr(connection, step)()
    elif step == "autocommit":
        connection.autocommit = True
    elif step == "effect":
        connection.execute(_EFFECT, ["a", "1"])
    else:
        connection.execute(step)
    return connection.info.transaction_status.name


def _play(connection, steps):
    shown = []
    for step in steps:
        try:
            shown.append(_step(connection, step))
        except AcceptanceLost:
            shown.append("lost")
        except psycopg.Error as error:
            shown.append(error.sqlstate or type(error).__name__)
    return shown


@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated_postgres(name):
    """The simulated PostgreSQL and its driver end each step as it is written down."""
    steps, outcome = SCENARIOS[name]
    scheduler, shown = Scheduler(1), []
    world = SimpleNamespace(scheduler=scheduler, network=Network(scheduler), seen=Counter())
    world.tables = Tables(scheduler, Server("database"))
    world.at_statement = world.acknowledged = world.failed = lambda *_: ""
    process = Process(scheduler, "client")
    process.spawn(lambda: shown.extend(_play(DriverConnection(world), steps)), "main")
    with patched(scheduler):
        scheduler.run(20.0)
    assert shown == outcome


@pytest.mark.parametrize("name", SCENARIOS)
def test_real_postgres(name, database):
    """A real PostgreSQL and psycopg end them in the same way."""
    steps, outcome = SCENARIOS[name]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_inbox_sql(TableName("inbox")))
        connection.execute("CREATE TABLE effect (source text, message_id text)")
    assert _play(psycopg.connect(database), steps) == outcome


def test_unknown_statements_are_refused():
    """A statement that the simulated PostgreSQL does not know is no silent success."""
    with pytest.raises(NotImplementedError, match="DELETE FROM inbox"):
        parse("DELETE FROM inbox WHERE source = %s")
