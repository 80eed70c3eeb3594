"""From an alias in DATABASES to a connection that is in a transaction."""

from __future__ import annotations

from django.apps import apps
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist

from outbox_core.errors import InvalidConfig, TransactionRequired
from outbox_django.settings import outbox_settings


def write_alias(model: str) -> str:
    """Alias of the database of a model of ours, unless a call names another."""
    return outbox_settings().database or router.db_for_write(apps.get_model("outbox_django", model))


def postgres_connection(alias: str) -> BaseDatabaseWrapper:
    """Django's own connection for this alias.

    Raises:
        InvalidConfig: if the alias does not exist or is no PostgreSQL database.
    """
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        raise InvalidConfig(
            f"database alias {alias!r} is not in DATABASES; it has {', '.join(map(repr, connections))}"
        ) from None
    if connection.vendor != "postgresql":
        raise InvalidConfig(f"database {alias!r} is {connection.vendor}; the outbox needs PostgreSQL")
    return connection


def connection_in_transaction(alias: str, verb: str, subject: str) -> BaseDatabaseWrapper:
    """The alias's connection, seen to be in a transaction (or with autocommit off, when one begins by itself).

    Args:
        alias: alias in DATABASES.
        verb: what is to be done, for the error.
        subject: what is to be written, for the error.

    Raises:
        TransactionRequired: if that database is in autocommit mode and outside an `atomic` block.
        InvalidConfig: if the alias does not exist or is no PostgreSQL database.
    """
    connection = postgres_connection(alias)
    if not connection.in_atomic_block and connection.get_autocommit():
        raise TransactionRequired(
            f"{verb} on database {alias!r} outside a transaction: the {subject} would not be atomic with your data. "
            f"Put both inside `with transaction.atomic({'' if alias == 'default' else f'using={alias!r}'}):`, or set "
            "ATOMIC_REQUESTS"
        )
    return connection
