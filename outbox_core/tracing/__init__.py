"""OpenTelemetry spans, for applications that use OpenTelemetry; nothing at all for others.

Spans are made once the process has imported `opentelemetry.trace` and has set a tracer provider, as applications do at
their start and `opentelemetry-instrument` does for them. This package never imports the API before that, so that a
process without it pays for a look into a dict.

Off switches:

- `OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=kafka_outbox` in the environment, among other names;
- `disable()` in the code; `enable()` takes it back, and may name a tracer provider;
- `OTEL_SDK_DISABLED=true`, which concerns all spans of the process.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from outbox_core.tracing.spans import Spans

__all__ = ["INSTRUMENTATION_NAME", "active", "disable", "enable"]

INSTRUMENTATION_NAME = "kafka_outbox"
"""The name in `OTEL_PYTHON_DISABLED_INSTRUMENTATIONS`, and that of the tracer."""

_API = "opentelemetry.trace"
_DISABLED_NAMES = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"


def _is_disabled_by_environment() -> bool:
    names = os.environ.get(_DISABLED_NAMES, "").split(",")
    return INSTRUMENTATION_NAME in {name.strip().replace("-", "_") for name in names}


class _Switch:
    """The spans of this process while they are on. Any thread may ask."""

    def __init__(self) -> None:
        self.is_on = not _is_disabled_by_environment()
        self.spans: Spans | None = None
        self._lock = threading.Lock()

    def turn(self, *, on: bool, spans: Spans | None = None) -> None:
        with self._lock:
            self.is_on, self.spans = on, spans

    def find(self) -> Spans | None:
        """Make the spans of the global tracer provider; None while the application has set none."""
        from outbox_core.tracing.spans import Spans, has_global_provider

        if not has_global_provider():
            return None
        with self._lock:
            if self.spans is None and self.is_on:
                self.spans = Spans()
            return self.spans


_switch = _Switch()


def active() -> Spans | None:
    """Return the maker of spans; None if tracing is off, not installed, or not set up by the application."""
    if _switch.spans is not None:
        return _switch.spans
    if _API not in sys.modules or not _switch.is_on:
        return None
    return _switch.find()


def enable(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make spans by a tracer provider, None for the global one, and metrics by a meter provider, likewise.

    Harvesters heed it when they are started.
    """
    if tracer_provider is None and meter_provider is None:
        _switch.turn(on=True)
        return
    from outbox_core.tracing.spans import Spans

    _switch.turn(on=True, spans=Spans(tracer_provider, meter_provider))


def disable() -> None:
    """Make no spans, and leave records without trace context, until `enable` is called."""
    _switch.turn(on=False)
