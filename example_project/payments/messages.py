"""What the service tells the world: one Kafka record for each payment and for each entry it makes.

The headers carry the row's own id and its number within the key, so that a consumer can check that it got everything,
in order, without opening values.
"""

from example_project.payments.models import Entry, Payment
from outbox_sqlalchemy import OutboxRecord

PAYMENTS = "payments.payments"
ENTRIES = "payments.entries"


def payment_made(payment: Payment) -> OutboxRecord:
    """Who paid whom, and how much."""
    value = {"payer": payment.payer_id, "payee": payment.payee_id, "amount_cents": payment.amount_cents}
    headers = {"event": "payment-made", "event-id": str(payment.id), "number": "1"}
    return OutboxRecord(topic=PAYMENTS, key=payment.id, value=value, headers=headers)


def entry_made(entry: Entry) -> OutboxRecord:
    """What an account has now, and why."""
    value = {
        "payment": entry.payment_id,
        "amount_cents": entry.amount_cents,
        "balance_cents": entry.balance_after_cents,
    }
    headers = {"event": "entry-made", "event-id": str(entry.id), "number": str(entry.number)}
    return OutboxRecord(topic=ENTRIES, key=entry.account_id, value=value, headers=headers)
