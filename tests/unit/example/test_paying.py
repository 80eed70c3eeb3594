"""The payment service's transaction, on SQLite and with an outbox in memory."""

import asyncio
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from example_project.payments import schemas
from example_project.payments.messages import payment_made
from example_project.payments.models import Account, Base, Payment
from example_project.payments.paying import TooLittleMoney, UnknownAccount, pay
from outbox_core.errors import SerializationFailed
from outbox_core.formats.cloud_events import CloudEvent
from outbox_core.testing.kafka import InProcessKafka
from outbox_sqlalchemy import Outbox
from outbox_sqlalchemy.testing import application_tables
from tests.schema_registry import registry


@asynccontextmanager
async def _service():
    """Yield a factory of sessions over a database in memory with two accounts, one of them empty."""
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all, tables=application_tables(Base.metadata))
    async with AsyncSession(engine) as session, session.begin():
        session.add_all([Account(id=1, owner="Ada", balance_cents=1000), Account(id=2, owner="Bo", balance_cents=0)])
    yield async_sessionmaker(engine, expire_on_commit=False)
    await engine.dispose()


def test_a_payment_announces_itself_and_its_entries(in_memory_outbox):
    """Consumers of the entries, in order, get the balances of both accounts."""

    async def pay_twice():
        async with _service() as sessions:
            for cents in (300, 100):
                async with sessions() as session, session.begin():
                    yield await pay(session, 1, 2, cents)

    async def collect():
        return [payment async for payment in pay_twice()]

    first, second = asyncio.run(collect())
    payment = {"payer": 1, "payee": 2, "amount_cents": 300}
    in_memory_outbox.assert_stashed("payments.payments", key=first.id, value=payment, count=1)
    in_memory_outbox.assert_stashed(
        "payments.payments", key=second.id, headers={"ce_type": "com.example.payment.made", "ce_id": str(second.id)}
    )
    assert in_memory_outbox.committed == in_memory_outbox

    balances = {}

    def book(message):
        event = CloudEvent.of(message.headers(), message.value())
        assert event.type == "com.example.payment.entry"
        balances.setdefault(message.key(), []).append(event.json()["balance_cents"])

    assert InProcessKafka(in_memory_outbox).deliver({"payments.entries": book}) == 4
    assert balances == {b"1": [700, 600], b"2": [300, 400]}


@pytest.mark.parametrize(
    ("payee", "cents", "error"), [(2, 1001, TooLittleMoney), (3, 1, UnknownAccount), (2, 500, None)]
)
def test_a_payment_that_is_not_committed_announces_nothing(in_memory_outbox, payee, cents, error):
    """Neither a refused payment nor one that is rolled back by its caller is announced."""

    async def try_to_pay():
        async with _service() as sessions, sessions() as session:
            await pay(session, 1, payee, cents)
            await session.rollback()

    if error is None:
        asyncio.run(try_to_pay())
    else:
        with pytest.raises(error):
            asyncio.run(try_to_pay())
    in_memory_outbox.assert_not_stashed()
    assert len(in_memory_outbox.rolled_back) == (0 if error else 3)


def test_payments_have_a_schema(in_memory_outbox):
    """With a schema registry payments are written with their schema's id, and what does not fit it is refused."""
    with registry() as running:
        options = schemas.serializers({"PAYMENTS_SCHEMA_REGISTRY_URL": running.url})
        outbox = Outbox("payments_outbox", serializers=options)
        payment = Payment(id=uuid4(), payer_id=1, payee_id=2, amount_cents=300)
        outbox.stash(None, payment_made(payment))
        with pytest.raises(SerializationFailed, match=r"for topic 'payments\.payments'"):
            outbox.stash(None, payment_made(Payment(id=uuid4(), payer_id=1, payee_id=2, amount_cents=0)))
    (record,) = in_memory_outbox
    assert CloudEvent.of(record.headers, record.value.encode()).json() == {"payer": 1, "payee": 2, "amount_cents": 300}
    assert "__value_schema_id" in dict(record.headers)
    assert schemas.serializers({}) == {}
