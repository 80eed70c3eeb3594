"""The plugin by which every test may request the services of `tests.services`."""

import logging
import os
import subprocess

import pytest
from hypothesis import settings

from devstack.jars import KAFKA_VERSION
from devstack.postgres import binaries
from devstack.stack import FORCE_EMBEDDED

pytest.register_assert_rewrite("tests.contract")

pytest_plugins = ["tests.services"]

# Spark sessions live for seconds here: the second compiler takes more time than it saves, half of all in measurements.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

settings.register_profile("patient", deadline=None)  # how long an example takes says more about the machine
settings.load_profile("patient")


def pytest_report_header():
    """Name the Postgres and the Kafka that the tests use."""
    postgres = subprocess.check_output([binaries() / "postgres", "--version"], text=True).strip()
    embedded = os.environ.get(FORCE_EMBEDDED) == "1"
    return f"services: {postgres}; Kafka {'embedded broker' if embedded else KAFKA_VERSION}"


@pytest.fixture(autouse=True)
def _same_logging():
    """Undo what a test's commands, and PySpark, do to the root logger: their streams end with the test."""
    handlers, level = [(handler, handler.formatter) for handler in logging.root.handlers], logging.root.level
    yield
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        # pytest adds its handlers to loggers that do not propagate, and these two set the format of theirs.
        if isinstance(logger := logging.root.manager.loggerDict.get(name), logging.Logger):
            logger.propagate = True
    logging.root.handlers[:] = [handler for handler, _ in handlers]
    for handler, formatter in handlers:
        handler.setFormatter(formatter)
    logging.root.setLevel(level)
