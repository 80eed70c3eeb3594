"""One transactional producer, from `init_transactions()` to the moment when it must be thrown away.

librdkafka reports three kinds of trouble inside a transaction, and each means something else for the harvester:

- the transaction must be aborted (`Aborted`): nothing of it will ever be seen, and the producer can go on;
- the producer is fenced or otherwise broken (`Ended`): somebody else has taken the transactional.id, or the
  coordinator gave the transaction up because it was open too long;
- a call timed out (`Ended` too): the commit may have happened or not. Only a new producer's `init_transactions()`
  settles it, so this one is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from outbox_core.harvest.lanes import lane_of
from outbox_core.harvest.publisher import Failure, message_headers, partition_of
from outbox_core.harvest.topics import RowTopics
from outbox_core.harvest.verdicts import Verdict, is_bystander, verdict_on
from outbox_core.kafka import KafkaError, KafkaException, Message, discard, make_producer
from outbox_core.ports import LaneKey, StoredRecord

_INIT_ATTEMPT_SECONDS = 2.0
_QUEUE_FULL_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Committed:
    """The transaction is in Kafka, whole."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The transaction is not in Kafka, and the producer can begin another.

    Attributes:
        error: what its first failed record, or else the transaction itself, failed of; None if it was our choice.
        record_at_fault: whether it may be about a record, or where that was to go, and not about the cluster.
    """

    error: KafkaError | None
    record_at_fault: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The producer is of no more use; what became of its transaction is settled by the next one.

    Attributes:
        reason: what happened, in words.
        cause: why the transaction had to be aborted, if it was that which broke the producer, or why the manifest was
            refused.
    """

    reason: str
    cause: KafkaError | None = None


Outcome = Committed | Aborted | Ended


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of records that were to be produced.

    Attributes:
        records: those that are in the transaction.
        refused: those that the client itself refused; what follows them in their keys is in neither list.
    """

    records: list[StoredRecord]
    refused: list[Failure]


class TransactionalProducer:
    """A Kafka producer with a fixed transactional.id. Used by one thread.

    Args:
        settings: librdkafka settings, `transactional.id` and `transaction.timeout.ms` among them.
        id_header: name of the header with the record's identity, '' for none.
        outbox_name: identity of the outbox, written before the record's id.
        timeout_seconds: how long a commit or an abort may take.
        topics: tells which topics rows may name.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        id_header: str,
        outbox_name: str,
        timeout_seconds: float,
        topics: RowTopics | None = None,
    ) -> None:
        # As a rule without delivery reports: they would cost more than all the rest, and the commit vouches for all.
        self._producer = make_producer(settings)
        self._transactional_id = str(settings["transactional.id"])
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self._timeout = timeout_seconds
        self._topics = topics or RowTopics()
        self._manifest_error: KafkaError | None = None
        self._has_failed = False

    def init(self, give_up: Callable[[], bool]) -> Ended | None:
        """Fence the last owner of the transactional.id and wait until its transaction is settled.

        Returns:
            None when that is done; `Ended` if it failed or was given up.
        """
        while not give_up():
            try:
                self._producer.init_transactions(_INIT_ATTEMPT_SECONDS)
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if not cause.retriable():
                    return Ended(cause.str())
            else:
                return None
        return Ended("init_transactions was given up")

    def discard(self) -> None:
        """Take back whatever is still queued, before the producer is thrown away (`outbox_core.kafka.discard`)."""
        discard(self._producer)

    def begin(self) -> Ended | None:
        """Open a transaction."""
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            return Ended(error.args[0].str())
        return None

    def send(
        self, records: Iterable[StoredRecord], give_up: Callable[[], bool], failures: list[Failure] | None = None
    ) -> Sent | Ended | None:
        """Produce records in their order.

        A record that the client refuses is not in the transaction, and neither is what follows it in its key.

        Args:
            records: by ascending id.
            give_up: asked while the queue is full.
            failures: where to note what delivery reports say; without it there are none.

        Returns:
            What was sent and what was refused, None if `give_up` said so, or `Ended` if the producer is broken.
        """
        sent = Sent([], [])
        stopped: set[LaneKey] = set()
        taken, produce = sent.records.append, self._produce
        for record in records:
            if stopped and lane_of(record) in stopped:
                continue
            try:
                if not produce(
                    record, give_up, {} if failures is None else {"on_delivery": partial(_note, failures, record)}
                ):
                    return None
                taken(record)
                continue
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if verdict_on(cause) is Verdict.BROKEN:
                    return Ended(cause.str())
                if cause.code() == KafkaError._STATE:  # noqa: SLF001  the transaction has failed already
                    return sent
            except (TypeError, ValueError, OverflowError) as error:  # a row that is no message, written by hand
                cause = KafkaError(KafkaError._INVALID_ARG, str(error))  # noqa: SLF001
            sent.refused.append(Failure(record, cause, alone=True))
            lane = lane_of(record)
            if lane is not None:
                stopped.add(lane)
        return sent

    def _produce(self, record: StoredRecord, give_up: Callable[[], bool], more: dict[str, Any]) -> bool:
        """Produce one record. False if `give_up` said so while the queue was full."""
        _, topic, key, value, _, _, partition = record[:7]
        headers = message_headers(record, self._id_header, self._id_prefix)
        if topic not in self._topics.known:
            self._topics.check(record)
        if not key or partition != -1:
            partition = partition_of(record)
        while True:
            try:
                self._producer.produce(topic, value, key, partition, headers=headers, **more)
            except BufferError:
                if give_up():
                    return False
                self._producer.poll(_QUEUE_FULL_POLL_SECONDS)  # raises if the producer has broken
            else:
                return True

    def send_manifest(self, topic: str, value: bytes, partition: int = 0) -> Ended | None:
        """Produce the manifest into the open transaction, on the partition that belongs to this transactional.id."""
        self._manifest_error = None
        try:
            while True:
                try:
                    key, note = self._transactional_id, self._note_manifest
                    self._producer.produce(topic, value, key, partition, on_delivery=note)
                except BufferError:
                    self._producer.poll(_QUEUE_FULL_POLL_SECONDS)
                else:
                    return None
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() == KafkaError._STATE:  # noqa: SLF001  the commit will tell
                return None
            return Ended(f"the manifest was refused: {cause.str()}", cause)

    def _note_manifest(self, error: KafkaError | None, _: Message) -> None:
        if error is not None and not is_bystander(error):
            self._manifest_error = error

    def all_arrive(self, timeout_seconds: float) -> bool:
        """Whether all that was produced is acknowledged within a time; for those who cannot wait for the commit."""
        with suppress(KafkaException):
            return not self._producer.flush(timeout_seconds)
        return False

    def commit(self) -> Outcome:
        """Commit the transaction, and abort it if it must be."""
        try:
            self._producer.commit_transaction(self._timeout)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if not cause.fatal() and (cause.txn_requires_abort() or cause.code() == KafkaError._INCONSISTENT):  # noqa: SLF001
                return self.abort(cause)
            return Ended(f"the commit's outcome is unknown: {cause.str()}")
        return Committed()

    def abort(self, cause: KafkaError | None = None) -> Aborted | Ended:
        """Abort the open transaction."""
        try:
            self._producer.abort_transaction(self._timeout)
            self._producer.poll(0)  # what is still to be reported
        except KafkaException as error:
            return Ended(error.args[0].str(), cause)
        if self._manifest_error is not None:
            refusal, self._manifest_error = self._manifest_error, None
            return Ended(f"the manifest was refused: {refusal.str()}", refusal)
        failed_before, self._has_failed = self._has_failed, False
        if cause is None:
            return Aborted(None, record_at_fault=False)
        if failed_before and cause.code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER:
            # The aftermath of the last transaction, which left a gap in its sequence numbers: no news.
            return Aborted(None, record_at_fault=False)
        self._has_failed = True
        return Aborted(cause, record_at_fault=_may_be_about_records(cause))


def _note(failures: list[Failure], record: StoredRecord, error: KafkaError | None, message: Message) -> None:
    if error is not None and not is_bystander(error):
        partition = message.partition()
        failures.append(Failure(record, error, partition=-1 if partition is None else partition))


def _may_be_about_records(error: KafkaError) -> bool:
    """A time-out may be that of one partition; `_INCONSISTENT` says that some deliveries failed, and not why."""
    about_messages = (KafkaError._MSG_TIMED_OUT, KafkaError._INCONSISTENT)  # noqa: SLF001
    return error.code() in about_messages or verdict_on(error) in (Verdict.RECORD, Verdict.FORBIDDEN, Verdict.AWAY)
