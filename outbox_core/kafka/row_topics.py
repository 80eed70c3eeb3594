"""The topics that a row may name: legal ones, and none that runs the outbox itself; and which partitions of them.

The harvester writes other people's rows with its own rights. A row for the tracking topic would be a manifest, and the
next leader would delete the rows it lists; one for the leader topic is a claim, which deposes the leader; one for
Kafka's own topics breaks the transaction of all others. So such a row is held like any bad record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from outbox_core.config import HarvestConfig
from outbox_core.kafka.clients import KafkaError, KafkaException
from outbox_core.kafka.messages import DeadLetter
from outbox_core.stores.interface import StoredRecord
from outbox_core.topic_names import topic_problem

_REMEMBERED_TOPICS = 10_000
_METADATA_SECONDS = 1.0
_MOST_TO_LEARN = 20


class RowTopics:
    """The topics that rows have named and may name. Used by one thread at a time."""

    def __init__(self, control: Collection[str] = (), *, dead_letters: str = "") -> None:
        self.known: set[str] = set()  # look here before `check`: the path is a hot one
        # This outbox's own; those of others are known by the ends of their names.
        self._control = frozenset(control) | ({dead_letters} if dead_letters else set())
        self._dead_letters = dead_letters

    @classmethod
    def of(cls, config: HarvestConfig, identity: str) -> RowTopics:
        """Return the topics for the rows of an outbox (`<database>.<schema>.<table>`)."""
        tracking = config.tracking_names(identity)
        control = (config.leader_names(identity).topic, tracking.topic, tracking.relay_topic)
        return cls(control, dead_letters=config.dead_letter_name(identity))

    def check(self, record: StoredRecord) -> None:
        """Check that a record may name its topic, and remember it, or raise ValueError with column and reason."""
        topic = record.topic
        if topic == self._dead_letters and isinstance(record, DeadLetter):
            return  # not remembered: rows may not name it
        problem = topic_problem(topic)
        if problem is None and topic in self._control:
            problem = f"{topic!r} belongs to the outbox itself (election, manifests or dead letters)"
        if problem is not None:
            raise ValueError(f"kafka_topic: {problem}")
        if len(self.known) >= _REMEMBERED_TOPICS:
            self.known.clear()
        self.known.add(topic)


class NamedPartitions:
    """Partitions that rows name, asked for before a row is blamed: a client hears of new ones every five minutes."""

    def __init__(self, *producers: Any) -> None:
        self._producers = producers
        self._found: dict[str, tuple[int, KafkaError | None]] = {}
        self._silence: tuple[int, KafkaError | None] = (0, None)

    def learn(self, topic: str) -> tuple[int, KafkaError | None]:
        """Have the producers learn a topic's partitions, once; return their number, or an error, as for all others."""
        for producer in () if topic in self._found else self._producers:
            try:
                told = producer.list_topics(topic, timeout=_METADATA_SECONDS).topics[topic]
                self._found[topic] = len(told.partitions), told.error
            except KafkaException as error:
                self._silence, self._producers = (0, error.args[0]), ()
        return self._found.get(topic, self._silence)

    def learn_named(self, records: Iterable[StoredRecord]) -> None:
        """Learn topics of which records name partitions."""
        named = {record.topic for record in records if record.partition >= 0 and topic_problem(record.topic) is None}
        for topic in sorted(named)[:_MOST_TO_LEARN]:
            self.learn(topic)

    def refusal(self, record: StoredRecord, error: KafkaError) -> KafkaError | None:
        """Return the error of a record that was refused; None if its partition exists, and is known from now on."""
        if record.partition < 0 or error.code() != KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001  its public name
            return error
        count, problem = self.learn(record.topic)
        return problem or (error if record.partition >= count else None)
