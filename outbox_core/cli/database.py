"""The database connection of commands that need no harvester."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, Any

from outbox_core.errors import InvalidConfig, MissingExtra, StoreUnavailable
from outbox_core.schema import TableName

if TYPE_CHECKING:
    import argparse

    from outbox_core.stores.postgres.connection import Connection

DATA_SOURCE_VARIABLE = "OUTBOX_POSTGRES_DSN"
TABLE_VARIABLE = "OUTBOX_TABLE"
IS_READ_ONLY = "the database takes no writes: it is a standby, or read-only by default; name the primary"
_CONNECT_SECONDS = 10


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the outbox is. Read them with `find_place`."""
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="the YAML file of `outbox harvest`, for database and table"
    )
    parser.add_argument(
        "--dsn",
        metavar="DSN",
        help=f"the database: key=value pairs or a postgresql:// URL; environment: {DATA_SOURCE_VARIABLE}",
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        help=f"the outbox: `table` or `schema.table`; default: outbox; environment: {TABLE_VARIABLE}",
    )


def find_place(options: argparse.Namespace) -> tuple[str | None, TableName]:
    """Return data source and table: options win over environment variables, those over the file."""
    dsn = options.dsn or os.environ.get(DATA_SOURCE_VARIABLE)
    table = options.table or os.environ.get(TABLE_VARIABLE)
    if options.file is not None:
        in_file = read_harvest_file(options.file)
        dsn, table = dsn or in_file.get("dataSource"), table or in_file.get("outboxTable")
    try:
        return dsn, TableName.parse(str(table or "outbox"))
    except InvalidConfig as error:
        raise InvalidConfig(f"{'--table' if options.table else TABLE_VARIABLE}: {error}") from None


def read_harvest_file(path: str) -> dict[str, Any]:
    """Return the section `harvest` of a file of `outbox harvest`, in the names of YAML."""
    try:
        from outbox_core.config import load_config, read_document
    except ImportError as error:
        raise MissingExtra(
            f"needs {error.name or error}, which is not installed; pip install 'kafka-outbox[harvester]'"
        ) from None
    document = read_document(path)
    load_config(document)  # names all mistakes of the file
    harvest: dict[str, Any] = dict(document.get("harvest") or {})
    return {_YAML_NAMES.get(name, name): value for name, value in harvest.items()}


_YAML_NAMES = {"data_source": "dataSource", "outbox_table": "outboxTable"}


def connect(dsn: str | None, name: TableName) -> tuple[Connection, TableName]:
    """Open an autocommit connection, and return it with the table's full name.

    No schema can put functions of its own in the connection's way. Without `dsn` the environment's counts. A table that
    does not exist keeps its name. Raises MissingExtra, InvalidConfig or StoreUnavailable.
    """
    connection, found, _ = connect_to_schema(dsn, name)
    return connection, found


def connect_to_schema(dsn: str | None, name: TableName) -> tuple[Connection, TableName, str | None]:
    """Do as `connect`, and return also the schema in which a table that is named without one would be made."""
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("needs psycopg, which is not installed; pip install 'psycopg[binary]'") from None
    dsn = dsn or os.environ.get(DATA_SOURCE_VARIABLE)
    if not dsn:
        raise InvalidConfig(f"no database: pass --dsn or -f, or set {DATA_SOURCE_VARIABLE}")
    from outbox_core.stores.postgres.connection import location, one_line, pin_search_path
    from outbox_core.stores.postgres.deadlines import BoundedConnection

    source = as_libpq_reads_it(dsn)
    try:
        settings: dict[str, Any] = {"client_encoding": "utf8", "connect_timeout": _CONNECT_SECONDS}
        connection: Connection = BoundedConnection.connect(source, autocommit=True, **settings)
        (schema,) = connection.execute("SELECT pg_catalog.current_schema()").fetchone() or (None,)
        (found,) = pin_search_path(connection, name)
        connection.set_patience(0.0, purpose="a statement of this command")
    except psycopg.ProgrammingError:
        # Without the driver's words: they quote the DSN, perhaps its password.
        raise InvalidConfig(f"{_name_of(dsn)}: neither key=value pairs nor a postgresql:// URL") from None
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"cannot connect to {location(source)}: {one_line(error)}") from None
    return connection, found, schema


def operator() -> str:
    """Return the person who runs a command, as far as the machine knows: `alice@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user ID without an entry, in a container
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def as_libpq_reads_it(dsn: str) -> str:
    """Return the DSN from the notations of `outbox harvest`, or from libpq's own where only psycopg is installed."""
    try:
        from outbox_core.config import normalise_data_source
    except ImportError:
        return dsn
    try:
        return normalise_data_source(dsn)
    except ValueError as error:
        raise InvalidConfig(f"{_name_of(dsn)}: {error}") from None


def _name_of(dsn: str) -> str:
    return DATA_SOURCE_VARIABLE if dsn == os.environ.get(DATA_SOURCE_VARIABLE) else "--dsn"
