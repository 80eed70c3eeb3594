"""The transaction handling of commit 592f1f3, before R4, R13 and R14 of docs/explanation-exactly-once.md.

It lost records: librdkafka repeats an EndTxn whose connection broke, in the same epoch, and the first copy may end a
later transaction. The producer went on after any commit or abort that succeeded, the manifest followed the records
without waiting for them, and recovery asked for the end of the tracking topic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outbox_core.election.lease import now
from outbox_core.harvest.exactly_once.term import Term
from outbox_core.kafka import identity
from outbox_core.kafka.clients import KafkaError, KafkaException, TopicPartition, make_consumer, make_producer
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.reader import reader_settings
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.tracking import Ledger, ManifestNotRead
from outbox_core.kafka.transactions import (
    Aborted,
    Committed,
    Ended,
    Outcome,
    TransactionalProducer,
    _may_be_about_records,
    never,
)
from outbox_core.stores.interface import StoredRecord

_END_SECONDS = 15.0  # transaction.timeout.ms and five seconds
_ANSWER_SECONDS = 10.0


def _make(self: TransactionalProducer) -> object:
    return make_producer({name: value for name, value in self._settings.items() if name != "retry.backoff.ms"})


def _begin(self: TransactionalProducer) -> Ended | None:
    try:
        self._producer.begin_transaction()
    except KafkaException as error:
        return Ended(error.args[0].str())
    self._reports.clear()
    return None


def _limit_nothing(self: TransactionalProducer, max_bytes: int | None, *, unbatched: bool = False) -> None:
    """Keep the producer and its batches: `begin` does not replace it."""


def _commit(self: TransactionalProducer, give_up: Callable[[], bool] = never) -> Outcome:
    del give_up
    try:
        self._producer.commit_transaction(_END_SECONDS)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if not cause.fatal() and (cause.txn_requires_abort() or cause.code() == KafkaError._INCONSISTENT):
            return self.abort(cause)
        return Ended(f"the commit's outcome is unknown: {cause.str()}")
    return Committed()


def _abort(
    self: TransactionalProducer, cause: KafkaError | None = None, give_up: Callable[[], bool] = never
) -> Aborted | Ended:
    del give_up
    try:
        self._producer.abort_transaction(_END_SECONDS)
        self._producer.poll(0)
    except KafkaException as error:
        return Ended(error.args[0].str(), cause)
    refusal = self._reports.refusal
    if refusal is not None:
        return Ended(f"the manifest was refused: {refusal.str()}", refusal)
    return Aborted(cause, record_at_fault=cause is not None and _may_be_about_records(cause))


def _begin_batch(
    self: TransactionalIdentity, producer: RecordProducer, known: Ledger, give_up: Callable[[], bool]
) -> Ended | None:
    del self, known, give_up
    return producer.begin()


def _send_nothing(self: Term, producer: RecordProducer, records: Sequence[StoredRecord]) -> None:
    """Begin with the first record."""


def _commit_batch(self: Term, producer: RecordProducer, records: Sequence[StoredRecord]) -> Outcome:
    refused = self._send_manifest(producer, records)
    if refused is not None:
        return refused
    if not self._purge_is_committed(now() + self._transactions.timeout / 2) or not self._leadership.leads():
        return producer.abort()
    return producer.commit()


def _last_manifest(
    self: TransactionalIdentity, producer: RecordProducer, give_up: Callable[[], bool]
) -> Ledger | Ended:
    del producer
    settings: dict[str, Any] = {**reader_settings(self.kafka, self.group), "isolation.level": "read_uncommitted"}
    place = self.tracking_topic, self.tracking_partition
    consumer = make_consumer(settings)
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(*place), timeout=_ANSWER_SECONDS, cached=False)
        return identity.read_ledger(self.kafka, self.group, *place, self.transactional_id, end=end, give_up=give_up)
    except (KafkaException, ManifestNotRead) as error:
        return Ended(str(error))
    finally:
        consumer.close()


DOUBLES = (
    (TransactionalProducer, "_make", _make),
    (TransactionalProducer, "limit_batches", _limit_nothing),
    (TransactionalProducer, "begin", _begin),
    (TransactionalProducer, "commit", _commit),
    (TransactionalProducer, "abort", _abort),
    (TransactionalIdentity, "begin", _begin_batch),
    (TransactionalIdentity, "ledger", _last_manifest),
    (Term, "_send_opening", _send_nothing),
    (Term, "_commit", _commit_batch),
)
