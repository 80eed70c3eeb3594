"""A run of a simulation: its product's log lines are heard, its harvesters end with it, and no garbage is collected."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def heard(handler: logging.Handler, levels: Mapping[str, int]) -> Iterator[None]:
    """Have a handler, and nobody else, hear what loggers say from some level on."""
    logs = {logging.getLogger(name): level for name, level in levels.items()}
    before = [(log, log.level, log.propagate) for log in logs]
    for log, level in logs.items():
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
    try:
        yield
    finally:
        for log, level, propagates in before:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagates


def run_to_its_end(simulation: Any, product: AbstractContextManager[None]) -> None:
    """Run a simulation with the product in it, and have all its nodes crash at the end."""
    with _garbage_is_kept(), product:
        try:
            simulation.run()
        finally:
            for node in simulation.nodes:
                node.crash()


@contextmanager
def _garbage_is_kept() -> Iterator[None]:
    """Collect no garbage in a run, which takes up to half of its time otherwise, and is short."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
