"""The beginning of a term: settle the last transaction and delete what it published.

The order matters. `init_transactions()` first: it fences the last owner of the transactional.id and waits until its
transaction is committed or aborted. Only then is the last committed manifest read, up to a barrier that we write
(`tracking`); before that it may not be the last. What it lists is in Kafka for certain. Only when those rows are
deleted may anything be read from the table.

An opening behind the last manifest belongs to a transaction that was torn: committed in the middle by something else.
Which of its rows are in Kafka is read back from Kafka (`read_back`), and those are deleted too.

At-least-once delivery does the same where a tracking topic exists, so that a change of mode repeats nothing. Both do it
for each shard of a relay on Spark too, if there ever was one: a relay's shards are transactional.ids with a manifest
each, like the harvester's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from outbox_core.config import HarvestConfig
from outbox_core.election.leadership import now
from outbox_core.errors import KafkaUnavailable, MarkedRowsFound, TrackingTopicError
from outbox_core.harvest.manifest import Manifest, Opening
from outbox_core.harvest.read_back import published_rows, read_back
from outbox_core.harvest.record_producer import RecordProducer
from outbox_core.harvest.surroundings import Surroundings, Timing
from outbox_core.harvest.topics import RowTopics
from outbox_core.harvest.tracking import ForeignLedger, Ledger, ManifestNotRead, read_ledger, write_barrier
from outbox_core.harvest.transaction import Committed, Ended
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.harvest.waiting import Waiting
from outbox_core.kafka import ensure_tracking_topic, grant, partition_count, topic_exists
from outbox_core.ports import OutboxStore, StoredRecord

_log = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE = 1_000
_LONGEST_REST_SECONDS = 5.0
_TOO_LATE = Ended("the leadership ended before the last term was settled")

Find = Callable[[Sequence[int]], Sequence[StoredRecord]]


class Step(Enum):
    """The steps of a term between which a test may stop the process.

    `COMMIT_SENT` is reached when the commit is about to be called, which then blocks: to stop the process while the
    commit is under way, let another thread do it a moment later.
    """

    AFTER_INIT = "after-init"
    AFTER_SCAN = "after-scan"
    AFTER_PRODUCE = "after-produce"
    BEFORE_COMMIT = "before-commit"
    COMMIT_SENT = "commit-sent"
    COMMITTED = "committed"
    BEFORE_PURGE = "before-purge"
    AFTER_PURGE = "after-purge"


def _nothing(_: Step) -> None:
    """What happens at a step when nobody is testing."""


@dataclass(frozen=True, kw_only=True)
class Transactions:
    """What exactly-once delivery needs beside its surroundings.

    Attributes:
        kafka: librdkafka settings of the cluster.
        producer: librdkafka settings of the transactional producer.
        transactional_id: the outbox's own, the same for every process that may harvest it.
        tracking_topic: where the manifests are.
        outbox: identity of the outbox, `<database>.<schema>.<table>`.
        outbox_name: what stands before the row's id in the id header.
        id_header: name of that header, '' for none.
        timeout: `transaction.timeout.ms`, in seconds.
        heartbeat_timeout: length of a lease, in seconds.
        accept_marked: publish rows that carry an at-least-once leader's mark, although that may repeat them.
        group: the leader group: the group.id of readers, as we need READ on that one anyway.
        accept_moved: obey manifests that name another database server.
        reached: called at every step of a term.
        tracking_partition: which partition of the tracking topic belongs to this transactional.id.
        relay_topic: where a relay on Spark leaves the manifests of its shards, one partition for each.
        topics: tells which topics rows may name.
    """

    kafka: Mapping[str, Any] = field(repr=False)
    producer: Mapping[str, Any] = field(repr=False)
    transactional_id: str
    tracking_topic: str
    outbox: str
    outbox_name: str
    id_header: str
    timeout: float
    heartbeat_timeout: float
    accept_marked: bool
    group: str
    accept_moved: bool = False
    reached: Callable[[Step], None] = _nothing
    tracking_partition: int = 0
    relay_topic: str = ""
    topics: RowTopics = field(default_factory=RowTopics)

    @classmethod
    def of(cls, config: HarvestConfig, identity: str, reached: Callable[[Step], None] = _nothing) -> Transactions:
        """Those of an outbox with this identity (`<database>.<schema>.<table>`)."""
        names = config.tracking_names(identity)
        return cls(
            kafka=config.base_kafka_config,
            producer=config.transactional_settings(names.transactional_id),
            transactional_id=names.transactional_id,
            tracking_topic=names.topic,
            outbox=identity,
            outbox_name=config.outbox_name or identity,
            id_header=config.id_header,
            timeout=config.limits.transaction_timeout.total_seconds(),
            heartbeat_timeout=config.limits.heartbeat_timeout.total_seconds(),
            accept_marked=config.accept_marked,
            group=config.leader_names(identity).group_id,
            accept_moved=config.accept_moved,
            reached=reached,
            relay_topic=names.relay_topic,
            topics=RowTopics.of(config, identity),
        )

    def of_shard(self, shard: int) -> Transactions:
        """What a relay publishes one of its shards with."""
        transactional_id = f"{self.transactional_id}:shard-{shard}"
        return replace(
            self,
            producer={**self.producer, "transactional.id": transactional_id},
            transactional_id=transactional_id,
            tracking_topic=self.relay_topic,
            tracking_partition=shard,
        )

    def fitting(self, max_batch_bytes: int | None) -> Transactions:
        """The same with batches of so many bytes at most; None for what the settings say."""
        if max_batch_bytes is None:
            return self
        return replace(self, producer={**self.producer, "batch.size": max_batch_bytes})

    def relay_shards(self) -> list[Transactions]:
        """All shards that a relay of this outbox may ever have had; none if there never was one.

        Raises:
            KafkaUnavailable: if the cluster does not answer.
        """
        width = partition_count(self.kafka, self.relay_topic) if self.relay_topic else 0
        return [self.of_shard(shard) for shard in range(width)]

    def new_producer(self) -> RecordProducer:
        """A producer for one term."""
        return RecordProducer(
            self.producer,
            id_header=self.id_header,
            outbox_name=self.outbox_name,
            timeout_seconds=self.timeout + 5.0,
            topics=self.topics,
        )

    def ledger(self, producer: RecordProducer, give_up: Callable[[], bool]) -> Ledger | Ended:
        """Read what the last transactions were; only valid after the producer's `init`, before its first transaction.

        Args:
            producer: of the next transactions.
            give_up: asked now and then.

        Raises:
            TrackingTopicError: if the topic cannot be used, or belongs to another outbox.
        """
        ledger = self._read_behind_barrier(producer, give_up)
        if isinstance(ledger, Ended):
            return ledger
        aborted = producer.abort(give_up=give_up)  # first of all: readers of the topic wait for it
        return aborted if isinstance(aborted, Ended) else self._checked(ledger)

    def open(self, producer: RecordProducer, give_up: Callable[[], bool]) -> Ledger | Ended:
        """Do the same, and leave the transaction that the barrier is in open, for records and a manifest."""
        ledger = self._read_behind_barrier(producer, give_up)
        return ledger if isinstance(ledger, Ended) else self._checked(ledger)

    def _read_behind_barrier(self, producer: RecordProducer, give_up: Callable[[], bool]) -> Ledger | Ended:
        topic, partition, transactional_id = self.tracking_topic, self.tracking_partition, self.transactional_id
        barrier = write_barrier(producer, topic, partition, transactional_id, give_up)
        if isinstance(barrier, Ended):
            if barrier.cause is not None and verdict_on(barrier.cause) is Verdict.FORBIDDEN:
                needed = grant("WRITE", self.producer)
                raise TrackingTopicError(f"tracking topic {topic!r}: {barrier.cause.str()}; {needed}")
            return barrier
        try:
            return read_ledger(self.kafka, self.group, topic, partition, transactional_id, end=barrier, give_up=give_up)
        except ManifestNotRead as error:
            return Ended(f"cannot read the tracking topic: {error}")
        except ForeignLedger:
            producer.abort(give_up=give_up)  # readers of the topic wait for it
            raise

    def begin(self, producer: RecordProducer, known: Ledger, give_up: Callable[[], bool]) -> Ended | None:
        """Open a transaction, in an epoch in which no request can be late (R13 of docs/explanation-exactly-once.md).

        That may take a new producer, which fences whoever has fenced the old one, and we would never hear of that one.
        So see that nobody has published in between: then what was decided before still holds. All that is in the new
        producer's first transaction: with an end of its own it might have to be replaced in its turn, and so on.

        Args:
            producer: of the term.
            known: what the tracking topic said last.
            give_up: asked now and then.

        Raises:
            TrackingTopicError: if the topic cannot be used, or belongs to another outbox.
        """
        if not producer.must_replace:
            return producer.begin()
        ledger = producer.replace(give_up) or self.open(producer, give_up)
        if isinstance(ledger, Ended):
            return ledger
        if (ledger.offset, ledger.opening) != (known.offset, known.opening):
            return Ended("another process has published meanwhile")
        return None

    def _checked(self, ledger: Ledger) -> Ledger:
        for found in (ledger.manifest, ledger.opening):
            if found is not None and found.outbox != self.outbox:
                raise ForeignLedger(
                    f"tracking topic {self.tracking_topic!r} belongs to the outbox {found.outbox}, not to "
                    f"{self.outbox}; set another tracking_topic, or delete this one if the outbox has been renamed and "
                    "its harvester stopped"
                )
        return ledger

    def refuse_foreign(self, ledger: Ledger) -> None:
        """See that nobody else writes to the tracking topic.

        Raises:
            ForeignLedger: if somebody does.
        """
        if ledger.foreign:
            raise ForeignLedger(
                f"tracking topic {self.tracking_topic!r} is used by another transactional.id than "
                f"{self.transactional_id!r}: it holds {ledger.foreign}; every outbox needs its own"
            )

    def is_of_other_server(self, ledger: Ledger, server: str) -> bool:
        """Whether the ledger lists rows of another database server, and that is accepted.

        Args:
            ledger: what the tracking topic says.
            server: ID of the server that we are connected to, '' if it is not known.

        Raises:
            ForeignLedger: if it does, and that is not accepted.
        """
        named = {found.server for found in (ledger.manifest, ledger.opening) if found is not None}
        others = named - {"", server} if server else set()
        if others and not self.accept_moved:
            raise ForeignLedger(
                f"tracking topic {self.tracking_topic!r} belongs to {self.outbox} on the database server with the "
                f"system identifier {', '.join(sorted(others))}; this server has {server}. If that is another outbox "
                "of the same name (a clone, a test system), give this one a leader_group_id of its own. If the "
                "database was moved here (logical replication, dump and restore), and nothing harvests the old one "
                "any more, start once with --accept-moved (acceptMoved: true)"
            )
        return bool(others)

    def adopt(
        self, producer: RecordProducer, server: str, known: Ledger, give_up: Callable[[], bool]
    ) -> Ledger | Ended:
        """Leave a manifest of no rows: what the last one listed is settled, and the outbox is ours from here on.

        Args:
            producer: of the next transactions.
            server: ID of the database server, '' if it is not known.
            known: what was settled.
            give_up: asked now and then.

        Returns:
            What the tracking topic says from then on.
        """
        manifest = Manifest(self.outbox, [], [], server).encode()
        topic, partition = self.tracking_topic, self.tracking_partition
        outcome = (
            self.begin(producer, known, give_up)
            or producer.send_manifest(topic, manifest, partition)
            or producer.commit(give_up)
        )
        if isinstance(outcome, Committed):
            return Ledger(offset=producer.manifest_offset)
        return outcome if isinstance(outcome, Ended) else Ended("the tracking topic takes no manifest")

    def read_torn(self, opening: Opening, give_up: Callable[[], bool], find: Find) -> Iterator[list[StoredRecord]]:
        """The rows of a torn batch that are in Kafka, some at a time.

        Args:
            opening: of the batch.
            give_up: asked now and then.
            find: reads rows from the table by id.

        Raises:
            ManifestNotRead: if Kafka could not be read.
        """
        what = f"the transaction of rows {opening.first} to {opening.last} was committed in part"
        if not self.id_header or opening.topics is None:
            _log.error(
                "%s; without %s nobody can tell which: they are published again, and some are repeated",
                what,
                "an id header" if not self.id_header else "the names of its topics",
            )
            return
        _log.warning("%s; reading back which from %d topics", what, len(opening.topics))
        seen = read_back(
            self.kafka,
            self.group,
            opening,
            id_header=self.id_header,
            outbox_name=self.outbox_name,
            give_up=give_up,
        )
        yield from published_rows(seen, find)


class Recovery:
    """Settles the last term.

    Args:
        transactions: what the last term published with, and the next one will.
        over: whether the leadership is over.
        timing: limits.
        surroundings: what to work with.

    Attributes:
        ledger: what the tracking topic says, once that is settled.
    """

    def __init__(
        self, transactions: Transactions, over: Callable[[], bool], timing: Timing, surroundings: Surroundings
    ) -> None:
        self._transactions = transactions
        self._over = over
        self._timing = timing
        self._with = surroundings
        self._waiting = Waiting(over, timing, surroundings)
        self.ledger = Ledger()
        self._server: str | None = None
        self._is_strict = True  # exactly-once delivery obeys the tracking topic, so that must be ours alone

    def check_topic(self) -> Ended | None:
        """See that the tracking topic is what it has to be: it may have been deleted, and made anew by the broker."""
        try:
            ensure_tracking_topic(self._transactions.kafka, self._transactions.tracking_topic)
        except (KafkaUnavailable, TrackingTopicError) as error:
            return Ended(str(error))
        return None

    def settle(self, producer: RecordProducer) -> Ended | None:
        """Fence the last owner, settle its transaction, delete what it published; a relay's likewise."""
        return self._settle(self._transactions, producer) or self._settle_shards()

    def _settle_shards(self) -> Ended | None:
        try:
            shards = self._transactions.relay_shards()
        except KafkaUnavailable as error:
            return Ended(str(error))
        for shard in shards:
            ended = self._settle_alone(shard)
            if ended is not None:
                return ended
        return None

    def _settle(self, transactions: Transactions, producer: RecordProducer) -> Ended | None:
        ended = producer.init(self._patience(transactions))
        if ended is not None:
            return ended
        transactions.reached(Step.AFTER_INIT)
        ledger = transactions.ledger(producer, self._patience(transactions))
        if isinstance(ledger, Ended):
            return ledger
        if self._is_strict:
            transactions.refuse_foreign(ledger)
        elif ledger.foreign:
            _log.warning("tracking topic %r: %s is ignored", transactions.tracking_topic, ledger.foreign)
        has_moved = transactions.is_of_other_server(ledger, self.server_id())
        manifest = ledger.manifest
        if manifest is not None and not self._delete(manifest.ids, manifest.create_times):
            return _TOO_LATE
        ended = None if ledger.opening is None else self._settle_torn(transactions, ledger.opening)
        known = ended or self._leave_trace(transactions, producer, ledger, has_moved=has_moved)
        if isinstance(known, Ended):
            return known
        if transactions is self._transactions:
            self.ledger = known
        return None

    def _leave_trace(
        self, transactions: Transactions, producer: RecordProducer, settled: Ledger, *, has_moved: bool
    ) -> Ledger | Ended:
        """Say in the tracking topic that what was found there is settled, where the next manifest would come too late.

        One that leads in the other mode leaves none; a leader that was deposed, and replaces its producer, must see it.
        And a torn batch is not to be read back again by every term, from topics that grow.
        """
        is_other_mode = transactions is self._transactions and not self._is_strict
        if not has_moved and settled.opening is None and not is_other_mode:
            return settled
        return transactions.adopt(producer, self.server_id(), settled, self._patience(transactions))

    def _patience(self, transactions: Transactions) -> Callable[[], bool]:
        """Says when to give up: a transaction of ours is open meanwhile, and ends after its time-out."""
        give_up_at = now() + transactions.timeout
        return lambda: self._over() or now() > give_up_at

    def server_id(self) -> str:
        """The database server's ID; '' where it is withheld, or if the leadership ends first."""
        if self._server is None:
            self._server = self._waiting.insist(self._with.marker, lambda store: store.server_id())
        return self._server or ""

    def _settle_torn(self, transactions: Transactions, opening: Opening) -> Ended | None:
        try:
            for rows in transactions.read_torn(opening, self._over, self._find):
                if not self._delete([row[0] for row in rows], [row[7] for row in rows]):
                    return _TOO_LATE
        except ManifestNotRead as error:
            return Ended(str(error))
        return None

    def _find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        found = self._waiting.insist(self._with.purger, lambda store: store.find(ids))
        if found is None:
            raise ManifestNotRead(_TOO_LATE.reason)
        return found

    def _delete(self, ids: Sequence[int], create_times: Sequence[int]) -> bool:
        """Delete rows that are in Kafka; False if the leadership ended first."""
        settled = self._waiting.insist(self._with.purger, lambda store: store.settle(ids, create_times))
        if settled is not None:
            self._with.removal.ended()
        if settled:
            _log.info("purged %d rows that the last term had published", settled)
        return settled is not None

    def settle_if_tracked(self) -> None:
        """Before at-least-once delivery: settle the last exactly-once term, and a relay's, if there ever was one.

        What in those topics is not ours is no reason to stop here: the topics need not exist at all.
        """
        self._is_strict = False
        rest = self._timing.io_error_backoff
        while not self._over():
            try:
                ended = self._settle_shards()
                if ended is None and topic_exists(self._transactions.kafka, self._transactions.tracking_topic):
                    ended = self._settle_alone(self._transactions)
            except KafkaUnavailable as error:
                ended = Ended(str(error))
            if ended is None:
                return
            self._with.kafka.began(ended.reason)
            self._waiting.rest(rest)
            rest = min(2 * rest, _LONGEST_REST_SECONDS)

    def _settle_alone(self, transactions: Transactions) -> Ended | None:
        producer = transactions.new_producer()
        try:
            return self._settle(transactions, producer)
        except ForeignLedger as error:
            if self._is_strict:
                raise
            _log.warning("%s; going on at least once without it", error)
            return None
        finally:
            producer.discard()

    def refuse_marks(self) -> None:
        """Before exactly-once delivery: see what an at-least-once leader may have left, and hold it.

        What it sent would be repeated. So the marked rows wait, with their keys, until somebody decides; all others
        go on, since a writer that may set `leader_id` must not be able to stop them.

        Raises:
            MarkedRowsFound: if there are marked rows, and no holds to keep them back with.
        """
        if self._transactions.accept_marked:
            self._accept_marks()
            return
        marked = self._ask(lambda store: store.marked())
        if marked is None or not marked.number:
            return
        what = f"{marked.number} rows (ids {marked.first} to {marked.last}) carry the mark of an at-least-once leader"
        can_hold = self._ask(_can_hold)
        if can_hold is False:
            raise MarkedRowsFound(
                f"{what} that did not stop in good order: those that it had sent would be repeated, and there is no "
                "table of holds to keep them back with (`outbox schema --only hold` makes it). Let an at-least-once "
                "harvester drain them, or accept the possible repeats with --accept-marked"
            )
        if can_hold:
            _log.warning(
                "%s that did not stop in good order, or that their writers set: they are held, with their keys, as "
                "they may have been published already; see `outbox hold list`. Release or skip them; --accept-marked "
                "releases all of them",
                what,
            )
            while self._ask(lambda store: store.hold_marked(_AT_ONCE)):
                pass

    def _accept_marks(self) -> None:
        """Let marked rows be published, and those that were held for their marks."""
        marked = self._ask(lambda store: store.marked())
        if marked is None:
            return
        if marked.number:
            _log.warning(
                "%d rows (ids %d to %d) carry the mark of an at-least-once leader; those that it had sent are repeated",
                *marked,
            )
            self._ask(lambda store: store.clear_marks())
        released = self._ask(lambda store: store.release_marked())
        if released:
            _log.warning("%d rows that were held for their marks are released", released)

    def _ask(self, question: Callable[[OutboxStore], T]) -> T | None:
        return self._waiting.insist(self._with.marker, question)


def _can_hold(store: OutboxStore) -> bool:
    holds = store.holds()
    return holds is not None and holds.may_change
