"""A relay as a process: `python -m tests.spark.relay.relay_process SETTINGS`, the settings being JSON."""

import json
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from outbox_core.config import HarvestConfig
from outbox_spark.pipelines.relay import RelayConfig, run_relay
from outbox_spark.session import start_session


def killing(row, *, flag, at, victim, driver):
    """Kill a process of the relay, once, at the first row from this id on; a transform, called in the tasks."""
    if row.id >= at and Path(flag).exists():
        try:
            Path(flag).unlink()
        except FileNotFoundError:
            return row  # the other task was first
        if victim == "driver":
            os.killpg(driver, signal.SIGKILL)
        else:
            os.kill(os.getpid() if victim == "worker" else _parent(os.getppid()), signal.SIGKILL)
    return row


def _parent(pid):
    """Return the parent of a process: that of Spark's daemon of Python workers is the executor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main():
    """Relay until SIGTERM, or once."""
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    more = {"spark.driver.memory": "512m", "spark.executor.memory": "512m", **settings["spark"]}
    spark = start_session("relay", more, master=settings["master"])
    spark.sparkContext.setLogLevel("ERROR")
    harvest = HarvestConfig(
        data_source=settings["dsn"],
        outbox_table=settings["table"],
        base_kafka_config={"bootstrap.servers": settings["bootstrap"]},
    )
    config = RelayConfig(harvest=harvest, shards=settings["shards"], batch_records=settings["records"])
    fault = settings["fault"]
    transform = partial(killing, driver=os.getpgid(0), **fault) if fault else None
    logging.getLogger("relay").info("contends")
    run_relay(spark, config, once=settings["once"], stopping=stopping, transform=transform)
    spark.stop()


if __name__ == "__main__":
    main()
