"""The questions of a harvester's watch, put to Kafka and the database by clients and connections of their own."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import Final

from outbox_core.kafka.admin import group_members
from outbox_core.kafka.clients import KafkaConfig
from outbox_core.kafka.reach import unreachable_brokers, unreachable_leaders
from outbox_core.kafka.topics import partition_count
from outbox_core.stores.interface import RowQuery, StoreFactory

_MEMBERS_SECONDS: Final = 3.0
_BROKERS_SECONDS: Final = 5.0


class HarvesterQuestions:
    """The questions of one harvester.

    Args:
        kafka: settings of any client.
        group: the leader group.
        store: makes a store whose calls do not take long.
        database: where that is, for people.
    """

    def __init__(self, kafka: KafkaConfig, group: str, store: StoreFactory, database: str) -> None:
        self.database = database
        self._kafka = kafka
        self._group = group
        self._store = store

    def members(self) -> int | None:
        """Return the number of members of the leader group, None if Kafka does not say."""
        members = group_members(self._kafka, self._group, timeout_seconds=_MEMBERS_SECONDS)
        return None if members is None else len(members)

    def silent_brokers(self) -> list[str]:
        """Return brokers that do not answer us, or raise KafkaUnavailable if none answers."""
        return unreachable_brokers(self._kafka, _BROKERS_SECONDS)

    def silent_leaders(self, places: Collection[tuple[str, int | None]]) -> list[str]:
        """Return leaders of partitions, or of topics', that do not answer us, or raise KafkaUnavailable."""
        partitions = {(topic, part) for topic, part in places if part is not None}
        for topic in {topic for topic, part in places if part is None}:
            partitions.update((topic, part) for part in range(partition_count(self._kafka, topic)))
        return sorted(set(unreachable_leaders(self._kafka, partitions, _BROKERS_SECONDS).values()))

    def read_table(self) -> None:
        """Read the head of the outbox table over a new connection, or raise OutboxError."""
        with closing(self._store()) as store:
            store.scan(RowQuery(1, 1))
