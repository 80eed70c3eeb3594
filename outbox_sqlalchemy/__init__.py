"""Stash and accept Kafka messages in the transaction of an SQLAlchemy session or connection.

    import outbox_sqlalchemy as outbox

    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.stash(session, outbox.OutboxRecord(topic="orders", key=order.number, value={"total": 42}))

Stash last, after the row locks are taken: that makes the order of the messages the order of the changes. `accept`
tells whether a message comes for the first time, `idempotent` does so for the requests of an endpoint, and `consume`
handles each record of a Kafka consumer once.

The functions use the tables `outbox` and `inbox`; make an `Outbox` or `Inbox` for others. They never begin, commit or
roll back, and refuse a connection in AUTOCOMMIT.
"""

from outbox_core.errors import (
    AcceptanceLost,
    InvalidConfig,
    InvalidMessageId,
    InvalidRecord,
    OutboxError,
    OutboxTableError,
    SerializationFailed,
    TransactionRequired,
)
from outbox_core.record import Header, OutboxRecord
from outbox_core.schema import BINARY_LAYOUT, TEXT_LAYOUT, TableLayout
from outbox_sqlalchemy.consuming import consume
from outbox_sqlalchemy.idempotency import idempotent
from outbox_sqlalchemy.inbox import Inbox
from outbox_sqlalchemy.outbox import Outbox
from outbox_sqlalchemy.sessions import WrongSession
from outbox_sqlalchemy.table import (
    OutboxMixin,
    layout_of,
    make_history_tables,
    make_hold_table,
    make_inbox_table,
    make_outbox_table,
)
from outbox_sqlalchemy.url import sqlalchemy_url

__all__ = [
    "BINARY_LAYOUT",
    "TEXT_LAYOUT",
    "AcceptanceLost",
    "Header",
    "Inbox",
    "InvalidConfig",
    "InvalidMessageId",
    "InvalidRecord",
    "Outbox",
    "OutboxError",
    "OutboxMixin",
    "OutboxRecord",
    "OutboxTableError",
    "SerializationFailed",
    "TableLayout",
    "TransactionRequired",
    "WrongSession",
    "aaccept",
    "accept",
    "aconfirm",
    "astash",
    "astash_many",
    "confirm",
    "consume",
    "idempotent",
    "layout_of",
    "make_history_tables",
    "make_hold_table",
    "make_inbox_table",
    "make_outbox_table",
    "sqlalchemy_url",
    "stash",
    "stash_many",
]


def __dir__() -> list[str]:
    """Return the public names, without the modules that they come from."""
    return __all__


_outbox = Outbox()
stash = _outbox.stash
stash_many = _outbox.stash_many
astash = _outbox.astash
astash_many = _outbox.astash_many

_inbox = Inbox()
accept = _inbox.accept
aaccept = _inbox.aaccept
confirm = _inbox.confirm
aconfirm = _inbox.aconfirm
