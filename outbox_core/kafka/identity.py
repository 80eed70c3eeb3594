"""The transactional identity of an outbox: its transactional.id, and the place of its manifests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from outbox_core import tracing
from outbox_core.config import HarvestConfig
from outbox_core.errors import TrackingTopicError
from outbox_core.kafka.errors import ErrorKind, grant, kind_of
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.row_topics import RowTopics
from outbox_core.kafka.topics import ensure_tracking_topic, partition_count
from outbox_core.kafka.torn_batches import published_rows, read_back
from outbox_core.kafka.tracking import (
    ForeignLedger,
    Ledger,
    ManifestNotRead,
    holds_only_ours,
    read_ledger,
    write_barrier,
)
from outbox_core.kafka.transactions import Committed, Ended
from outbox_core.stores.interface import StoredRecord

_LEAST_END_SECONDS = 5.0

_log = logging.getLogger(__name__)

Find = Callable[[Sequence[int]], Sequence[StoredRecord]]


class Failpoint(Enum):
    """The steps of a term at which a test may stop the process."""

    AFTER_INIT = "after-init"
    AFTER_SCAN = "after-scan"
    AFTER_PRODUCE = "after-produce"
    BEFORE_COMMIT = "before-commit"
    COMMIT_SENT = "commit-sent"  # before the call, which blocks: during it, let another thread stop the process
    COMMITTED = "committed"
    BEFORE_PURGE = "before-purge"
    AFTER_PURGE = "after-purge"


def _nothing(_: Failpoint) -> None:
    """Go on: this is no test."""


@dataclass(frozen=True, kw_only=True)
class TransactionalIdentity:
    """The settings of one transactional.id and of its tracking topic."""

    kafka: Mapping[str, Any] = field(repr=False)  # librdkafka settings of the cluster
    producer: Mapping[str, Any] = field(repr=False)  # librdkafka settings of the transactional producer
    transactional_id: str  # the same for every process that may harvest the outbox
    tracking_topic: str
    outbox: str  # its identity, `<database>.<schema>.<table>`
    outbox_name: str  # before the row's id in the id header
    id_header: str  # '' for none
    timeout: float  # `transaction.timeout.ms`, in seconds
    end_timeout: float  # for the answer to a commit or an abort, in seconds
    heartbeat_timeout: float  # length of a lease, in seconds
    accept_marked: bool  # publish rows with an at-least-once leader's mark, although that may repeat them
    group: str  # group.id of readers: the leader group, as we need READ on it anyway
    accept_moved: bool = False  # obey manifests that name another database server
    reached: Callable[[Failpoint], None] = _nothing
    tracking_partition: int = 0
    relay_topic: str = ""  # manifests of the shards of a relay on Spark, one partition for each
    topics: RowTopics = field(default_factory=RowTopics)

    @classmethod
    def of(
        cls, config: HarvestConfig, identity: str, reached: Callable[[Failpoint], None] = _nothing
    ) -> TransactionalIdentity:
        """Return the identity for an outbox (`<database>.<schema>.<table>`)."""
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
            # It cannot be cut short, and a stop waits for it; but who wants quick stops may have a slow broker.
            end_timeout=max(config.limits.drain_timeout.total_seconds(), _LEAST_END_SECONDS),
            heartbeat_timeout=config.limits.heartbeat_timeout.total_seconds(),
            accept_marked=config.accept_marked,
            group=config.leader_names(identity).group_id,
            accept_moved=config.accept_moved,
            reached=reached,
            relay_topic=names.relay_topic,
            topics=RowTopics.of(config, identity),
        )

    def of_shard(self, shard: int) -> TransactionalIdentity:
        """Return the identity with which a relay publishes one of its shards."""
        transactional_id = f"{self.transactional_id}:shard-{shard}"
        return replace(
            self,
            producer={**self.producer, "transactional.id": transactional_id},
            transactional_id=transactional_id,
            tracking_topic=self.relay_topic,
            tracking_partition=shard,
        )

    def fitting(self, max_batch_bytes: int | None, *, unbatched: bool = False) -> TransactionalIdentity:
        """Return the same identity with a limit on batches in bytes, None for that of the settings, or on records."""
        sizes = {} if max_batch_bytes is None else {"batch.size": max_batch_bytes}
        return replace(self, producer={**self.producer, **({"batch.num.messages": 1} if unbatched else sizes)})

    def relay_shards(self) -> list[TransactionalIdentity]:
        """Return all shards that a relay of this outbox may ever have had."""
        width = partition_count(self.kafka, self.relay_topic) if self.relay_topic else 0
        return [self.of_shard(shard) for shard in range(width)]

    def ensure_topic(self, *, at_start: bool = False) -> None:
        """Make the tracking topic if it is missing, and check it; raise KafkaUnavailable or TrackingTopicError.

        One that a broker has made meanwhile gets its settings; but none `at_start`, when its name may be wrong.
        """

        def is_ours() -> bool:
            return holds_only_ours(self.kafka, self.group, self.tracking_topic, self.transactional_id)

        ensure_tracking_topic(self.kafka, self.tracking_topic, (lambda: False) if at_start else is_ours)

    def new_producer(self) -> RecordProducer:
        """Make a producer for one term."""
        return _producer_class()(
            self.producer,
            id_header=self.id_header,
            outbox_name=self.outbox_name,
            timeout_seconds=self.end_timeout,
            topics=self.topics,
        )

    def ledger(self, producer: RecordProducer, give_up: Callable[[], bool]) -> Ledger | Ended:
        """Read the last transactions; only valid after the producer's `init`, before its first transaction."""
        ledger = self._read_behind_barrier(producer, give_up)
        if isinstance(ledger, Ended):
            return ledger
        aborted = producer.abort(give_up=give_up)  # first of all: readers of the topic wait for it
        return aborted if isinstance(aborted, Ended) else self._checked(ledger)

    def open(self, producer: RecordProducer, give_up: Callable[[], bool]) -> Ledger | Ended:
        """Read them as `ledger` does, and leave the barrier's transaction open, for records and a manifest."""
        ledger = self._read_behind_barrier(producer, give_up)
        return ledger if isinstance(ledger, Ended) else self._checked(ledger)

    def _read_behind_barrier(self, producer: RecordProducer, give_up: Callable[[], bool]) -> Ledger | Ended:
        topic, partition, transactional_id = self.tracking_topic, self.tracking_partition, self.transactional_id
        barrier = write_barrier(producer, topic, partition, transactional_id, give_up)
        if isinstance(barrier, Ended):
            if barrier.cause is not None and kind_of(barrier.cause) is ErrorKind.UNAUTHORIZED:
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

        That may take a new producer, which would also fence a process that has fenced the old one, unnoticed by us. So
        check that no other process has published since `known`: then earlier decisions still hold. The new producer's
        first transaction holds all of it: a separate one could make another replacement necessary, and so on.
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
        """Raise ForeignLedger if another transactional.id writes to the tracking topic."""
        if ledger.foreign:
            raise ForeignLedger(
                f"tracking topic {self.tracking_topic!r} is used by another transactional.id than "
                f"{self.transactional_id!r}: it holds {ledger.foreign}; every outbox needs its own"
            )

    def is_of_other_server(self, ledger: Ledger, server: str) -> bool:
        """Tell whether the ledger lists another server's rows, or raise ForeignLedger unless that is accepted."""
        named = {found.server for found in (ledger.manifest, ledger.opening) if found is not None}
        others = named - {"", server} if server else set()
        if others and not self.accept_moved:
            raise ForeignLedger(
                f"tracking topic {self.tracking_topic!r} belongs to {self.outbox} on the database server with the "
                f"system identifier {', '.join(sorted(others))}; this server has {server}. If that is another outbox "
                "of the same name (a clone, a test system), give this one a leader_group_id of its own. If the "
                "database was upgraded (pg_upgrade) or moved (logical replication, dump and restore), and nothing "
                "harvests the old one any more, start once with --accept-moved (acceptMoved: true)"
            )
        return bool(others)

    def adopt(
        self, producer: RecordProducer, server: str, known: Ledger, give_up: Callable[[], bool]
    ) -> Ledger | Ended:
        """Write a manifest of no rows, which settles the last one, and return the ledger from then on."""
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
        """Yield a torn batch's rows that are in Kafka, some at a time, or raise ManifestNotRead."""
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


def _producer_class() -> Callable[..., RecordProducer]:
    """Return the class of producers, one that makes spans if the process does."""
    spans = tracing.active()
    if spans is None:
        return RecordProducer
    from outbox_core.kafka.traced_producer import TracedRecordProducer

    return partial(TracedRecordProducer, spans=spans)
