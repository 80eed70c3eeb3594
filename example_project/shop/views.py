"""The shop over HTTP: a page to look at, and orders as JSON.

GET    /              products and the latest orders
GET    /revenue/      revenue per product and hour, as a Spark pipeline computes it from the order events
POST   /orders/       {"customer": "Ada", "basket": {"1": 2}}, perhaps with "address" -> 201, 400, 404 (no such
                      product), 409 (out of stock); with the header Idempotency-Key, which a repeated request repeats:
                      the same 201, or 422 if it asks for something else
DELETE /orders/<id>/  cancel -> 204, 404
POST   /orders/<id>/invoice/  send the invoice -> 202, 404
"""

from __future__ import annotations

import json

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from example_project.shop.invoices import send_invoice
from example_project.shop.models import Order, Product
from example_project.shop.ordering import (
    KeyReused,
    NotPlaced,
    OutOfStock,
    UnknownProduct,
    cancel_order,
    find_order,
    place_order,
)
from example_project.shop.revenue import read_revenue
from outbox_django import idempotent

_LATEST = 20
_MOST_OF_A_PRODUCT = 1_000
_LONGEST_NAME = 80
_LONGEST_ADDRESS = 200


@require_GET
def front_page(request: HttpRequest) -> HttpResponse:
    """Show the products and the latest orders."""
    latest = Order.objects.prefetch_related("lines__product").order_by("-pk")[:_LATEST]
    return render(request, "shop/front_page.html", {"products": Product.objects.order_by("name"), "orders": latest})


@require_GET
def revenue_page(request: HttpRequest) -> HttpResponse:
    """Show the revenue of the latest hours."""
    return render(request, "shop/revenue.html", {"revenue": read_revenue()})


def order_again(request: HttpRequest) -> JsonResponse:
    """Answer a request that has placed its order before."""
    try:
        customer, basket, _ = _read_order(request.body)
        placed = find_order(request.headers["Idempotency-Key"], customer, basket)
    except ValueError as error:
        return _problem(400, error)
    except KeyReused as error:
        return _problem(422, error)
    return _placed(placed)


@csrf_exempt  # programs place orders here; no browser's session is used
@require_POST
@idempotent("shop.order-requests", repeated=order_again)  # with accounts, each would have a source of its own
def orders(request: HttpRequest) -> JsonResponse:
    """Place an order."""
    try:
        customer, basket, address = _read_order(request.body)
        placed = place_order(customer, basket, request.headers.get("Idempotency-Key", ""), address)
    except ValueError as error:
        return _problem(400, error)
    except UnknownProduct as error:
        return _problem(404, error)
    except OutOfStock as error:
        return _problem(409, error)
    return _placed(placed)


@csrf_exempt
@require_http_methods(["DELETE"])
def order(request: HttpRequest, order_id: int) -> HttpResponse:
    """Cancel an order."""
    del request
    try:
        cancel_order(order_id)
    except NotPlaced as error:
        return _problem(404, error)
    return HttpResponse(status=204)


@csrf_exempt
@require_POST
def invoice(request: HttpRequest, order_id: int) -> HttpResponse:
    """Send an order's invoice."""
    del request
    try:
        send_invoice(order_id)
    except Order.DoesNotExist as error:
        return _problem(404, error)
    return HttpResponse(status=202)


def _read_order(body: bytes) -> tuple[str, dict[int, int], str]:
    """Return customer, basket and address; ValueError says what is wrong with them."""
    try:
        document = json.loads(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    match document:
        case {"customer": str(customer), "basket": dict(basket)} if basket and 0 < len(customer) <= _LONGEST_NAME:
            if not customer.isprintable():  # a NUL, which no text column holds, or a line break in an e-mail
                raise ValueError("a name has no control characters")
            quantities = {int(product): _quantity(quantity) for product, quantity in basket.items()}
            return customer, quantities, _address(document.get("address", ""))
    raise ValueError('expected {"customer": "a name", "basket": {"product id": quantity, ...}}')


def _address(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_ADDRESS or not value.isprintable():
        raise ValueError(f"an address is text of up to {_LONGEST_ADDRESS} characters, without control characters")
    return value


def _quantity(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_OF_A_PRODUCT:
        raise ValueError(f"a quantity is a whole number from 1 to {_MOST_OF_A_PRODUCT}, not {value!r}")
    return value


def _placed(order: Order) -> JsonResponse:
    return JsonResponse({"order": order.pk, "total_cents": order.total_cents}, status=201)


def _problem(status: int, error: Exception) -> JsonResponse:
    return JsonResponse({"error": str(error)}, status=status)
