"""The e-mails of the shop: a task for each order, run by workers of their own.

The task is enqueued in the transaction that places the order, so there is one e-mail for each order that exists, and
none for an order that was rolled back. Workers (`manage.py run_tasks`) share the tasks. One that dies leaves its e-mail
to another; one that fails is tried again later, and set aside after ten attempts.

A worker that dies after sending and before acknowledging leaves a second e-mail. That is rare, and better than none.
"""

from __future__ import annotations

import re

import django
from django.core.mail import EmailMessage

from example_project.shop.models import Order
from outbox_queue import Reject

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task(queue_name="order-emails")
def send_confirmation(order_id: int) -> None:
    """Send the customer an e-mail with the order.

    Raises:
        Reject: if there is no such order, however often it is tried.
    """
    order = Order.objects.filter(pk=order_id).first()
    if order is None:
        raise Reject(f"there is no order {order_id}")
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
