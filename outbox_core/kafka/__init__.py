"""Kafka below the harvester: clients, topics, errors, messages and transactions, for queues and Spark too."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_core.kafka.messages import UnreadableHeaders, headers_of

__all__ = ["UnreadableHeaders", "headers_of"]

# In the releases before, this was one module: its other names are found in these.
_MODULES = ("messages", "errors", "admin", "topics", "transactions", "clients")


def __getattr__(name: str) -> Any:
    """Import on first use: the base install has no confluent_kafka."""
    for module in (import_module(f"{__name__}.{module}") for module in _MODULES if not name.startswith("_")):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
