"""The shop's views: each request is a transaction."""

from django.http import JsonResponse
from django.urls import path

import outbox_django as outbox
from shop.models import Stock


def change(request, product, number):
    """Set a stock."""
    del request
    Stock.objects.update_or_create(product=product, defaults={"number": number})
    if number > 100:
        raise ValueError("no room")
    return JsonResponse({"number": number}, status=201)


def told_before(request, product, number):
    """Answer a repeat."""
    del request, number
    return JsonResponse({"number": Stock.objects.get(pk=product).number}, status=201)


@outbox.idempotent("stock-api", repeated=told_before)
def change_once(request, product, number):
    """Set a stock, once for each key; a refusal is an answer."""
    change(request, product, min(number, 100))
    return JsonResponse({"number": number}, status=422 if number > 100 else 201)


urlpatterns = [path("change/<product>/<int:number>", change), path("once/<product>/<int:number>", change_once)]
