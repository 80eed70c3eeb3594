"""The messages of the service: one Kafka record for each payment and for each entry.

The headers carry the row's own id and its number within the key, so that a consumer can check that it got everything,
in order, without opening values.
"""

from example_project.payments.models import Entry, Payment
from outbox_sqlalchemy import OutboxRecord

PAYMENTS = "payments.payments"
ENTRIES = "payments.entries"


def payment_made(payment: Payment) -> OutboxRecord:
    """Return the record of a payment: payer, payee and amount."""
    value = {"payer": payment.payer_id, "payee": payment.payee_id, "amount_cents": payment.amount_cents}
    headers = {"event": "payment-made", "event-id": str(payment.id), "number": "1"}
    return OutboxRecord(topic=PAYMENTS, key=payment.id, value=value, headers=headers)


def entry_made(entry: Entry) -> OutboxRecord:
    """Return the record of an entry: the account's new balance, and the reason."""
    value = {
        "payment": entry.payment_id,
        "amount_cents": entry.amount_cents,
        "balance_cents": entry.balance_after_cents,
    }
    headers = {"event": "entry-made", "event-id": str(entry.id), "number": str(entry.number)}
    return OutboxRecord(topic=ENTRIES, key=entry.account_id, value=value, headers=headers)
