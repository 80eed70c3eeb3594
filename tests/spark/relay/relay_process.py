"""A relay as a process: `python -m tests.spark.relay.relay_process SETTINGS`, the settings being JSON."""

import json
import logging
import os
import signal
import sys
import threading

from outbox_core.config import HarvestConfig
from outbox_spark.pipelines.relay import RelayConfig, run_relay
from outbox_spark.session import start_session
from tests.spark.relay.faulty_sinks import DIE_AT, GROUP, DyingSink


def main():
    """Relay until SIGTERM, or once."""
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    os.environ[GROUP] = str(os.getpgid(0))
    spark = start_session("relay", {"spark.driver.memory": "1g"}, master="local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    if os.environ.get(DIE_AT):
        spark.dataSource.register(DyingSink)
    harvest = HarvestConfig(
        data_source=settings["dsn"],
        outbox_table=settings["table"],
        base_kafka_config={"bootstrap.servers": settings["bootstrap"]},
    )
    config = RelayConfig(
        harvest=harvest, checkpoint=settings["checkpoint"], shards=2, batch_records=settings["records"]
    )
    logging.getLogger("relay").info("contends")
    run_relay(spark, config, once=settings["once"], stopping=stopping)
    spark.stop()


if __name__ == "__main__":
    main()
