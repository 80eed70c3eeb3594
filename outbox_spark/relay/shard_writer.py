"""One shard of one batch into Kafka, exactly once. No Spark.

    fence -> check the claim -> begin -> last manifest -> opening -> records -> acknowledged -> manifest -> commit

A task may be tried again, its predecessor may still run, its driver may have died, the commit's answer may have been
lost, the batch may be replayed. In each case `init_transactions()` settles the last transaction, and its manifest tells
which of this shard's rows are in Kafka: they are not sent again. The last manifest is enough because a batch is handed
out only when the purge of the one before is committed (`stream.py`).

The task reads the leader topic once, after fencing, up to a message that it writes there itself, for a claim higher
than its own (`outbox_core.election.observer`); a later leader fences it. The topics' limits (`BatchSizes`) are read
before: a producer made after the check would fence a rival that has deposed us since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from outbox_core.config import LeaderNames
from outbox_core.config.kafka_settings import batch_settings
from outbox_core.election.observer import highest_claim
from outbox_core.errors import InvalidRecord, KafkaUnavailable, OutboxError
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.kafka.clients import KafkaConfig, KafkaError
from outbox_core.kafka.errors import ErrorKind, explained, kind_of
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import RecordProducer, Reports
from outbox_core.kafka.topics import TopicLimits
from outbox_core.kafka.tracking import ManifestNotRead, opening_key
from outbox_core.kafka.transactions import Aborted
from outbox_core.stores.interface import StoredRecord
from outbox_spark.relay.fencing import fenced, ledger_after_fence, unless_ended

_log = logging.getLogger(__name__)

MOST_ROWS = 50_000  # of a shard of a batch: their manifest is one record, and brokers take 1 MB by default

_PATIENCE_SECONDS = 90.0
_PAUSE_SECONDS = 0.5
_POLL_SECONDS = 0.01

# They do not pass: of the record, of our rights, of a topic that librdkafka has waited for in vain.
_REFUSALS = (ErrorKind.POISON, ErrorKind.UNAUTHORIZED, ErrorKind.UNKNOWN_TOPIC)


class Deposed(OutboxError):
    """A task of a deposed leader: the rows are the new leader's to publish."""


@dataclass(frozen=True, slots=True)
class ShardWritten:
    """The outcome of a shard: records sent now, and records found in Kafka."""

    sent: int
    found: int


class ShardWriter:
    """A publisher of one shard of one batch, whose rows were marked in `term`. Used by one thread.

    It endures outages of Kafka for `patience` seconds. Tests make `failpoint` fail: "fenced", "sent", "committed".
    """

    def __init__(
        self,
        identity: TransactionalIdentity,
        leader: LeaderNames,
        term: int,
        *,
        server_id: str = "",
        failpoint: Callable[[str], None] = lambda _: None,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self._identity = identity
        self._leader = leader
        self._term = term
        self._server_id = server_id
        self._failpoint = failpoint
        self._give_up_at = time.monotonic() + patience
        self._wants_reports = False  # of deliveries; they cost more than all the rest
        self._limits = TopicLimits(identity.kafka)
        largest, is_compressed = batch_settings(identity.producer)
        self._batches = BatchSizes(self._limits.ask, largest=largest, is_compressed=is_compressed)

    def write(self, records: Sequence[StoredRecord]) -> ShardWritten:
        """Publish the shard's records, by ascending id, that are not in Kafka.

        Raises:
            Deposed: another process has claimed leadership.
            InvalidRecord: Kafka refuses a record.
            KafkaUnavailable: Kafka is away for too long. The records may have been published all the same.
        """
        if len(records) > MOST_ROWS:
            raise InvalidRecord(f"a shard of {len(records)} rows is too large; set maxRecordsPerBatch to {MOST_ROWS}")
        if not records:
            return ShardWritten(0, 0)
        with closing(self._limits):
            while True:
                try:
                    return self._try(records)
                except KafkaUnavailable as error:
                    if self._is_late():
                        raise
                    _log.warning("trying again: %s", error)
                    time.sleep(_PAUSE_SECONDS)

    def _is_late(self) -> bool:
        return time.monotonic() > self._give_up_at

    def _try(self, records: Sequence[StoredRecord]) -> ShardWritten:
        self._batches.meet({record.topic for record in records})
        while self._batches.are_awaited and not self._is_late():
            time.sleep(_POLL_SECONDS)
        with fenced(self._identity.fitting(self._batches.limit), self._is_late) as producer:
            self._failpoint("fenced")
            claim = highest_claim(self._identity.kafka, self._leader, self._term)
            if claim > self._term:
                raise Deposed(
                    f"claim {claim} on {self._leader.topic} is higher than ours, {self._term}: another one leads"
                )
            ledger = ledger_after_fence(self._identity, producer, self._is_late, stays_open=True)
            published = {(row.id, row.create_time) for row in self._torn(producer, ledger.opening, records)}
            if ledger.manifest is not None:
                published.update(zip(ledger.manifest.ids, ledger.manifest.create_times, strict=True))
            missing = [record for record in records if (record.id, record.create_time) not in published]
            if missing:
                self._publish(producer, missing, records)
                self._failpoint("committed")
            else:
                producer.abort()
            return ShardWritten(len(missing), len(records) - len(missing))

    def _torn(
        self, producer: RecordProducer, opening: Opening | None, records: Sequence[StoredRecord]
    ) -> list[StoredRecord]:
        """Return the records that a torn transaction, which is rare, has published."""
        if opening is None:
            return []
        by_id = {record.id: record for record in records}
        unless_ended(producer.abort())  # reading topics may take longer than a transaction may
        if producer.must_replace:
            # Another producer would fence a rival that has deposed us since the check: begin again with that.
            raise KafkaUnavailable("the end of a transaction took too long")
        try:
            chunks = self._identity.read_torn(
                opening, self._is_late, lambda ids: [by_id[number] for number in ids if number in by_id]
            )
            torn = [row for rows in chunks for row in rows]
        except ManifestNotRead as error:
            raise KafkaUnavailable(str(error)) from None
        unless_ended(producer.begin())
        return torn

    def _publish(
        self, producer: RecordProducer, missing: Sequence[StoredRecord], records: Sequence[StoredRecord]
    ) -> None:
        """Write the missing records and a manifest of the whole shard into the open transaction, and commit it."""
        identity = self._identity
        topic, partition = identity.tracking_topic, identity.tracking_partition
        opening = Opening.of(identity.outbox, self._server_id, records).encode()
        unless_ended(producer.send_manifest(topic, opening, partition, key=opening_key(identity.transactional_id)))
        reports = Reports() if self._wants_reports else None
        sent = unless_ended(producer.send(missing, self._is_late, reports))
        if sent is None:
            raise KafkaUnavailable("the producer's queue stayed full")
        if sent.refused:
            producer.abort()
            raise _refusal([sent.refused[0].record], sent.refused[0].error, identity.kafka)
        self._failpoint("sent")
        # The manifest is written once every record is in Kafka.
        if producer.all_arrive(identity.timeout, self._is_late):
            ids, create_times = [record.id for record in records], [record.create_time for record in records]
            manifest = Manifest(identity.outbox, ids, create_times, self._server_id).encode()
            outcome = unless_ended(producer.send_manifest(topic, manifest, partition) or producer.commit())
        else:
            outcome = unless_ended(producer.abort(producer.failure))
        if isinstance(outcome, Aborted):
            raise self._reason_of(outcome, missing, reports.failures if reports else [])

    def _reason_of(
        self, outcome: Aborted, missing: Sequence[StoredRecord], failures: Sequence[Failure]
    ) -> InvalidRecord | KafkaUnavailable:
        """Return the error of an aborted transaction: a refusal is final, an outage or an unclear cause is retried."""
        errors = [failure.error for failure in failures] + ([outcome.error] if outcome.error is not None else [])
        if any(error.code() == KafkaError.MSG_SIZE_TOO_LARGE for error in errors):
            # Smaller batches may be possible: the limit of the topic is not known.
            before = self._batches.limit
            self._batches.refused({record.topic for record in missing})
            if self._batches.limit != before:
                return KafkaUnavailable(f"a batch was too large for its topic, now {self._batches.limit} bytes at most")
        refused = [failure for failure in failures if failure.kind in _REFUSALS]
        if refused:
            return _refusal([failure.record for failure in refused], refused[0].error, self._identity.kafka)
        if outcome.error is None:
            return KafkaUnavailable("the transaction was aborted")
        if kind_of(outcome.error) in _REFUSALS:
            return _refusal(missing, outcome.error, self._identity.kafka)
        self._wants_reports = True  # the next try tells which record failed
        return KafkaUnavailable(outcome.error.str())


def _refusal(among: Sequence[StoredRecord], error: KafkaError, kafka: KafkaConfig) -> InvalidRecord | KafkaUnavailable:
    if kind_of(error) not in _REFUSALS:
        return KafkaUnavailable(error.str())
    first, last = among[0], among[-1]
    which = f"record {first.id}" if len(among) == 1 else f"one of records {first.id} to {last.id}"
    topics = sorted({record.topic for record in among})
    where = f" for topic {topics[0]!r}" if len(topics) == 1 else ""
    return InvalidRecord(
        f"{which}{where}: {explained(error, kafka)}; nothing of its batch's shard was published. Let an ordinary "
        "harvester run, which sets such a record's key aside, or correct the row"
    )
