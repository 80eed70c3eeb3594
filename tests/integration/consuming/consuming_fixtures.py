"""A place for consumers: a database with an inbox, a topic, a group."""

from contextlib import contextmanager

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from outbox_core.schema import TableName, create_inbox_sql


class Place:
    """A database with an inbox and a table of effects, a topic, and the consumers of one group."""

    def __init__(self, database, bootstrap, topic, group):
        self.database = database
        self.bootstrap = bootstrap
        self.topic = topic
        self.group = group
        self._made = []
        with psycopg.connect(database) as connection:
            connection.execute(create_inbox_sql(TableName("inbox")))
            connection.execute("CREATE TABLE effect (number bigserial, value text)")

    def consumer(self, *, subscribe=False, **settings):
        """Return a consumer of the topic's partition 0, or of the partitions that the group assigns."""
        given = {name.replace("_", "."): value for name, value in settings.items()}
        made = Consumer({"bootstrap.servers": self.bootstrap, "group.id": self.group, **_SETTINGS, **given})
        self._made.append(made)
        if subscribe:
            made.subscribe([self.topic])
        else:
            made.assign([TopicPartition(self.topic, 0)])
        return made

    def send(self, *records):
        """Write records, `(value, outbox id or None)`, to partition 0."""
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for value, identity in records:
            headers = [("outbox-id", identity)] if identity else None
            producer.produce(self.topic, value, partition=0, headers=headers)
        assert producer.flush(30) == 0

    def committed(self, consumer):
        """Return the group's offset in partition 0."""
        return consumer.committed([TopicPartition(self.topic, 0)], timeout=30)[0].offset

    def effects(self):
        """Return the values that handlers have written, in order."""
        with self.transaction() as connection:
            return [value for (value,) in connection.execute("SELECT value FROM effect ORDER BY number")]

    def execute(self, sql):
        """Run a statement."""
        with self.transaction() as connection:
            connection.execute(sql)

    @contextmanager
    def transaction(self):
        """Yield a connection of psycopg in a transaction."""
        with psycopg.connect(self.database) as connection:
            yield connection

    def close(self):
        """Close all consumers."""
        for consumer in self._made:
            consumer.close()


_SETTINGS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "fetch.wait.max.ms": 50,
}


@pytest.fixture
def place(database, kafka_bootstrap, make_topic, topic_name):
    """A place for consumers, fresh for each test."""
    made = Place(database, kafka_bootstrap, make_topic(), topic_name("group"))
    yield made
    made.close()
