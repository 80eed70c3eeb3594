"""The shop's ledger, which uses SQLAlchemy, with the outbox among its tables."""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outbox_sqlalchemy as outbox


class Base(DeclarativeBase):
    """The ledger's models."""


outbox.make_outbox_table(Base.metadata)


class Entry(Base):
    """An entry."""

    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)


def write(session, number):
    """Write an entry, and announce it."""
    session.add(Entry(id=number))
    outbox.stash(session, outbox.OutboxRecord("entries", number))
    session.commit()
