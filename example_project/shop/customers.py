"""Made-up customers: they fill the shop's order book from many threads, as a day's traffic would.

Each order is a transaction of its own. Some roll back after everything was written and stashed; every tenth order is
cancelled later.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from django.db import connection, transaction

from example_project.shop.messages import ORDERS, STOCK
from example_project.shop.models import Product
from example_project.shop.ordering import cancel_order, place_order

_PRODUCTS = 200
_STOCK = 1_000_000
_LINES = 4
_CANCEL_EVERY = 10


@dataclass
class Tally:
    """The result of a run: orders placed and cancelled, and the number of rolled-back records, by topic."""

    placed: int = 0
    cancelled: int = 0
    rolled_back: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add another thread's counts."""
        self.placed += other.placed
        self.cancelled += other.cancelled
        self.rolled_back.update(other.rolled_back)


def fill_shelves() -> list[int]:
    """Return the ids of all products; if there are none yet, make some."""
    if not Product.objects.exists():
        Product.objects.bulk_create(
            Product(name=f"Product {number:03}", price_cents=100 + 7 * number, stock=_STOCK)
            for number in range(1, _PRODUCTS + 1)
        )
    return list(Product.objects.values_list("pk", flat=True))


def place_orders(count: int, *, concurrency: int, rollback_share: float, rate: float | None) -> Tally:
    """Place exactly `count` orders from `concurrency` threads.

    Args:
        count: orders that commit; those that roll back come on top.
        concurrency: threads, each with a connection of its own.
        rollback_share: share of orders before which a transaction rolls back, from 0 to 1.
        rate: orders per second at most, or None for as many as possible.
    """
    products = fill_shelves()
    turns = _Turns(count, rate)

    def customer(_: int) -> Tally:
        try:
            return _order(turns, products, rollback_share)
        finally:
            connection.close()

    tally = Tally()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="customer") as customers:
        for share in customers.map(customer, range(concurrency)):
            tally.add(share)
    return tally


class _Turns:
    """A source of the numbers below `count`, each once, no faster than `rate` a second."""

    def __init__(self, count: int, rate: float | None) -> None:
        self._numbers = iter(range(count))
        self._lock = threading.Lock()
        self._seconds_each = 1 / rate if rate else 0.0
        self._began = time.monotonic()

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            time.sleep(max(0.0, self._began + number * self._seconds_each - time.monotonic()))
            yield number


def _order(turns: _Turns, products: list[int], rollback_share: float) -> Tally:
    tally = Tally()
    for number in turns:
        if random.random() < rollback_share:
            tally.rolled_back.update(_change_ones_mind(products))
        order = place_order(f"customer {number % 997}", _basket(products))
        tally.placed += 1
        if number % _CANCEL_EVERY == _CANCEL_EVERY - 1:
            cancel_order(order.pk)
            tally.cancelled += 1
    return tally


def _change_ones_mind(products: list[int]) -> Counter[str]:
    """Place an order in a transaction that rolls back at the very end; return its stashed records."""
    with transaction.atomic():
        place_order("nobody", _basket(products))
        transaction.set_rollback(True)
    return Counter({ORDERS: 1, STOCK: _LINES})


def _basket(products: list[int]) -> dict[int, int]:
    return {product: random.randint(1, 3) for product in random.sample(products, _LINES)}
