"""Limits on the records in memory, by bytes as well as by number."""

import threading

import pytest

from outbox_core.stores.interface import bytes_of
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import by_key

MODES = ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)]
_ROWS, _KEYS, _VALUE_BYTES = 60, 7, 50_000
_LIMIT = 400_000


class Weighing(PostgresStore):
    """A store that counts the bytes that it has handed out and has not yet deleted."""

    lock = threading.Lock()

    def reset_scales(self):
        Weighing.held, Weighing.heaviest, Weighing.largest_batch = {}, 0, 0

    def weigh(self, records):
        with self.lock:
            Weighing.held.update({record[0]: bytes_of([record]) for record in records})
            Weighing.heaviest = max(Weighing.heaviest, sum(Weighing.held.values()))
            Weighing.largest_batch = max(Weighing.largest_batch, bytes_of(records))

    def unload(self, ids):
        with self.lock:
            for identity in ids:
                Weighing.held.pop(identity, None)

    def mark(self, *arguments, **limits):
        batch = super().mark(*arguments, **limits)
        self.weigh(batch.records)
        return batch

    def scan(self, *arguments, **limits):
        records = super().scan(*arguments, **limits)
        self.weigh(records)
        return records

    def purge(self, leader_id, ids, create_times):
        purged = super().purge(leader_id, ids, create_times)
        self.unload(ids)
        return purged

    def delete_published(self, ids, create_times):
        deleted = super().delete_published(ids, create_times)
        self.unload(ids)
        return deleted


@pytest.mark.parametrize("delivery", MODES)
def test_large_values_are_fetched_a_few_at_a_time(scene, make_topic, delivery):
    """The records in memory never exceed the limit by more than two values, and all arrive in order."""
    topic = make_topic()
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) SELECT %s, 'k' || n %% %s,"
        " convert_to(lpad(n::text, %s, '0'), 'UTF8') FROM generate_series(1, %s) AS n",
        [topic, _KEYS, _VALUE_BYTES, _ROWS],
    )
    store = Weighing(scene.database)
    store.reset_scales()
    limits = {"max_in_flight_bytes": _LIMIT}
    scene.drain(config={"delivery": delivery}, limits=limits, store_factory=lambda: Weighing(scene.database))
    assert Weighing.largest_batch <= _LIMIT / 4 + _VALUE_BYTES
    assert Weighing.heaviest <= _LIMIT + 2 * _VALUE_BYTES
    arrived = by_key(scene.read(topic))
    for key, values in arrived.items():
        numbers = [int(value[-9:]) for value in values]
        assert numbers == sorted(set(numbers)), key
    assert sum(map(len, arrived.values())) == _ROWS


@pytest.mark.parametrize("delivery", MODES)
def test_a_record_larger_than_the_limit(scene, make_topic, delivery):
    """A record that exceeds the limit by itself is still published."""
    topic = make_topic()
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value)"
        " SELECT %s, 'k', convert_to(repeat('x', n), 'UTF8') FROM unnest(ARRAY[10, 500000, 10]) AS n",
        [topic],
    )
    scene.drain(config={"delivery": delivery}, limits={"max_in_flight_bytes": 10_000})
    assert [len(message.value) for message in scene.read(topic)] == [10, 500_000, 10]
