"""Harvesting while the type of `create_time` gets fewer digits of a second."""

import pytest

from tests.harvesting import Scene, wait_until


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_rows_in_flight_are_not_repeated(database, kafka_bootstrap, make_topic, delivery):
    """Each row is published once and purged, though the times of those in flight are rounded."""
    scene, topic = Scene(database, kafka_bootstrap), make_topic()
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value)"
        " SELECT %s, 'k' || n, n::text::bytea FROM generate_series(1, 20000) AS n",
        [topic],
    )
    with scene.running(config={"delivery": delivery}):
        wait_until(lambda: scene.count() < 15_000, "it is under way", timeout=60)
        scene.execute("ALTER TABLE outbox ALTER create_time TYPE timestamptz(0)")
        wait_until(lambda: scene.count() == 0, "all rows are purged", timeout=60)
    assert sorted(int(message.value) for message in scene.read(topic)) == list(range(1, 20_001))
    scene.close()
