"""The scene that tests of harvesters share; a module whose outbox must differ has a `scene` of its own."""

import pytest

from tests.harvesting import Scene


@pytest.fixture
def scene(database, kafka_bootstrap):
    """A fresh outbox of the binary layout with its holds, and a tracking topic of its own."""
    scene = Scene(database, kafka_bootstrap)
    yield scene
    scene.close()
