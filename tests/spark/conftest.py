"""The one Spark session for all tests of a process."""

import logging
import os
from pathlib import Path

import pytest

from outbox_spark.session import start_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """Yield the session, on two threads of this machine."""
    logging.getLogger("py4j").setLevel(logging.WARNING)  # else it writes to the stderr that later tests check
    session = start_session(
        "kafka-outbox tests",
        master="local[2]",
        settings={
            "spark.driver.memory": "1g",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": os.fspath(tmp_path_factory.mktemp("warehouse")),
            "spark.sql.streaming.stopTimeout": "60s",
        },
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def pytest_collection_modifyitems(items):
    """Repeat a test for which Spark could not start Python: it allows ten seconds, which no setting changes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun="Python worker failed to connect back"))
