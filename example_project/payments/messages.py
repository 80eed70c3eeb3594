"""The messages of the service: one CloudEvent for each payment and for each entry.

An event's id is the row's own, and the extension `number` its number within the key, so that a consumer can check that
it got everything, in order, without opening values.
"""

from example_project.payments.models import Entry, Payment
from example_project.payments.schemas import PAYMENTS
from outbox_core.formats.cloud_events import cloud_event_record
from outbox_sqlalchemy import OutboxRecord

ENTRIES = "payments.entries"
SOURCE = "/payments"


def payment_made(payment: Payment) -> OutboxRecord:
    """Return the event of a payment: payer, payee and amount."""
    return cloud_event_record(
        PAYMENTS,
        {"payer": payment.payer_id, "payee": payment.payee_id, "amount_cents": payment.amount_cents},
        type="com.example.payment.made",
        source=SOURCE,
        id=payment.id,
        key=payment.id,
        extensions={"number": 1},
    )


def entry_made(entry: Entry) -> OutboxRecord:
    """Return the event of an entry: the account's new balance, and the reason."""
    return cloud_event_record(
        ENTRIES,
        {
            "payment": entry.payment_id,
            "amount_cents": entry.amount_cents,
            "balance_cents": entry.balance_after_cents,
        },
        type="com.example.payment.entry",
        source=SOURCE,
        id=entry.id,
        key=entry.account_id,
        extensions={"number": entry.number},
    )
