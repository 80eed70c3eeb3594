"""The parts of a harvester, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from outbox_core import tracing
from outbox_core.commit_signal import CommitFlag
from outbox_core.config import HarvestConfig
from outbox_core.election import Neli, NeliConfig
from outbox_core.election.interface import ElectorFactory, LeaderElector
from outbox_core.errors import OutboxTableError
from outbox_core.events import EventHandler
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.at_least_once.send_window import SendWindow
from outbox_core.harvest.context import DeadLetterTopic
from outbox_core.harvest.questions import HarvesterQuestions
from outbox_core.harvest.work_watch import Questions
from outbox_core.kafka.clients import Producer, make_producer
from outbox_core.kafka.row_topics import RowTopics
from outbox_core.kafka.topics import ensure_dead_letter_topic, forbidden_topics
from outbox_core.metrics import HarvestMetrics
from outbox_core.schema import TableName
from outbox_core.stores.interface import OutboxStore, StoreFactory, may_hold
from outbox_core.upkeep.wakeup import CommitListener

if TYPE_CHECKING:
    from outbox_core.stores.postgres.store import PostgresStore

ProducerFactory = Callable[[], Producer]

_PROBE_SECONDS = 5.0


class Identity(NamedTuple):
    """The outbox's identity, `<database>.<schema>.<table>`, and the ID of its server."""

    outbox: str
    server_id: str


class Parts:
    """The maker of one harvester's parts; each factory replaces a default."""

    def __init__(
        self,
        config: HarvestConfig,
        store_factory: StoreFactory | None,
        elector_factory: ElectorFactory | None,
        producer_factory: ProducerFactory | None,
    ) -> None:
        self._config = config
        self._elector_factory = elector_factory
        self._producer_factory = producer_factory
        self._found: TableName | None = None
        self._had_holds = False
        self.store = store_factory or self._postgres_store

    def identify(self) -> Identity:
        """Check the table, and return its identity; all further stores are of this very table.

        Looked up by each of them, a name without a schema may mean another table, once one is made earlier on the path.
        """
        with closing(self.store()) as store:
            identity = Identity(store.check(), store.server_id())
            if self.store == self._postgres_store:
                table = cast("PostgresStore", store).table
                self._found, self._had_holds = table.found, table.had_holds
        return identity

    def elector(self, identity: Identity, on_event: EventHandler) -> LeaderElector:
        """Make the elector."""
        if self._elector_factory is not None:
            return self._elector_factory(on_event)
        return Neli(NeliConfig.of(self._config, *identity), on_event)

    def questions(self, identity: Identity) -> Questions:
        """Make the questions of the watch over the work."""
        config = self._config
        group = config.leader_names(identity.outbox).group_id
        store, database = self.store, f"the database of {identity.outbox}"
        if store == self._postgres_store:
            from outbox_core.stores.postgres.connection import location

            store, database = self._probing_store, location(config.data_source)
        return HarvesterQuestions(config.base_kafka_config, group, store, database)

    def publisher(self, identity: Identity, topics: RowTopics) -> Publisher | None:
        """Make the producer of at-least-once delivery; None for exactly once, which makes one for each term."""
        config, make = self._config, self._producer_factory
        if config.delivery == "exactly-once":
            return None
        return _publisher_class()(
            lambda limits: make() if make else make_producer({**config.producer_settings(), **limits}),
            lambda limits: make_producer({**config.unbatched_producer_settings(), **limits}),
            id_header=config.id_header,
            outbox_name=config.outbox_name or identity.outbox,
            topics=topics,
        )

    def send_window(self, metrics: HarvestMetrics) -> SendWindow:
        """Make the window of the leases."""
        config = self._config
        # A producer of the user's own making has the delivery timeout that it has.
        shortest = None if self._producer_factory else config.shortest_delivery_timeout.total_seconds()
        return SendWindow(config.delivery_timeout.total_seconds(), metrics, shortest=shortest)

    def dead_letter_topic(self, identity: Identity) -> DeadLetterTopic:
        """Return the dead-letter topic; raise OutboxTableError if `on_poison` needs holds that cannot be used."""
        config = self._config
        name, kafka = config.dead_letter_name(identity.outbox), config.base_kafka_config
        topic = DeadLetterTopic(
            topic=name,
            on_poison=config.on_poison == "dead-letter",
            ensure=lambda: ensure_dead_letter_topic(kafka, name),
            forbidden=lambda topics: forbidden_topics(kafka, topics),
        )
        if topic.on_poison:
            with closing(self.store()) as store:
                can_hold = may_hold(store.holds)
            if not can_hold:
                raise OutboxTableError(
                    f"on_poison: dead-letter needs the holds of {config.outbox_table}, which cannot be used (the "
                    "log says why); make their table with `outbox schema --only hold --table "
                    f"{config.outbox_table} --apply`, with Alembic or with `manage.py migrate`"
                )
            topic.ensure()
        return topic

    def commit_listener(self, commits: CommitFlag) -> CommitListener | None:
        """Make the listener for NOTIFY, if that is configured."""
        if not self._config.notify:
            return None
        from outbox_core.stores.postgres.notify import CommitNotices

        config = self._config
        table = config.outbox_table if self._found is None else str(self._found)
        notices = CommitNotices(config.data_source, table, application_name=self._application_name)
        return CommitListener(notices, commits)

    def _probing_store(self) -> OutboxStore:
        return self._postgres_store(min(_PROBE_SECONDS, self._config.limits.statement_timeout.total_seconds()))

    def _postgres_store(self, statement_timeout: float | None = None) -> OutboxStore:
        # Here, so that a store of another kind needs no psycopg.
        from outbox_core.stores.postgres.store import PostgresStore

        config = self._config
        return PostgresStore(
            config.data_source,
            config.outbox_table,
            application_name=self._application_name,
            statement_timeout=statement_timeout or config.limits.statement_timeout.total_seconds(),
            max_message_bytes=config.max_message_bytes,
            archive_days=config.archive_days if config.retention == "archive" else None,
            found=self._found,
            had_holds=self._had_holds,
        )

    @property
    def _application_name(self) -> str:
        return f"kafka-outbox {self._config.name}"[:63]


def _publisher_class() -> Callable[..., Publisher]:
    """Return the class of publishers, one that makes spans if the process does."""
    spans = tracing.active()
    if spans is None:
        return Publisher
    from outbox_core.harvest.at_least_once.traced_publisher import TracedPublisher

    return partial(TracedPublisher, spans=spans)
