"""`{% outbox_summary %}`: the summary of the outbox, for users who may see its records."""

from __future__ import annotations

from typing import Any

from django import template

from outbox_django.admin_lists.summary import summarise

register = template.Library()


@register.inclusion_tag("admin/outbox_django/summary.html", takes_context=True)
def outbox_summary(context: template.Context) -> dict[str, Any]:
    """Return what the summary's template needs; nothing for users who may not see records."""
    request = context.get("request")
    may_see = request is not None and request.user.has_perm("outbox_django.view_outbox")
    return {"may_see": may_see, "summary": summarise() if may_see else None}
