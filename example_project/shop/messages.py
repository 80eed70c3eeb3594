"""The messages of the shop: one Kafka record for each row of its histories.

The headers carry the row's own id and its number within the key, so that a consumer can check that it got everything,
in order, without opening values.
"""

from example_project.shop.models import Order, OrderEvent, StockMovement
from example_project.shop.privacy import seal
from outbox_django import OutboxRecord

ORDERS = "shop.orders"
STOCK = "shop.stock"


def order_placed(event: OrderEvent, order: Order) -> OutboxRecord:
    """Return the record of an order, lines included."""
    lines = [
        {"product": line.product_id, "quantity": line.quantity, "price_cents": line.price_cents}
        for line in order.lines.all()
    ]
    value = {
        "order": order.pk,
        "customer": order.customer,
        "placed_at": order.placed_at,
        "total_cents": order.total_cents,
        "lines": lines,
    }
    if order.address:
        value["address"] = seal(order.customer, "address", order.address)
    return OutboxRecord(topic=ORDERS, key=order.pk, value=value, headers=_headers("order-placed", event))


def order_cancelled(event: OrderEvent) -> OutboxRecord:
    """Return a tombstone: on a compacted topic the order disappears."""
    return OutboxRecord(topic=ORDERS, key=event.order_id, value=None, headers=_headers("order-cancelled", event))


def stock_moved(movement: StockMovement) -> OutboxRecord:
    """Return the record of a movement: the product's new stock, and the reason."""
    value = {
        "product": movement.product_id,
        "order": movement.order_id,
        "quantity": movement.quantity,
        "stock": movement.stock_after,
    }
    return OutboxRecord(topic=STOCK, key=movement.product_id, value=value, headers=_headers("stock-moved", movement))


def _headers(event: str, row: OrderEvent | StockMovement) -> dict[str, str]:
    return {"event": event, "event-id": str(row.pk), "number": str(row.number)}
