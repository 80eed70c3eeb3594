"""An outbox on the shared services for the relay's tests."""

import pytest

from tests.harvesting import Scene


@pytest.fixture
def scene_class():
    """Return the class of the scene; a module may have one of its own."""
    return Scene


@pytest.fixture
def scene(scene_class, database, kafka_bootstrap):
    """Yield an outbox on the shared services."""
    made = scene_class(database, kafka_bootstrap)
    yield made
    made.close()
