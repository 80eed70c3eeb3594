"""A user's mistakes: type checkers report the lines marked as wrong, and no others."""

from datetime import timedelta

from django.http import HttpRequest, HttpResponse
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox_django
import outbox_sqlalchemy
from outbox_core import Inbox, OutboxRecord, Stasher, tracing
from outbox_core.claims import FolderStore
from outbox_core.formats.cloud_events import CloudEvent, cloud_event_record
from outbox_core.harvest import EmbeddedHarvester
from outbox_core.testing import StashedRecords


def mistakes(session: Session, later: AsyncSession, records: StashedRecords) -> None:
    """Make one mistake in each line that is marked."""
    record = OutboxRecord("orders", 1)
    OutboxRecord(7)  # wrong
    OutboxRecord("orders", 1.5)  # wrong
    OutboxRecord("orders", headers={"event": 1})  # wrong
    OutboxRecord("orders", partition="3")  # wrong
    OutboxRecord("orders", kee=1)  # wrong
    Stasher().stash(session, {"topic": "orders"})  # wrong
    outbox_sqlalchemy.stash(later, record)  # wrong
    outbox_sqlalchemy.stash(session, record, using="billing")  # wrong
    outbox_sqlalchemy.stash_many(session, record)  # wrong
    outbox_sqlalchemy.accept(session, "billing")  # wrong
    outbox_sqlalchemy.table_of(session)  # wrong
    outbox_django.stash("orders")  # wrong
    outbox_django.stash(record, using=1)  # wrong
    Inbox(7)  # wrong
    timedelta(seconds=records.assert_stashed("orders").topic)  # wrong
    records.assert_stashed("orders", key=1.5)  # wrong
    records.assert_stashed("orders", count="one")  # wrong
    records.assert_not_stashed("orders", count=1)  # wrong
    Stasher(claim_store=7, claim_check_above=1)  # wrong
    Stasher(serialiser=str)  # wrong
    Stasher(serializer="json")  # wrong
    FolderStore(7)  # wrong
    CloudEvent.of([("ce_id", b"1")], "text")  # wrong
    cloud_event_record("orders", {}, type="paid")  # wrong
    tracing.enable("console")  # wrong
    EmbeddedHarvester({"data_source": "postgresql:///"})  # wrong
    outbox_sqlalchemy.idempotent("orders-api")  # wrong
    outbox_django.idempotent(7, repeated=view)  # wrong
    outbox_django.idempotent("orders-api")  # wrong


def view(request: HttpRequest) -> HttpResponse:
    """Answer."""
    return HttpResponse(request.body)


async def later_mistakes(session: Session, later: AsyncSession) -> None:
    """Take one kind of session for the other."""
    record = OutboxRecord("orders", 1)
    await outbox_sqlalchemy.astash(later, record)
    await outbox_sqlalchemy.astash(session, record)  # wrong
