"""A span for each request, where OpenTelemetry is installed: the trace goes on with the records that it stashes.

The library does the rest: `create` spans, the context in the records' headers, the spans of harvester and consumers. A
real shop would take Django's instrumentation instead of these lines.
"""

from __future__ import annotations

from collections.abc import Callable

from django.core.exceptions import MiddlewareNotUsed
from django.http import HttpRequest, HttpResponse

Answer = Callable[[HttpRequest], HttpResponse]


def trace_requests(get_response: Answer) -> Answer:
    """Make the middleware."""
    try:
        from opentelemetry import trace
    except ImportError:
        raise MiddlewareNotUsed from None

    def answer(request: HttpRequest) -> HttpResponse:
        tracer = trace.get_tracer(__name__)  # does nothing until the process has a tracer provider
        with tracer.start_as_current_span(f"{request.method} {request.path}", kind=trace.SpanKind.SERVER) as span:
            response = get_response(request)
            span.set_attribute("http.response.status_code", response.status_code)
            return response

    return answer
