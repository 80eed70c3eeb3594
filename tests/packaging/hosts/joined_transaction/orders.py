"""A service with SQLAlchemy: orders, which are announced, and their consumer, which bills them once."""

import json

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outbox_sqlalchemy as outbox


class Base(DeclarativeBase):
    """The service's models, with the tables of outbox and inbox."""


outbox.make_outbox_table(Base.metadata)
outbox.make_inbox_table(Base.metadata)


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Bill(Base):
    """The bill of an order."""

    __tablename__ = "bills"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]


def place(session, number):
    """Place an order and commit, as the service's endpoints do."""
    session.add(Order(number=number))
    outbox.stash(session, outbox.OutboxRecord("orders", number, {"order": number}))
    session.commit()


def bill(session, message):
    """Bill an order; the handler of the service's consumer."""
    session.add(Bill(number=json.loads(message.value())["order"]))
