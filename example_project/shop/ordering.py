"""The shop's two transactions: placing an order and cancelling one.

Both take their row locks first, products always in the order of their ids (no deadlocks), and stash last: ids of the
outbox are then drawn in the order in which transactions that touch the same product commit.
"""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction

import outbox_django as outbox
from example_project.shop import messages
from example_project.shop.emails import send_confirmation
from example_project.shop.models import Order, OrderLine, Product, StockMovement


class OrderError(Exception):
    """An order that cannot be; nothing was written."""


class UnknownProduct(OrderError):
    """The basket names a product that does not exist."""


class OutOfStock(OrderError):
    """There are fewer of a product than were ordered."""


class KeyReused(OrderError):
    """The idempotency key belongs to a request for something else."""


class NotPlaced(OrderError):
    """There is no such order, or it is cancelled already."""


@transaction.atomic
def place_order(customer: str, basket: Mapping[int, int], idempotency_key: str = "", address: str = "") -> Order:
    """Take the basket (quantities by product id) from stock, as a new order.

    Args:
        customer: their name.
        basket: quantities by product id.
        idempotency_key: the key of the request, by which `find_order` finds the order; "" if it has none.
        address: where to send it; "" if it is fetched. Messages show it encrypted.

    Raises:
        UnknownProduct: the basket names a product that does not exist.
        OutOfStock: there is too little of something.
    """
    products = _lock_products(basket)
    if missing := sorted(basket.keys() - products.keys()):
        raise UnknownProduct(f"there is no product {missing[0]}")
    for product_id, quantity in basket.items():
        if products[product_id].stock < quantity:
            raise OutOfStock(f"{products[product_id]}: {products[product_id].stock} left, {quantity} ordered")

    total = sum(products[product_id].price_cents * quantity for product_id, quantity in basket.items())
    order = Order.objects.create(customer=customer, address=address, total_cents=total, idempotency_key=idempotency_key)
    OrderLine.objects.bulk_create(
        OrderLine(order=order, product=products[number], quantity=quantity, price_cents=products[number].price_cents)
        for number, quantity in basket.items()
    )
    movements = _move_stock(order, products, {number: -quantity for number, quantity in basket.items()})
    event = order.events.create(number=1, status=order.status)
    outbox.stash_many([messages.order_placed(event, order), *map(messages.stock_moved, movements)])
    send_confirmation.enqueue(order.pk)
    return order


@transaction.atomic
def cancel_order(order_id: int) -> Order:
    """Cancel an order and put its products back into stock.

    Raises:
        NotPlaced: there is no such order, or it is cancelled already.
    """
    order = Order.objects.select_for_update().filter(pk=order_id, status=Order.Status.PLACED).first()
    if order is None:
        raise NotPlaced(f"there is no order {order_id} to cancel")
    basket = dict(order.lines.values_list("product_id", "quantity"))
    movements = _move_stock(order, _lock_products(basket), basket)
    order.status = Order.Status.CANCELLED
    order.save(update_fields=["status"])
    event = order.events.create(number=2, status=order.status)
    outbox.stash_many([messages.order_cancelled(event), *map(messages.stock_moved, movements)])
    return order


def find_order(idempotency_key: str, customer: str, basket: Mapping[int, int]) -> Order:
    """Return the order that this very request has placed before.

    Raises:
        KeyReused: the key belongs to an order of something else.
    """
    order = Order.objects.filter(idempotency_key=idempotency_key).latest("pk")
    if (order.customer, dict(order.lines.values_list("product_id", "quantity"))) != (customer, basket):
        raise KeyReused(f"the idempotency key {idempotency_key!r} belongs to a request for something else")
    return order


def _lock_products(basket: Mapping[int, int]) -> dict[int, Product]:
    return {product.pk: product for product in Product.objects.select_for_update().filter(pk__in=basket).order_by("pk")}


def _move_stock(order: Order, products: Mapping[int, Product], quantities: Mapping[int, int]) -> list[StockMovement]:
    """Change the stock of locked products, and add a movement for each."""
    movements = []
    for number, quantity in quantities.items():
        product = products[number]
        product.stock += quantity
        product.movements_count += 1
        movements.append(
            StockMovement(
                product=product,
                number=product.movements_count,
                order=order,
                quantity=quantity,
                stock_after=product.stock,
            )
        )
    Product.objects.bulk_update(products.values(), ["stock", "movements_count"])
    return StockMovement.objects.bulk_create(movements)
