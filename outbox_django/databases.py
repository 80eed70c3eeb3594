"""From an alias in DATABASES to a connection that is in a transaction."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist

from outbox_core.errors import AcceptanceLost, InvalidConfig, OutboxTableError, TransactionRequired
from outbox_core.schema import TableName
from outbox_core.watched_calls import SHORT_SECONDS, watched
from outbox_django.settings import outbox_settings


def write_alias(model: str) -> str:
    """Return the alias of the database of a model of ours, unless a call names another."""
    return outbox_settings().database or router.db_for_write(apps.get_model("outbox_django", model))


def direct_alias(given: str | None = None, model: str = "Outbox") -> str:
    """Return the alias by which harvesters, commands and the console reach the database that applications write to.

    Where those go through a pooler of transactions it is `OUTBOX["DIRECT_DATABASE"]`. Another alias that is `given`, by
    --database say, counts as it is.
    """
    written = write_alias(model)
    return given if given and given != written else outbox_settings().direct_database or written


def option_of(alias: str) -> str:
    """Return the value of --database that leads every command to this alias, `migrate` included; "" if none does."""
    if alias == outbox_settings().direct_database:
        alias = write_alias("Outbox")  # which `direct_alias` replaces
    return "" if alias == DEFAULT_DB_ALIAS == write_alias("Outbox") else alias


def postgres_connection(alias: str) -> BaseDatabaseWrapper:
    """Return Django's own connection for this alias; InvalidConfig if it is no PostgreSQL database's."""
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        raise InvalidConfig(
            f"database alias {alias!r} is not in DATABASES; it has {', '.join(map(repr, connections))}"
        ) from None
    if connection.vendor != "postgresql":
        raise InvalidConfig(
            f"database {alias!r} is {connection.vendor}; the outbox needs PostgreSQL. In tests use `in_memory_outbox`, "
            "for a whole suite by an autouse fixture (docs/how-to-testing.md)"
        )
    return connection


_SET = "SELECT pg_catalog.set_config('search_path', %s, false), pg_catalog.set_config('lock_timeout', %s, false)"


@contextmanager
def pinned_search_path(connection: BaseDatabaseWrapper, name: TableName, lock_timeout: str = "") -> Iterator[TableName]:
    """Find a table, and use no schema but `pg_catalog` within the block (see `outbox_core.stores.postgres.connection`).

    For commands that an operator runs, perhaps with more rights than those have who may create functions in a schema.
    Within the block statements wait for a lock as long as `lock_timeout` says, if it is given.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_catalog.current_setting('search_path'), pg_catalog.current_setting('lock_timeout'), "
            "pg_catalog.to_regclass(%s)::oid, pg_catalog.pg_backend_pid()",
            [name.quoted],
        )
        *before, oid, pid = cursor.fetchone()
        if pid != connection.connection.info.backend_pid:
            _refuse_pooler_of_transactions(connection)
        cursor.execute(_SET, ["pg_catalog, pg_temp", lock_timeout or before[1]])
        try:
            cursor.execute(
                "SELECT nspname, relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = %s",
                [oid],
            )
            place = cursor.fetchone()
            yield TableName(place[1], place[0]) if place and not name.schema else name
        finally:
            # After an error in a transaction that is not ours its rollback restores the path.
            if not connection.needs_rollback and connection.is_usable():
                cursor.execute(_SET, before)


@contextmanager
def bounded(alias: str, purpose: str) -> Iterator[None]:
    """Connect, and give the connection up if the block's statements are not answered in time (see `watched_calls`)."""
    connection = connections[alias]
    connection.ensure_connection()
    with watched(connection, SHORT_SECONDS, purpose):
        yield


@contextmanager
def whole_atomic(alias: str, *, durable: bool = False) -> Iterator[BaseDatabaseWrapper]:
    """Run a block in a transaction of its own, or a savepoint, which also ends with it if inner blocks were left open.

    Django would end the last of those instead, and neither commit nor roll back. Raises AcceptanceLost if there are.
    """
    with transaction.atomic(using=alias, durable=durable):
        connection = connections[alias]
        depth = len(connection.atomic_blocks)
        try:
            yield connection
            _refuse_inner_blocks(connection, depth)
        except BaseException as error:
            if len(connection.atomic_blocks) > depth:
                end_generators(error)
            while len(connection.atomic_blocks) > depth:
                connection.atomic_blocks[-1].__exit__(type(error), error, None)
            raise


def _refuse_inner_blocks(connection: BaseDatabaseWrapper, depth: int) -> None:
    if len(connection.atomic_blocks) > depth:
        raise AcceptanceLost(
            f"the handler has left an `atomic` block of database {connection.alias!r} open, maybe in a generator: end "
            "it, so that its savepoint is released, before the handler returns"
        )


def end_generators(error: BaseException | None) -> None:
    """End generators that an error's traceback keeps alive, or garbage: one inside `atomic` may end another's block."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _refuse_pooler_of_transactions(connection: BaseDatabaseWrapper) -> None:
    from outbox_core.stores.postgres.connection import LENT_BY_TRANSACTION, is_lent_by_transaction

    with closing(connection.copy()) as second:
        if is_lent_by_transaction(connection, second):
            raise OutboxTableError(LENT_BY_TRANSACTION)


def connection_in_transaction(alias: str, verb: str, subject: str) -> BaseDatabaseWrapper:
    """Return the alias's connection in a transaction, or with autocommit off; else raise TransactionRequired."""
    connection = postgres_connection(alias)
    if not connection.in_atomic_block and connection.get_autocommit():
        raise TransactionRequired(
            f"{verb} on database {alias!r} outside a transaction: the {subject} would not be atomic with your data. "
            f"Put both inside `with transaction.atomic({'' if alias == 'default' else f'using={alias!r}'}):`"
            f"{'' if connection.settings_dict['ATOMIC_REQUESTS'] else ', or set ATOMIC_REQUESTS'}"
        )
    return connection
