"""Which topics a row may name: none that Kafka cannot have, and none that the outbox itself is run through.

The harvester writes with its own rights what others put into the table. A row for the tracking topic would be a
manifest: the next leader believes it and deletes the rows it lists. One for the leader topic is a claim, which deposes
the leader; one for Kafka's own topics breaks the transaction of all others. So a row's topic is looked at before it is
sent, and such a row is a bad record like any other: held, with its column and the reason.
"""

from __future__ import annotations

from collections.abc import Collection

from outbox_core.config import HarvestConfig
from outbox_core.ports import StoredRecord
from outbox_core.record import topic_problem

_REMEMBERED_TOPICS = 10_000


class DeadLetter(StoredRecord):
    """A held record as it goes to the dead-letter topic. Only the harvester makes one; no store returns it."""

    __slots__ = ()


class RowTopics:
    """The topics that rows have named and may name. Used by one thread at a time.

    Args:
        control: topics that the outbox is run through: of its election, manifests, dead letters. Those of other
            outboxes are known by how their names end.
        dead_letters: the one of them that dead letters may go to.

    Attributes:
        known: topics that were looked at and may be named; look here first, the path is a hot one.
    """

    def __init__(self, control: Collection[str] = (), *, dead_letters: str = "") -> None:
        self.known: set[str] = set()
        self._control = frozenset(control) | ({dead_letters} if dead_letters else set())
        self._dead_letters = dead_letters

    @classmethod
    def of(cls, config: HarvestConfig, identity: str) -> RowTopics:
        """Those of the rows of an outbox with this identity (`<database>.<schema>.<table>`)."""
        tracking = config.tracking_names(identity)
        control = (config.leader_names(identity).topic, tracking.topic, tracking.relay_topic)
        return cls(control, dead_letters=config.dead_letter_name(identity))

    def check(self, record: StoredRecord) -> None:
        """See that a record's topic may be named, and remember it.

        Raises:
            ValueError: naming the column, and why not.
        """
        topic = record[1]
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
