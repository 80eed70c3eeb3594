"""The pytest plugin, as it is installed."""

import subprocess
import sys
from importlib.metadata import entry_points


def test_it_is_registered():
    """Pytest finds the plugin by its entry point."""
    (entry,) = (entry for entry in entry_points(group="pytest11") if entry.name == "kafka_outbox")
    assert {"outbox_records", "in_memory_outbox"} <= vars(entry.load()).keys()


def test_it_imports_nothing_heavy():
    """Loading the plugin imports no framework, driver or Kafka client, as every project's tests load it."""
    code = (
        "import sys, pytest, outbox_core.testing.pytest_plugin\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'django', 'sqlalchemy', 'confluent_kafka',"
        " 'psycopg', 'pydantic', 'google', 'prometheus_client', 'yaml', 'asyncio'}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "[]\n"
