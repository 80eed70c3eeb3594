"""One harvester process that drains a filled outbox and prints rates and memory, as JSON.

    python -m benchmarks.drain DSN BOOTSTRAP ROWS DELIVERY [limit=value ...] [metrics=on] [retention=archive]

The clock runs from `LeaderAcquired` to the empty table. Memory is the resident set, sampled every 100 ms.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from outbox_core.cli.gc_tuning import tune_gc
from outbox_core.config import HarvestConfig
from outbox_core.events import Event, LeaderAcquired, MeterRead
from outbox_core.harvest import Harvester
from outbox_core.metrics import HarvestMetrics

_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Memory(threading.Thread):
    """Samples of the resident set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[float] = []
        self.times: list[float] = []

    def run(self) -> None:
        while True:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.samples.append(pages * _PAGE / 2**20)
            self.times.append(time.perf_counter())
            time.sleep(0.1)


def main() -> None:
    """Drain and print."""
    dsn, bootstrap, rows, delivery, *options = sys.argv[1:]
    limits = dict(option.split("=") for option in options)
    metrics = HarvestMetrics() if limits.pop("metrics", "") else None
    retention = limits.pop("retention", "delete")
    began = [0.0]
    progress: list[tuple[float, int]] = []

    def on_event(event: Event) -> None:
        if isinstance(event, LeaderAcquired):
            began[0] = time.perf_counter()
        elif isinstance(event, MeterRead):
            progress.append((time.perf_counter(), event.stats.total_count))

    config = HarvestConfig(
        data_source=dsn,
        base_kafka_config={"bootstrap.servers": bootstrap},
        delivery=delivery,
        retention=retention,
        limits={
            # A harvester with metrics counts its backlog as often as that.
            "min_metrics_interval": "5s" if metrics else "200ms",
            **{name: int(value) for name, value in limits.items()},
        },
    )
    memory = _Memory()
    memory.start()
    harvester = Harvester(config, on_event, metrics=metrics, drain=True)
    with tune_gc():  # as `outbox harvest` does
        harvester.start()
        harvester.join()
    seconds = time.perf_counter() - began[0]
    half = len(memory.samples) // 2
    json.dump(
        {
            "rate": int(rows) / seconds,
            "seconds": seconds,
            "cpu_seconds": time.process_time(),
            "rss_mib": max(memory.samples),
            "rss_growth_mib": max(memory.samples[half:]) - max(memory.samples[: half + 1]),
            "progress": [(at - began[0], count) for at, count in progress],
            "memory": [(at - began[0], mib) for at, mib in zip(memory.times, memory.samples, strict=False)][::10],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
