"""Every test may ask for the services of `tests.services`."""

import os
import subprocess

import pytest
from hypothesis import settings

from devstack.jars import KAFKA_VERSION
from devstack.postgres import wheel_binaries
from devstack.stack import FORCE_EMBEDDED

pytest.register_assert_rewrite("tests.contract")

pytest_plugins = ["tests.services"]

# Spark sessions live for seconds here: the second compiler takes more time than it saves, half of all in measurements.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

settings.register_profile("patient", deadline=None)  # how long an example takes says more about the machine
settings.load_profile("patient")


def pytest_report_header():
    """Say which Postgres and which Kafka the tests are for."""
    postgres = subprocess.check_output([wheel_binaries() / "postgres", "--version"], text=True).strip()
    embedded = os.environ.get(FORCE_EMBEDDED) == "1"
    return f"services: {postgres}; Kafka {'embedded broker' if embedded else KAFKA_VERSION}"
