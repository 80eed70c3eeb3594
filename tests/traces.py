"""Spans of a test, in memory."""

from contextlib import contextmanager

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox_core import tracing


class Traces:
    """A tracer provider of its own, and the spans that have ended."""

    def __init__(self):
        self.provider = TracerProvider()
        self.tracer = self.provider.get_tracer("test")
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])

    def named(self, prefix):
        """Return the ended spans whose names begin so, in the order of their ends."""
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(prefix)]

    def points(self, name):
        """Return the data points of a metric, by destination."""
        data = self._reader.get_metrics_data()
        found = [metric for part in data.resource_metrics for scope in part.scope_metrics for metric in scope.metrics]
        points = [point for metric in found if metric.name == name for point in metric.data.data_points]
        return {point.attributes.get("messaging.destination.name", ""): point for point in points}


@contextmanager
def traced():
    """Make spans within the context."""
    traces = Traces()
    tracing.enable(traces.provider, traces.meters)
    try:
        yield traces
    finally:
        tracing.disable()


def links_of(span):
    """Return the ids of the spans that a span is linked with."""
    return [link.context.span_id for link in span.links]
