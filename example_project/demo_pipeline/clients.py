"""Clients of the shop's API: they place orders, cancel some, and repeat a request whose answer did not come."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx

from example_project.demo.children import DemoError

_CANCEL_EVERY = 7
_TIMEOUT_SECONDS = 10.0
_ATTEMPTS = 20
_SECONDS_HALF_WAY = 300.0


class Clients:
    """Several threads that place so many orders together. `placed` and `cancelled` may be read at any time.

    Half-way they wait for `second_half` to be set: on a slow machine, Spark needs longer to start than they need.

    Args:
        url: of the shop.
        products: ids of the products on sale.
        orders: number of orders.
        threads: number of clients.
        seconds: least duration of all together.
    """

    def __init__(self, url: str, products: list[int], *, orders: int, threads: int, seconds: float) -> None:
        self._url = url
        self._products = products
        self._orders = orders
        self._pause = seconds * threads / orders
        self._lock = threading.Lock()
        self._begun = 0
        self._error: Exception | None = None
        self.second_half = threading.Event()
        self.placed = 0
        self.cancelled = 0
        self._threads = [threading.Thread(target=self._run, name=f"client-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    @property
    def are_done(self) -> bool:
        """Tell whether all orders are placed.

        Raises:
            DemoError: a client got an answer that it cannot go on with.
        """
        if self._error is not None:
            raise DemoError(f"a client failed: {self._error!r}")
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=_TIMEOUT_SECONDS, trust_env=False) as http:
                while (number := self._next()) is not None:
                    self._order(http, number)
                    time.sleep(self._pause)
        except Exception as error:
            self._error = error

    def _next(self) -> int | None:
        with self._lock:
            if self._begun == self._orders or self._error is not None:
                return None
            self._begun += 1
            number = self._begun
        if number > self._orders // 2:
            self.second_half.wait(_SECONDS_HALF_WAY)
        return number

    def _order(self, http: httpx.Client, number: int) -> None:
        basket = {str(product): random.randint(1, 3) for product in random.sample(self._products, 3)}
        request: dict[str, Any] = {
            "json": {"customer": f"client {number % 97}", "basket": basket},
            "headers": {"Idempotency-Key": uuid.uuid4().hex},
        }
        order = _insist(lambda: http.post("/orders/", **request)).json()["order"]
        with self._lock:
            self.placed += 1
        if number % _CANCEL_EVERY == 0:
            _insist(lambda: http.delete(f"/orders/{order}/"))
            with self._lock:
                self.cancelled += 1


def _insist(request: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat a request until it is answered."""
    for attempt in range(_ATTEMPTS):
        try:
            answer = request()
        except httpx.TransportError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.2)
        else:
            if answer.status_code == 404 and attempt:  # cancelled by the attempt before
                return answer
            return answer.raise_for_status()
    raise DemoError("the shop does not answer")
