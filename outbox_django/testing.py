"""Help for tests on Django: a mix-in for its test cases, and rollbacks as `outbox_core.testing` sees them.

    class OrderTests(OutboxTestMixin, TestCase):
        def test_an_order_is_announced(self):
            self.client.post("/orders/", ...)
            self.outbox_records.assert_stashed("orders", key=1, value={"total": 42})

The captures of `outbox_core.testing` and its pytest fixtures work on Django's connections as well, with pytest-django.
While a capture is open, the connections that were stashed on tell it of their commits, rollbacks and savepoints.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any, ClassVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox_core.errors import TransactionRequired
from outbox_core.stasher import Interceptor
from outbox_core.testing import StashedRecords, capture_stashed, in_memory_outbox
from outbox_core.testing.interception import interception
from outbox_django.databases import connection_in_transaction

__all__ = ["OutboxTestMixin"]


class OutboxTestMixin(unittest.TestCase):
    """A mix-in for Django's test cases: it captures the records that each test stashes.

    Put it before `TestCase`, `TransactionTestCase` or `SimpleTestCase`. Records that `setUpTestData` stashes are not
    captured, those of `setUp` are. Works inside the transaction of `TestCase`, whose rollback comes after the test.

    Attributes:
        outbox_records: the records of this test.
        outbox_in_memory: set it to True in a class whose database is not PostgreSQL, or that uses none: records are
            kept in memory then.
        outbox_requires_transaction: of `outbox_core.testing.in_memory_outbox`.
    """

    outbox_records: StashedRecords
    outbox_in_memory: ClassVar[bool] = False
    outbox_requires_transaction: ClassVar[bool] = True

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Run the test within a capture, which its `setUp` and `tearDown` see, too."""
        capture = (
            in_memory_outbox(require_transaction=self.outbox_requires_transaction)
            if self.outbox_in_memory
            else capture_stashed()
        )
        with capture as self.outbox_records:
            return super().run(result)


def intercepted_connection(alias: str, interceptor: Interceptor) -> BaseDatabaseWrapper:
    """Return the connection of a stash in a test, followed; one that is kept in memory may be of any database.

    Raises:
        TransactionRequired: as of a stash outside tests.
    """
    if interceptor.writes:
        connection = connection_in_transaction(alias, "stash", "record")
    else:
        connection = connections[alias]
        # Not `get_autocommit()`, which would connect: tests without a database forbid that.
        in_transaction = connection.in_atomic_block or not (connection.connection is None or connection.autocommit)
        if interception.requires_transaction and not in_transaction:
            raise TransactionRequired(
                f"stash on database {alias!r} outside a transaction: the record would not be atomic with your data. "
                "Put both inside `with transaction.atomic():`; to test code whose caller does that, say "
                "in_memory_outbox(require_transaction=False)"
            )
    interception.follow(connection, lambda: _Following(connection).end)
    return connection


class _Following:
    """Wrappers around the methods by which Django ends the transactions and savepoints of one connection."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._savepoints: dict[str, int] = {}
        self._wrapped: list[str] = []
        self._wrap("savepoint", self._begun)
        self._wrap("savepoint_rollback", self._undone)
        self._wrap("commit", lambda *_: interception.committed(connection))
        self._wrap("rollback", lambda *_: interception.rolled_back(connection))
        self._wrap("close", lambda *_: self._closed())
        # The records so far were stashed before the transaction that begins, or outside any.
        self._wrap("set_autocommit", lambda *_: interception.committed(connection))

    def end(self) -> None:
        for name in self._wrapped:
            delattr(self._connection, name)

    def _wrap(self, name: str, note: Callable[..., None]) -> None:
        wrapped = getattr(self._connection, name)

        def method(*arguments: Any, **options: Any) -> Any:
            result = wrapped(*arguments, **options)
            note(result, *arguments)
            return result

        setattr(self._connection, name, method)
        self._wrapped.append(name)

    def _begun(self, sid: str | None) -> None:
        if sid is not None:
            self._savepoints[sid] = interception.moment()

    def _undone(self, _: None, sid: str) -> None:
        # One that was begun before the first stash is unknown, and takes all records of this connection along.
        interception.rolled_back(self._connection, after=self._savepoints.get(sid, 0))

    def _closed(self) -> None:
        was_open = self._connection.connection is None and not self._connection.autocommit
        if self._connection.closed_in_transaction or was_open:
            interception.rolled_back(self._connection)
