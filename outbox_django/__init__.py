"""Transactional outbox for Django: write Kafka messages in your database transaction.

    import outbox_django as outbox

    with transaction.atomic():
        order.save()
        outbox.stash(outbox.OutboxRecord(topic="orders", key=order.pk, value={"total": 42}))

accept("payments-api", key) in a transaction tells whether a message comes for the first time; idempotent() does so for
the requests of a view, consume() runs a handler for each record of a Kafka consumer, once.

Add "outbox_django" to INSTALLED_APPS and run `manage.py migrate`; `manage.py run_harvester` publishes.
"""

from outbox_core.errors import (
    AcceptanceLost,
    InvalidMessageId,
    InvalidRecord,
    OutboxError,
    SerializationFailed,
    TransactionRequired,
)
from outbox_core.record import Header, OutboxRecord
from outbox_django.consuming import consume
from outbox_django.holding import holds
from outbox_django.idempotency import idempotent
from outbox_django.inbox import InboxTable, accept, confirm
from outbox_django.stashing import OutboxTable, stash, stash_many

__all__ = [
    "AcceptanceLost",
    "Header",
    "InboxTable",
    "InvalidMessageId",
    "InvalidRecord",
    "OutboxError",
    "OutboxRecord",
    "OutboxTable",
    "SerializationFailed",
    "TransactionRequired",
    "accept",
    "confirm",
    "consume",
    "holds",
    "idempotent",
    "stash",
    "stash_many",
]


def __dir__() -> list[str]:
    """Return the public names, without the modules that they come from."""
    return __all__
