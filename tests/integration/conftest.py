"""The scene that tests of harvesters share; a module with a different outbox defines its own `scene`."""

import pytest

from tests.harvesting import Scene


@pytest.fixture
def scene(database, kafka_bootstrap):
    """A fresh outbox of the binary layout with its holds, and a tracking topic of its own."""
    scene = Scene(database, kafka_bootstrap)
    yield scene
    scene.close()
