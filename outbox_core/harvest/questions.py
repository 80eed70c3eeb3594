"""The questions of a harvester's watch, put to Kafka and the database by clients and connections of their own."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import Final

from outbox_core.kafka.admin import group_members
from outbox_core.kafka.clients import KafkaConfig
from outbox_core.kafka.reach import SilentBrokers
from outbox_core.stores.interface import RowQuery, StoreFactory

_MEMBERS_SECONDS: Final = 3.0
_BROKERS_SECONDS: Final = 5.0
_AT_WORK_SECONDS: Final = 3.0


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
        self._silent = SilentBrokers(_BROKERS_SECONDS)

    def members(self) -> int | None:
        """Return the number of members of the leader group, None if Kafka does not say."""
        members = group_members(self._kafka, self._group, timeout_seconds=_MEMBERS_SECONDS)
        return None if members is None else len(members)

    def silent_brokers(self, max_age_seconds: float = 0.0) -> list[str]:
        """Return brokers that do not answer us, by an answer so old at most; raise KafkaUnavailable if none answers."""
        return self._silent.lately(self._kafka, max_age_seconds)

    def silent_leaders(self, places: Collection[tuple[str, int | None]], max_age_seconds: float = 0.0) -> list[str]:
        """Return leaders of partitions, or of topics', that do not answer us; raise KafkaUnavailable if none does."""
        return self._silent.leading(self._kafka, places, max_age_seconds)

    def read_table(self) -> None:
        """Read the head of the outbox table over a new connection, or raise OutboxError."""
        with closing(self._store()) as store:
            store.scan(RowQuery(1, 1))

    def at_work(self) -> str:
        """Return what the database says, over a new connection, of a long statement of ours; or raise OutboxError."""
        with closing(self._store()) as store:
            return store.at_work(_AT_WORK_SECONDS)
