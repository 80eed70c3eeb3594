"""Accepting messages in a Django transaction.

    with transaction.atomic():
        if accept("payments-api", request.headers["Idempotency-Key"]):
            Payment.objects.create(...)

The database is, in this order: the `using` of the call, the `using` of the `InboxTable`, `OUTBOX["DATABASE"]`, or the
routers' `db_for_write(Inbox)`. See `outbox_core.inbox` for the promise.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from outbox_core.errors import OutboxError
from outbox_core.inbox import PRUNE_BATCH, Inbox, confirming
from outbox_django.databases import connection_in_transaction, postgres_connection, write_alias
from outbox_django.settings import outbox_settings


class InboxTable:
    """One of several inbox tables of a project: `InboxTable("billing_inbox", using="billing").accept(...)`.

    Immutable, and may be made at module level. `using` is the alias of its database, unless a call names another.
    """

    __slots__ = ("_inbox", "_using")

    def __init__(self, name: str, *, using: str | None = None) -> None:
        self._inbox = Inbox(name)
        self._using = using

    def __repr__(self) -> str:
        return f"InboxTable({str(self._inbox.table)!r}, using={self._using!r})"

    def accept(
        self, source: str | int | UUID, message_id: str | bytes | int | UUID, *, using: str | None = None
    ) -> bool:
        """Accept a message in the current transaction, as `outbox_django.accept` does."""
        return self._inbox.accept(self._connection(using, "accept"), source, message_id)

    def confirm(
        self, source: str | int | UUID, message_id: str | bytes | int | UUID, *, using: str | None = None
    ) -> None:
        """Make sure that the current transaction can commit what it has accepted, as `outbox_django.confirm` does."""
        with confirming(TransactionManagementError):
            self._inbox.confirm(self._connection(using, "confirm"), source, message_id)

    def begin(self, *, using: str | None = None) -> None:
        """Mark the transaction of work that accepts no message, for `confirm_begun`; no other database needs that."""
        if connections[self.alias(using)].vendor == "postgresql":
            self._inbox.begin(self._connection(using, "begin"))

    def confirm_begun(self, *, using: str | None = None) -> None:
        """Make sure that a transaction can commit since it was marked, or raise AcceptanceLost, as `confirm` does."""
        if connections[self.alias(using)].vendor == "postgresql":
            with confirming(TransactionManagementError):
                self._inbox.confirm_begun(self._connection(using, "confirm"))

    def _connection(self, using: str | None, verb: str) -> BaseDatabaseWrapper:
        return connection_in_transaction(self.alias(using), verb, "acceptance")

    def prune(self, older_than: timedelta, *, batch: int = PRUNE_BATCH, using: str | None = None) -> int:
        """Forget messages accepted longer ago, in transactions of `batch` messages; return their number.

        Raises `OutboxError` inside an `atomic` block.
        """
        connection = postgres_connection(self.alias(using))
        if connection.in_atomic_block:
            raise OutboxError("prune commits after each batch; call it outside `transaction.atomic()`")
        return self._inbox.prune(connection, older_than, batch=batch)

    def alias(self, using: str | None = None) -> str:
        """Return the alias of the database that a call works on."""
        return using or self._using or write_alias("Inbox")


def accept(source: str | int | UUID, message_id: str | bytes | int | UUID, *, using: str | None = None) -> bool:
    """Accept a message in the current transaction. Call it first, before the message has any effect.

    Args:
        source: an API and its client, or a consumer group, whose ids are different from each other.
        message_id: the message, among those of its source. Compared exactly, upper and lower case included.
        using: alias of the database whose transaction it belongs to; without it see the module's docstring.

    Returns:
        True the first time; False for a repeat: the transaction of the first is committed.

    Raises:
        TransactionRequired: if that database is in autocommit mode and outside an `atomic` block; nothing was written.
        InvalidMessageId: if source or message id is empty, too long or no text; nothing was sent to the database.
        InvalidConfig: if the alias does not exist or is no PostgreSQL database, or the OUTBOX setting is wrong.
        django.db.Error: of a failed statement, for example if the table is missing.
    """
    return configured_inbox().accept(source, message_id, using=using)


def confirm(source: str | int | UUID, message_id: str | bytes | int | UUID, *, using: str | None = None) -> None:
    """Make sure that the current transaction can commit what it has accepted. Call it last in the `atomic` block.

    `consume` and `idempotent` do. It takes one round trip.

    Args:
        source: as of `accept`.
        message_id: as of `accept`.
        using: as of `accept`.

    Raises:
        AcceptanceLost: if an error has aborted the transaction, or if it was ended since `accept` returned True.
    """
    configured_inbox().confirm(source, message_id, using=using)


def configured_inbox() -> InboxTable:
    """Return the table that OUTBOX["INBOX_TABLE"] names."""
    return _table(outbox_settings().inbox_table.quoted)


@lru_cache(maxsize=16)
def _table(name: str) -> InboxTable:
    return InboxTable(name)
