"""Spark's daemon of Python workers, with the imports of all workers, most of their work, made once.

A process that forks must have one thread only, so nothing here may start one: neither pyarrow nor numpy is imported.
"""

from __future__ import annotations

from importlib import import_module

from pyspark import daemon

PRELOADED = (
    "outbox_core.config",
    "outbox_core.kafka.transactions",
    "outbox_core.stores.postgres.store",
    "pyspark.sql.datasource",
    "pyspark.sql.worker.utils",
)


def preload() -> None:
    """Import the modules of workers of all formats."""
    for module in PRELOADED:
        import_module(module)


if __name__ == "__main__":
    preload()
    daemon.manager()
