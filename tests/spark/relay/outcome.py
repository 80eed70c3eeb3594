"""The outcome of a relay in Kafka and the table."""

from tests.harvesting import by_key, identity_of


def assert_each_once_in_order(scene, topic, count):
    """Assert that the topic holds rows 1 to `count` once, in order per key, and that the table is empty."""
    messages = scene.read(topic)
    assert sorted(map(identity_of, messages)) == list(range(1, count + 1))
    for values in by_key(messages).values():
        numbers = [int(value) for value in values]
        assert numbers == sorted(numbers)
    assert scene.count() == 0
