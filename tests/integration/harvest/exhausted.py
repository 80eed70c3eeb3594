"""A leader that runs out of descriptors: run as a program by `test_exhaustion.py`."""

import os
import resource
import sys
import threading
import time

import psycopg

from outbox_core.config import HarvestConfig, Limits
from outbox_core.errors import ProcessExhausted
from outbox_core.harvest import Harvester


def say(line):
    """Write a line that the test reads."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def hoard():
    """Take every free descriptor, also those that are freed later."""
    while True:
        try:
            os.open(os.devnull, os.O_RDONLY)
        except OSError:
            time.sleep(0.0001)


def main(data_source, bootstrap, delivery):
    """Lead, lose every free descriptor and every connection to the database, and report the end of leadership."""
    harvester = Harvester(
        HarvestConfig(
            data_source=data_source,
            base_kafka_config={"bootstrap.servers": bootstrap},
            delivery=delivery,
            limits=Limits(io_error_backoff="50ms"),
        ),
        lambda event: say(type(event).__name__),
    )
    harvester.start()
    while not harvester.leader_id:
        time.sleep(0.05)
    with psycopg.connect(data_source, autocommit=True) as operator:
        operator.execute("SELECT")  # now, as a first statement may open files
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        threading.Thread(target=hoard, daemon=True).start()
        time.sleep(0.2)
        operator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'kafka-outbox%'"
        )
    try:
        harvester.join(60)
    except ProcessExhausted as error:
        say(f"gave up: {error}")
    say("healthy" if harvester.health().ok else "failing")


if __name__ == "__main__":
    main(*sys.argv[1:])
