"""URLs of the Django tests: the admin, and a view that stashes and perhaps fails afterwards."""

from django.contrib import admin
from django.http import HttpResponse
from django.urls import path

import outbox_django as outbox


def place_order(request, order_id):
    """Stash a record; `?fail=1` raises after it."""
    outbox.stash(outbox.OutboxRecord(topic="orders", key=order_id, value={"placed": True}))
    if "fail" in request.GET:
        raise RuntimeError("after the stash")
    return HttpResponse("ok")


urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/<int:order_id>/", place_order),
]
