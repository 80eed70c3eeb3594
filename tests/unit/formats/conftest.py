"""A schema registry for the tests of formats, and a client of it."""

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from tests.schema_registry import registry


@pytest.fixture(scope="module")
def server():
    """Return a schema registry."""
    with registry() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    """Return a client of the registry."""
    return SchemaRegistryClient({"url": server.url})
