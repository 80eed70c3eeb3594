"""The connections and errors of the caller's driver, whichever it is, and however its owner has set it up."""

from __future__ import annotations

import sys
from typing import Any

from outbox_core.errors import OutboxError

ABORTED_TRANSACTION = "25P02"
"""The SQLSTATE of a statement in a transaction that an error has aborted."""


IN_TRANSACTION = frozenset({1, 2, 3})
"""libpq's PQTRANS_ACTIVE, PQTRANS_INTRANS and PQTRANS_INERROR."""


def transaction_status(connection: Any) -> int | None:
    """Return libpq's number for the state of a driver's connection, as far as the driver tells: None if it does not."""
    return getattr(getattr(connection, "info", None), "transaction_status", None)


def plain_cursor(connection: Any) -> Any:
    """Make a cursor with placeholders `%s`, whose rows are tuples, whatever its connection makes for its owner.

    Raises:
        OutboxError: if it is no connection of a driver.
    """
    if not hasattr(connection, "cursor"):
        raise OutboxError(
            f"expected a connection of a PostgreSQL driver, got {type(connection).__module__}."
            f"{type(connection).__name__}; for sessions and connections of SQLAlchemy there is outbox_sqlalchemy"
        )
    psycopg, psycopg2 = sys.modules.get("psycopg"), sys.modules.get("psycopg2.extensions")
    for each in (connection, getattr(connection, "driver_connection", None)):  # the latter of an SQLAlchemy pool
        if psycopg is not None and isinstance(each, psycopg.Connection):
            is_raw = issubclass(each.cursor_factory, psycopg.RawCursor)
            make = psycopg.Cursor if is_raw else each.cursor_factory
            return make(each, row_factory=psycopg.rows.tuple_row)
        if psycopg2 is not None and isinstance(each, psycopg2.connection):
            return each.cursor(cursor_factory=psycopg2.cursor)
    return connection.cursor()


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE of a driver's error, or of the one that a framework's error was made of; '' for none."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if state is None and each is not None and each.args and isinstance(each.args[0], dict):
            state = each.args[0].get("C")  # of pg8000: the fields of the server's message
        if isinstance(state, str) and state:
            return state
    return ""
