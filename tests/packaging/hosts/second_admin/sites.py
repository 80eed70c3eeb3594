"""The sites: `admin` for those who may do all, and `ops`, whose users are no staff of the other."""

from django.contrib import admin
from django.urls import path

from outbox_django.admin import ConsoleAdmin, HoldAdmin, OutboxAdmin
from outbox_django.models import Console, Hold, Outbox


class OpsSite(admin.AdminSite):
    """The site of the operators."""

    def has_permission(self, request):
        """Admit operators, staff or not."""
        return request.user.is_active and request.user.username.startswith("ops-")


ops = OpsSite("ops")
ops.register(Outbox, OutboxAdmin)
ops.register(Hold, HoldAdmin)
ops.register(Console, ConsoleAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("ops/", ops.urls)]
