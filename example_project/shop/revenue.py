"""Revenue per product and hour: a table that the pipeline of `revenue.yaml` keeps, not one of the shop's own.

The pipeline projects the order events into `shop_order_lines` (cancelled orders have no lines) and keeps the totals.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import connection

_MOST_ROWS = 500

_IS_THERE = "SELECT to_regclass('shop_revenue') IS NOT NULL"
_LATEST = """
SELECT r.hour, p.name, r.quantity, r.cents
FROM shop_revenue AS r JOIN shop_product AS p ON p.id = r.product
ORDER BY r.hour DESC, r.cents DESC, p.name LIMIT %s
"""
_TOTAL = "SELECT coalesce(sum(quantity), 0), coalesce(sum(cents), 0) FROM shop_revenue"


@dataclass(frozen=True, kw_only=True)
class HourOfProduct:
    """The revenue of a product within an hour.

    Attributes:
        hour: its beginning.
        product: the product's name.
        quantity: pieces sold, those of cancelled orders not included.
        cents: their revenue.
    """

    hour: datetime
    product: str
    quantity: int
    cents: int


@dataclass(frozen=True, kw_only=True)
class Revenue:
    """Revenue, as far as the pipeline has come.

    Attributes:
        quantity: pieces sold in all.
        cents: revenue in all.
        rows: the latest hours, the best products first.
    """

    quantity: int
    cents: int
    rows: list[HourOfProduct]


def read_revenue() -> Revenue | None:
    """Read the revenue; None if no pipeline has ever run."""
    with connection.cursor() as cursor:
        cursor.execute(_IS_THERE)
        if not cursor.fetchone()[0]:
            return None
        cursor.execute(_TOTAL)
        quantity, cents = map(int, cursor.fetchone())
        cursor.execute(_LATEST, [_MOST_ROWS])
        rows = [
            HourOfProduct(hour=hour, product=product, quantity=int(pieces), cents=int(earned))
            for hour, product, pieces, earned in cursor
        ]
    return Revenue(quantity=quantity, cents=cents, rows=rows)
