"""Accounts, payments between them, and each account's entries: the history that Kafka gets.

An account's entries are numbered from 1. Each is one message, so a reader of the topic can tell if one is missing or
out of order. The tables of outbox and inbox belong to the same metadata, for Alembic's autogenerate to know them.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, MetaData, String, UniqueConstraint, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from example_project.payments.schemas import serializers
from outbox_sqlalchemy import Inbox, Outbox, make_hold_table, make_inbox_table, make_outbox_table

_NAMES = {
    "pk": "%(table_name)s_pkey",
    "fk": "%(table_name)s_%(column_0_name)s_fkey",
    "ix": "%(table_name)s_%(column_0_name)s_idx",
    "uq": "%(table_name)s_%(column_0_name)s_key",
    "ck": "%(table_name)s_%(constraint_name)s_check",
}


class Base(DeclarativeBase):
    """The service's tables."""

    metadata = MetaData(naming_convention=_NAMES)


class Account(Base):
    """Somebody's money. A transaction that changes `balance_cents` holds the row's lock."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("balance_cents >= 0", name="balance"),)

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    owner: Mapped[str] = mapped_column(String(80))
    balance_cents: Mapped[int] = mapped_column(BigInteger)
    entries_count: Mapped[int] = mapped_column(default=0)


class Payment(Base):
    """Money that went from one account to another; published to the topic payments.payments."""

    __tablename__ = "payment"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    payer_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    payee_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    amount_cents: Mapped[int] = mapped_column(BigInteger)
    paid_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    # The request's Idempotency-Key, by which its repetition finds the payment.
    idempotency_key: Mapped[str | None] = mapped_column(String(1000), index=True)


class Entry(Base):
    """One line in an account's book; published to the topic payments.entries."""

    __tablename__ = "entry"
    __table_args__ = (UniqueConstraint("account_id", "number"),)

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    number: Mapped[int]
    payment_id: Mapped[UUID] = mapped_column(ForeignKey("payment.id"))
    amount_cents: Mapped[int] = mapped_column(BigInteger)
    balance_after_cents: Mapped[int] = mapped_column(BigInteger)


outbox = Outbox(make_outbox_table(Base.metadata, "payments_outbox"), serializers=serializers())
make_hold_table(Base.metadata, "payments_outbox")
inbox = Inbox(make_inbox_table(Base.metadata, "payments_inbox"))
