"""Transactional outbox for Django: write Kafka messages in your database transaction.

import outbox_django as outbox

with transaction.atomic():
    order.save()
    outbox.stash(outbox.OutboxRecord(topic="orders", key=order.pk, value={"total": 42}))

Add "outbox_django" to INSTALLED_APPS and run `manage.py migrate`; `manage.py run_harvester` publishes.
"""

from outbox_core.errors import InvalidRecord, OutboxError, TransactionRequired
from outbox_core.record import Header, OutboxRecord
from outbox_django.stashing import OutboxTable, stash, stash_many

__all__ = [
    "Header",
    "InvalidRecord",
    "OutboxError",
    "OutboxRecord",
    "OutboxTable",
    "TransactionRequired",
    "stash",
    "stash_many",
]
