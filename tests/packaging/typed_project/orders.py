"""A user's module that type checkers accept in their strictest mode."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from sqlalchemy import Connection, MetaData, Table
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from starlette.requests import Request
from starlette.responses import JSONResponse

import outbox_core
import outbox_django
import outbox_sqlalchemy
from outbox_core import Header, Inbox, OutboxError, OutboxRecord, Stasher, tracing
from outbox_core.claims import ClaimStore, FolderStore, FsspecStore, claim_of
from outbox_core.config import HarvestConfig
from outbox_core.console import Permission, User
from outbox_core.formats.cloud_events import CloudEvent, cloud_event_record
from outbox_core.harvest import EmbeddedHarvester
from outbox_core.schema import TableName, create_table_sql
from outbox_core.testing import StashedRecords, capture_stashed, in_memory_outbox
from outbox_django.testing import OutboxTestMixin
from outbox_sqlalchemy.testing import application_tables

outbox = outbox_sqlalchemy.Outbox("billing.outbox")
stasher = Stasher(TableName("outbox", "billing"), outbox_sqlalchemy.TEXT_LAYOUT)


users = [User("alice", {"view", "operate"}), User("bob", {Permission.VIEW}), User("carol")]


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


def serialize(value: Any) -> bytes:
    """Make bytes of a value, in a format of the user's own."""
    return str(value).encode()


class OwnStore:
    """A user's store of payloads."""

    def put(self, name: str, payload: bytes) -> None:
        """Keep nothing."""

    def get(self, name: str) -> bytes:
        """Have nothing."""
        return name.encode()

    def names(self) -> list[str]:
        """Have nothing."""
        return []

    def delete(self, name: str) -> None:
        """Delete nothing."""


def write_formats(session: Session, folder: Path) -> None:
    """Choose serializers and claim stores, and make events."""
    stores: list[ClaimStore] = [FolderStore(folder), FsspecStore.of_url("s3://bucket/claims"), OwnStore()]
    outbox_sqlalchemy.Outbox(serializer=serialize, claim_store=stores[0], claim_check_above=1000)
    outbox_django.OutboxTable("outbox", serializers={"orders": serialize, "raw": None})
    event = cloud_event_record("orders", {"total": 1}, type="paid", source="/shop", extensions={"number": 1})
    outbox.stash(session, event)
    read = CloudEvent.of([("ce_id", b"1")], b"{}")
    assert_type(read.type, str)
    assert_type(read.data, bytes | None)
    assert_type(claim_of([("outbox-claim", b"x")], b""), str | None)
    OutboxRecord("orders", value={"total": 1}, serializer=serialize)


def trace() -> None:
    """Switch tracing off and on."""
    tracing.disable()
    tracing.enable()


async def harvest_beside(config: HarvestConfig) -> bool:
    """Run a harvester within an application."""
    async with EmbeddedHarvester(config, retry_after=timedelta(seconds=1)) as harvester:
        return assert_type(harvester.health().ok, bool)


async def place_again(request: Request, session: AsyncSession) -> JSONResponse:
    """Answer a repeated request."""
    return JSONResponse({"method": request.method, "open": session.in_transaction()})


@outbox_sqlalchemy.idempotent("orders-api", async_sessionmaker[AsyncSession](), repeated=place_again, required=True)
async def place_once(request: Request, session: AsyncSession) -> JSONResponse:
    """Place an order once."""
    await outbox.astash(session, record_of(UUID(int=0), 1))
    return JSONResponse({"method": request.method})


def count_again(request: Request, session: Session) -> dict[str, int]:
    """Answer a repeated request."""
    return {request.method: int(session.in_transaction())}


def account_of(request: Request) -> str:
    """Name the account that chose a key."""
    return request.headers["Account"]


@outbox_sqlalchemy.idempotent(account_of, sessionmaker[Session](), repeated=count_again)
def count_once(request: Request, session: Session) -> dict[str, int]:
    """Count once, in a thread."""
    return {request.method: int(session.in_transaction())}


def view_again(request: HttpRequest) -> HttpResponse:
    """Answer a repeated request."""
    return HttpResponse(request.body)


@outbox_django.idempotent(lambda request: request.path, repeated=view_again)
def view_once(request: HttpRequest) -> HttpResponse:
    """Do something once."""
    return HttpResponse(request.body)


HEADER: Header = Header("event", b"placed")
ERRORS: tuple[type[OutboxError], ...] = (outbox_core.InvalidRecord, outbox_core.TransactionRequired)
