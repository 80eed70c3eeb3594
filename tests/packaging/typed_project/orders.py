"""A user's module that type checkers accept in their strictest mode."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import assert_type
from uuid import UUID

from sqlalchemy import Connection, MetaData, Table
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox_core
import outbox_django
import outbox_sqlalchemy
from outbox_core import Header, Inbox, OutboxError, OutboxRecord, Stasher
from outbox_core.schema import TableName, create_table_sql
from outbox_core.testing import StashedRecords, capture_stashed, in_memory_outbox
from outbox_django.testing import OutboxTestMixin
from outbox_sqlalchemy.testing import application_tables

outbox = outbox_sqlalchemy.Outbox("billing.outbox")
stasher = Stasher(TableName("outbox", "billing"), outbox_sqlalchemy.TEXT_LAYOUT)


def record_of(order: UUID, total: int) -> OutboxRecord:
    """Make a record of anything that a record takes."""
    pairs: list[tuple[str, bytes | str | None]] = [("event", "placed"), ("raw", b"1"), ("none", None)]
    OutboxRecord("orders", order, {"total": total}, {"event": "placed"})
    return OutboxRecord(topic="orders", key=order, value=b"avro", headers=pairs, partition=3)


def place(session: Session, connection: Connection, order: UUID) -> None:
    """Stash on sessions and connections."""
    outbox.stash(session, record_of(order, 1))
    outbox_sqlalchemy.stash(connection, record_of(order, 1))
    outbox_sqlalchemy.stash_many(session, (record_of(order, total) for total in range(3)))
    if assert_type(outbox_sqlalchemy.accept(session, "billing", order), bool):
        outbox_django.stash(record_of(order, 1), using="billing")
        outbox_django.OutboxTable("outbox", using="billing").stash_many([])


async def place_later(session: AsyncSession, order: UUID) -> None:
    """Stash on an asynchronous session."""
    await outbox.astash(session, record_of(order, 1))
    assert_type(await outbox_sqlalchemy.aaccept(session, "billing", order), bool)


class Driver:
    """A connection of some driver."""

    def cursor(self) -> object:
        """Make a cursor."""
        return object()

    def commit(self) -> None:
        """Commit."""


def place_by_driver(connection: Driver) -> str:
    """Stash on what looks like a DB-API connection."""
    with stasher.prepare(connection) as prepared:
        prepared.stash(record_of(UUID(int=0), 1))
    assert_type(Inbox("inbox").prune(connection, timedelta(days=7), batch=10), int)
    assert_type(outbox_sqlalchemy.make_outbox_table(MetaData()), Table)
    assert_type(application_tables(MetaData()), list[Table])
    return create_table_sql(TableName.parse("outbox")) + outbox_core.__version__


@contextmanager
def captured() -> Generator[StashedRecords, None, None]:
    """Capture in a user's own fixture."""
    capture: AbstractContextManager[StashedRecords] = in_memory_outbox(require_transaction=False)
    with capture as records, capture_stashed():
        yield records


class OrderTests(OutboxTestMixin):
    """A user's test case."""

    outbox_in_memory = True

    def test_an_order_is_announced(self) -> None:
        """Ask for records in all ways."""
        found = self.outbox_records.assert_stashed("orders", key=UUID(int=1), value={"total": 1}, headers={"a": None})
        assert_type(found, OutboxRecord)
        assert_type(self.outbox_records[0], OutboxRecord)
        assert_type(self.outbox_records[1:], list[OutboxRecord])
        assert_type(self.outbox_records.matching("orders"), list[OutboxRecord])
        self.outbox_records.assert_stashed(..., key=None, value=..., partition=None, count=2)
        self.outbox_records.assert_not_stashed()


HEADER: Header = Header("event", b"placed")
ERRORS: tuple[type[OutboxError], ...] = (outbox_core.InvalidRecord, outbox_core.TransactionRequired)
