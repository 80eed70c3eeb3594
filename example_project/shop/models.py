"""The shop's data: its products and orders, and the history of both.

Every change of an order or of a product's stock is a row of a history, numbered from 1 for each order and each product.
Each of these rows is one message on Kafka, so a reader of the topics can tell if one is missing or out of order.
"""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from django.db import models


class Product(models.Model):
    """Something on sale. A transaction that changes `stock` holds the row's lock."""

    name = models.CharField(max_length=80)
    price_cents = models.PositiveIntegerField()
    stock = models.PositiveIntegerField()
    movements_count = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """An order of a customer."""

    class Status(models.TextChoices):
        """The states of an order."""

        PLACED = "placed"
        CANCELLED = "cancelled"

    customer = models.CharField(max_length=80)
    address = models.CharField(max_length=200, default="", blank=True)
    status = models.CharField(max_length=10, choices=Status, default=Status.PLACED)
    total_cents = models.PositiveIntegerField()
    placed_at = models.DateTimeField(auto_now_add=True)
    # The request's Idempotency-Key, by which its repetition finds the order; "" if it had none.
    idempotency_key = models.CharField(max_length=1000, default="", blank=True)

    class Meta:
        """The index by which an order is found by its request's key."""

        indexes: ClassVar = [
            models.Index(
                fields=["idempotency_key"], condition=~models.Q(idempotency_key=""), name="shop_order_idempotency_key"
            )
        ]

    def __str__(self) -> str:
        return f"order {self.pk} of {self.customer}"


class CustomerKey(models.Model):
    """A customer's key, with which their addresses in messages are encrypted; see privacy.py."""

    customer = models.CharField(max_length=80, primary_key=True)
    key = models.BinaryField()

    def __str__(self) -> str:
        return f"key of {self.customer}"


class OrderLine(models.Model):
    """One product of an order, at the price of that day."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="lines")
    product = models.ForeignKey(Product, models.PROTECT)
    quantity = models.PositiveIntegerField()
    price_cents = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.quantity} of product {self.product_id}"


class OrderEvent(models.Model):
    """One step in the life of an order; published to the topic shop.orders."""

    id = models.UUIDField(primary_key=True, default=uuid4)
    order = models.ForeignKey(Order, models.CASCADE, related_name="events")
    number = models.PositiveIntegerField()
    status = models.CharField(max_length=10, choices=Order.Status)

    class Meta:
        """The numbering of an order's steps."""

        constraints: ClassVar = [models.UniqueConstraint(fields=["order", "number"], name="shop_orderevent_numbered")]

    def __str__(self) -> str:
        return f"order {self.order_id}, {self.number}: {self.status}"


class StockMovement(models.Model):
    """One change of a product's stock; published to the topic shop.stock."""

    id = models.UUIDField(primary_key=True, default=uuid4)
    product = models.ForeignKey(Product, models.PROTECT, related_name="movements")
    number = models.PositiveIntegerField()
    order = models.ForeignKey(Order, models.CASCADE)
    quantity = models.IntegerField()
    stock_after = models.PositiveIntegerField()

    class Meta:
        """The numbering of a product's movements."""

        constraints: ClassVar = [
            models.UniqueConstraint(fields=["product", "number"], name="shop_stockmovement_numbered")
        ]

    def __str__(self) -> str:
        return f"product {self.product_id}, {self.number}: {self.quantity:+}"
