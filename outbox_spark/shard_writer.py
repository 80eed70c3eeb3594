"""One shard of one batch into Kafka, once, without Spark.

    fence -> who leads? -> begin -> last manifest -> opening -> records -> acknowledged -> manifest -> commit

A task may be tried again, its predecessor may still run, its driver may have died, the commit's answer may have been
lost, the batch may be replayed from a checkpoint or without one. All of that comes down to one question: is this shard
of this batch in Kafka? `init_transactions()` settles it, and the shard's last manifest answers it, as it was written in
the same transaction. Rows that it lists are not sent again.

The last manifest is enough because a batch is handed out only when the purge of the one before is committed
(`outbox_stream.py`). Whether we may write at all the leader topic tells (`claims.py`): it is read once, after fencing,
up to a message that we write there ourselves; whoever leads later fences us.

Batches fit the topics (`batch_sizes.py`). Limits are asked for before the producer is made: one made later, to change
its batches, would fence whoever has deposed us since we looked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from outbox_core.config import LeaderNames
from outbox_core.config.kafka_settings import batch_settings
from outbox_core.errors import InvalidRecord, KafkaUnavailable, OutboxError
from outbox_core.harvest.batch_sizes import BatchSizes
from outbox_core.harvest.manifest import Manifest, Opening
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.record_producer import RecordProducer
from outbox_core.harvest.recovery import Transactions
from outbox_core.harvest.tracking import ManifestNotRead, opening_key
from outbox_core.harvest.transaction import Aborted, Ended, Outcome
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.kafka import KafkaConfig, KafkaError, TopicLimits, explained
from outbox_core.ports import StoredRecord
from outbox_spark.claims import highest_claim
from outbox_spark.takeover import fence, ledger_after_fence

_log = logging.getLogger(__name__)

MOST_ROWS = 50_000
"""Most rows of one shard of one batch: their manifest is one record, which brokers take up to 1 MB by default."""

_PATIENCE_SECONDS = 90.0
_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 0.01

_REFUSALS = (Verdict.RECORD, Verdict.FORBIDDEN, Verdict.AWAY)
"""What does not pass by itself: the record, our rights, or a topic that librdkafka has waited for in vain."""


class Deposed(OutboxError):
    """Another process leads the outbox by now; what was to be published is its business."""


@dataclass(frozen=True, slots=True)
class ShardWritten:
    """What became of a shard.

    Attributes:
        sent: how many records were published now.
        found: how many had been published before.
    """

    sent: int
    found: int


class ShardWriter:
    """Publishes one shard of one batch. Used by one thread.

    Args:
        transactions: the shard's (`Transactions.of_shard`).
        leader: the leader group, and the topic where its claims are.
        term: the number of the claim under which the rows were marked.
        server_id: of the database server that has the rows, '' if unknown.
        reached: called with the name of each step, for tests: "fenced", "sent", "committed".
        patience: for how many seconds outages of Kafka are borne.
    """

    def __init__(
        self,
        transactions: Transactions,
        leader: LeaderNames,
        term: int,
        *,
        server_id: str = "",
        reached: Callable[[str], None] = lambda _: None,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self._transactions = transactions
        self._leader = leader
        self._term = term
        self._server_id = server_id
        self._reached = reached
        self._give_up_at = time.monotonic() + patience
        self._wants_reports = False  # of deliveries; they cost more than all the rest
        self._limits = TopicLimits(transactions.kafka)
        largest, is_compressed = batch_settings(transactions.producer)
        self._batches = BatchSizes(self._limits.ask, largest=largest, is_compressed=is_compressed)

    def write(self, records: Sequence[StoredRecord]) -> ShardWritten:
        """Publish records, those that have not been.

        Args:
            records: all of the shard, by ascending id.

        Raises:
            Deposed: if another process has claimed leadership.
            InvalidRecord: if Kafka refuses a record.
            KafkaUnavailable: if Kafka is away for too long. It may have been published all the same.
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
                    if time.monotonic() > self._give_up_at:
                        raise
                    _log.warning("trying again: %s", error)
                    time.sleep(_PAUSE_SECONDS)

    def _over(self) -> bool:
        return time.monotonic() > self._give_up_at

    def _try(self, records: Sequence[StoredRecord]) -> ShardWritten:
        producer = fence(self._transactions.fitting(self._largest_batch(records)), self._over)
        try:
            self._reached("fenced")
            self._look_who_leads()
            ledger = ledger_after_fence(self._transactions, producer, self._over, stays_open=True)
            torn = self._torn(producer, ledger.opening, records)
            missing = _without(records, ledger.manifest, torn)
            if missing:
                self._publish(producer, missing, records)
                self._reached("committed")
            else:
                producer.abort()
            return ShardWritten(len(missing), len(records) - len(missing))
        finally:
            producer.discard()

    def _largest_batch(self, records: Sequence[StoredRecord]) -> int | None:
        """How many bytes the records' topics take at once; None if that is no less than the settings say."""
        self._batches.meet({record[1] for record in records})
        while self._batches.are_awaited and not self._over():
            time.sleep(_LOOK_SECONDS)
        return self._batches.limit

    def _look_who_leads(self) -> None:
        claim = highest_claim(self._transactions.kafka, self._leader, self._term)
        if claim > self._term:
            raise Deposed(f"claim {claim} on {self._leader.topic} is higher than ours, {self._term}: another one leads")

    def _torn(
        self, producer: RecordProducer, opening: Opening | None, records: Sequence[StoredRecord]
    ) -> list[StoredRecord]:
        """Those of the records that a torn transaction has published; there hardly ever is one."""
        if opening is None:
            return []
        by_id = {record[0]: record for record in records}
        self._must_go_on(producer.abort())  # to read topics may take longer than a transaction may
        if producer.must_replace:
            # Another producer would fence whoever has deposed us since we looked: begin again with that look.
            raise KafkaUnavailable("the end of a transaction took too long")
        try:
            chunks = self._transactions.read_torn(
                opening, self._over, lambda ids: [by_id[number] for number in ids if number in by_id]
            )
            torn = [row for rows in chunks for row in rows]
        except ManifestNotRead as error:
            raise KafkaUnavailable(str(error)) from None
        self._must_go_on(producer.begin())
        return torn

    def _must_go_on(self, outcome: Outcome | None) -> None:
        if isinstance(outcome, Ended):
            raise KafkaUnavailable(outcome.reason)

    def _publish(
        self, producer: RecordProducer, missing: Sequence[StoredRecord], records: Sequence[StoredRecord]
    ) -> None:
        """Into the open transaction: the records, and a manifest of the whole shard."""
        self._must_go_on(self._send_opening(producer, records))
        failures: list[Failure] | None = [] if self._wants_reports else None
        sent = producer.send(missing, self._over, failures)
        if isinstance(sent, Ended):
            raise KafkaUnavailable(sent.reason)
        if sent is None:
            raise KafkaUnavailable("the producer's queue stayed full")
        if sent.refused:
            producer.abort()
            raise _refusal([sent.refused[0].record], sent.refused[0].error, self._transactions.kafka)
        self._reached("sent")
        outcome = self._commit(producer, records)
        self._must_go_on(outcome)
        if isinstance(outcome, Aborted):
            raise self._reason_of(outcome, missing, failures or [])

    def _send_opening(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Ended | None:
        transactions = self._transactions
        opening = Opening.of(transactions.outbox, self._server_id, records).encode()
        key = opening_key(transactions.transactional_id)
        return producer.send_manifest(transactions.tracking_topic, opening, transactions.tracking_partition, key=key)

    def _commit(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
        """Commit with a manifest, which is written once every record is in Kafka."""
        if not producer.all_arrive(self._transactions.timeout, self._over):
            return producer.abort(producer.failure)
        return self._send_manifest(producer, records) or producer.commit()

    def _reason_of(
        self, outcome: Aborted, missing: Sequence[StoredRecord], failures: Sequence[Failure]
    ) -> InvalidRecord | KafkaUnavailable:
        """A refusal is the end of it; an outage, or what nobody can tell, is tried again, with delivery reports.

        So is a batch that was too large, as long as smaller ones can be tried: the limit of its topic is not known.
        """
        errors = [failure.error for failure in failures] + ([outcome.error] if outcome.error is not None else [])
        if any(error.code() == KafkaError.MSG_SIZE_TOO_LARGE for error in errors):
            before = self._batches.limit
            self._batches.refused({record[1] for record in missing})
            if self._batches.limit != before:
                return KafkaUnavailable(f"a batch was too large for its topic, now {self._batches.limit} bytes at most")
        refused = [failure for failure in failures if failure.verdict in _REFUSALS]
        if refused:
            return _refusal([failure.record for failure in refused], refused[0].error, self._transactions.kafka)
        if outcome.error is None:
            return KafkaUnavailable("the transaction was aborted")
        if verdict_on(outcome.error) in _REFUSALS:
            return _refusal(missing, outcome.error, self._transactions.kafka)
        self._wants_reports = True
        return KafkaUnavailable(outcome.error.str())

    def _send_manifest(self, producer: RecordProducer, records: Sequence[StoredRecord]) -> Ended | None:
        transactions = self._transactions
        ids, create_times = [record[0] for record in records], [record[7] for record in records]
        manifest = Manifest(transactions.outbox, ids, create_times, self._server_id)
        return producer.send_manifest(transactions.tracking_topic, manifest.encode(), transactions.tracking_partition)


def _without(
    records: Sequence[StoredRecord], manifest: Manifest | None, torn: Sequence[StoredRecord]
) -> list[StoredRecord]:
    """The records that were not published."""
    published = {(row[0], row[7]) for row in torn}
    if manifest is not None:
        published.update(zip(manifest.ids, manifest.create_times, strict=True))
    return [record for record in records if (record[0], record[7]) not in published]


def _refusal(among: Sequence[StoredRecord], error: KafkaError, kafka: KafkaConfig) -> InvalidRecord | KafkaUnavailable:
    """What to raise for records of which at least one was refused."""
    if verdict_on(error) not in _REFUSALS:
        return KafkaUnavailable(error.str())
    first, last = among[0], among[-1]
    which = f"record {first[0]}" if len(among) == 1 else f"one of records {first[0]} to {last[0]}"
    topics = sorted({record[1] for record in among})
    where = f" for topic {topics[0]!r}" if len(topics) == 1 else ""
    return InvalidRecord(f"{which}{where}: {explained(error, kafka)}; {_ADVICE}")


_ADVICE = (
    "nothing of its batch's shard was published. Let an ordinary harvester run, which sets such a record's key aside, "
    "or mend the row"
)
