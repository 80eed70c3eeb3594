"""The e-mails of the shop: a job for each order, done by workers of their own.

The job is stashed in the transaction that places the order, so there is one e-mail for each order that exists, and none
for an order that was rolled back. Workers (`manage.py send_emails`) share the jobs. One that dies leaves its e-mail to
another; one that fails for an e-mail tries it again later, and sets it aside after ten attempts.

A worker that dies after sending and before acknowledging leaves a second e-mail. That is rare, and better than none.
"""

from __future__ import annotations

import functools
import json
import re

from django.conf import settings
from django.core.mail import EmailMessage
from django.db import connection

from example_project.shop.models import Order
from outbox_queue import Message, Queue, QueueConfig, QueueService, Reject


@functools.cache
def order_emails() -> Queue:
    """Return the queue of orders whose customers await an e-mail."""
    return QueueService(QueueConfig(**settings.QUEUES)).queue("order-emails")


def request_confirmation(order: Order) -> None:
    """Queue an e-mail to the customer, in the current transaction."""
    order_emails().stash(connection, {"order": order.pk})


def send_confirmation(message: Message) -> None:
    """Send the customer an e-mail with the order; the handler of the queue.

    Raises:
        Reject: if the job can never be done.
    """
    order = _order_of(message)
    lines = [f"{line.quantity} x {line.product.name}" for line in order.lines.select_related("product")]
    EmailMessage(
        subject=f"Your order {order.pk}",
        body="\n".join([f"Dear {order.customer},", "", "we have received your order:", *lines]),
        to=[_address_of(order.customer)],
        headers={"Message-ID": f"<order-{order.pk}@shop.example.org>"},  # repeats can be recognised
    ).send()


def _address_of(customer: str) -> str:
    """Return an address in our own domain for any name: `@`, a comma or a line break would make another one of it."""
    words = re.findall(r"\w+", customer.lower())
    return f"{'.'.join(words) or 'customer'}@example.org"


def _order_of(message: Message) -> Order:
    try:
        number = int(json.loads(message.payload)["order"])
    except (ValueError, KeyError, TypeError):
        raise Reject("the job names no order") from None
    order = Order.objects.filter(pk=number).first()
    if order is None:
        raise Reject(f"there is no order {number}")
    return order
