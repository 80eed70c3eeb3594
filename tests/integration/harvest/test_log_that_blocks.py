"""`outbox harvest` with a stderr that nobody reads: a pipe to a log driver that blocks, and full."""

import fcntl
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harvesting import Scene, wait_until

pytestmark = [pytest.mark.real_broker, pytest.mark.complete, pytest.mark.timeout(300)]

LOGS_SECONDS = 12.0  # it logs its throughput every five


def _fill(pipe):
    """Fill a pipe to the last byte, as lines of the log would in an hour."""
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags)


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_a_log_that_nobody_reads(database, kafka_bootstrap, make_topic, delivery):
    """The harvester goes on, and tells how many lines are missing once its log is read."""
    topic, scene = make_topic(1), Scene(database, kafka_bootstrap)
    reading, writing = os.pipe()
    command = [Path(sys.executable).with_name("outbox"), "harvest", "--dsn", database, "--table", scene.table.quoted]
    command += ["--bootstrap", kafka_bootstrap, "--delivery", delivery]
    process = subprocess.Popen(command, stderr=writing)
    try:
        scene.fill(topic, 1)
        wait_until(lambda: scene.count() == 0, "it publishes", timeout=60)
        _fill(writing)
        ends_at = time.monotonic() + LOGS_SECONDS
        while time.monotonic() < ends_at:
            scene.fill(topic, 1)
            time.sleep(0.5)
        wait_until(lambda: scene.count() == 0, "it goes on", timeout=60)
        assert len(os.read(reading, 1 << 20)) > 1000
        process.terminate()
        assert process.wait(60) == 0
        assert b"the log lacks" in os.read(reading, 1 << 20)
    finally:
        process.kill()
        process.wait()
        scene.close()
        for end in (reading, writing):
            os.close(end)
