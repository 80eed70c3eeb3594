"""Stash Kafka messages in the transaction of an SQLAlchemy session or connection.

    import outbox_sqlalchemy as outbox

    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.stash(session, outbox.OutboxRecord(topic="orders", key=order.number, value={"total": 42}))

The four functions write to the table `outbox`; for another name, a table of the application's own metadata, or several
outboxes, make an `Outbox`. They never begin, commit or roll back, and refuse a connection in AUTOCOMMIT.

Stash last, after the row locks are taken: that makes the order of the messages the order of the changes.
"""

from outbox_core.errors import InvalidConfig, InvalidRecord, OutboxError, OutboxTableError, TransactionRequired
from outbox_core.record import Header, OutboxRecord
from outbox_core.schema import BINARY_LAYOUT, TEXT_LAYOUT, TableLayout
from outbox_sqlalchemy.outbox import Outbox, WrongSession
from outbox_sqlalchemy.table import OutboxMixin, layout_of, make_outbox_table
from outbox_sqlalchemy.url import sqlalchemy_url

__all__ = [
    "BINARY_LAYOUT",
    "TEXT_LAYOUT",
    "Header",
    "InvalidConfig",
    "InvalidRecord",
    "Outbox",
    "OutboxError",
    "OutboxMixin",
    "OutboxRecord",
    "OutboxTableError",
    "TableLayout",
    "TransactionRequired",
    "WrongSession",
    "astash",
    "astash_many",
    "layout_of",
    "make_outbox_table",
    "sqlalchemy_url",
    "stash",
    "stash_many",
]

_outbox = Outbox()
stash = _outbox.stash
stash_many = _outbox.stash_many
astash = _outbox.astash
astash_many = _outbox.astash_many
