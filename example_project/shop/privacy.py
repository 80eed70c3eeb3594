"""Addresses of customers in messages: encrypted with a key of each customer, so that deleting the key erases them.

Kafka keeps what it has, and so do archives and backups. What `forget` deletes is the only thing that could read it.
The customers' names are not encrypted here.
"""

from __future__ import annotations

import base64
import os

from django.db import transaction

from example_project.shop.models import CustomerKey, Order

_NONCE_BYTES = 12


def seal(customer: str, field: str, text: str) -> dict[str, str]:
    """Encrypt a field for a customer, in the transaction that stashes it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    new = CustomerKey(customer=customer, key=AESGCM.generate_key(256))
    CustomerKey.objects.bulk_create([new], ignore_conflicts=True)
    key = bytes(CustomerKey.objects.get(customer=customer).key)
    nonce = os.urandom(_NONCE_BYTES)
    # Customer and field are authenticated with it, so that it cannot be moved to another place.
    sealed = AESGCM(key).encrypt(nonce, text.encode(), f"{customer}/{field}".encode())
    return {"sealed": base64.b64encode(nonce + sealed).decode()}


def unseal(customer: str, field: str, content: dict[str, str]) -> str | None:
    """Decrypt a field, as a consumer does; None if the customer was forgotten."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    found = CustomerKey.objects.filter(customer=customer).first()
    if found is None:
        return None
    sealed = base64.b64decode(content["sealed"])
    where = f"{customer}/{field}".encode()
    return AESGCM(bytes(found.key)).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], where).decode()


@transaction.atomic
def forget(customer: str) -> int:
    """Erase a customer's addresses: here, and by the key in all messages; return the number of orders."""
    CustomerKey.objects.filter(customer=customer).delete()
    return Order.objects.filter(customer=customer).exclude(address="").update(address="")
