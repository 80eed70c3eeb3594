"""One Spark session for all tests of a process."""

import logging
import os

import pytest

from outbox_spark.session import start_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """The session, on two threads of this machine."""
    logging.getLogger("py4j").setLevel(logging.WARNING)  # else it writes into what later tests expect on stderr
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
