"""The database connection of commands that need no harvester."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING

from outbox_core.errors import InvalidConfig, MissingExtra, StoreUnavailable

if TYPE_CHECKING:
    import psycopg

    from outbox_core.schema import TableName

DATA_SOURCE_VARIABLE = "OUTBOX_POSTGRES_DSN"


def connect(dsn: str | None, name: TableName) -> tuple[psycopg.Connection[tuple[object, ...]], TableName]:
    """Open an autocommit connection, and return it with the table's full name.

    No schema can put functions of its own in the connection's way. Without `dsn` the environment's counts. A table that
    does not exist keeps its name. Raises MissingExtra, InvalidConfig or StoreUnavailable.
    """
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("needs psycopg, which is not installed; pip install 'psycopg[binary]'") from None
    dsn = dsn or os.environ.get(DATA_SOURCE_VARIABLE)
    if not dsn:
        raise InvalidConfig(f"no database: pass --dsn or set {DATA_SOURCE_VARIABLE}")
    from outbox_core.stores.postgres.connection import one_line, pin_search_path

    try:
        connection = psycopg.connect(_as_libpq_reads_it(dsn), autocommit=True, connect_timeout=10)
        (found,) = pin_search_path(connection, name)
    except psycopg.ProgrammingError:
        # Without the driver's words: they quote the DSN, perhaps its password.
        raise InvalidConfig("--dsn: neither key=value pairs nor a postgresql:// URL") from None
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"cannot connect to the database: {one_line(error)}") from None
    return connection, found


def operator() -> str:
    """Return the person who runs a command, as far as the machine knows: `alice@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user ID without an entry, in a container
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _as_libpq_reads_it(dsn: str) -> str:
    """Return the DSN from the notations of `outbox harvest`, or from libpq's own where only psycopg is installed."""
    try:
        from outbox_core.config import normalise_data_source
    except ImportError:
        return dsn
    try:
        return normalise_data_source(dsn)
    except ValueError as error:
        raise InvalidConfig(f"--dsn: {error}") from None
