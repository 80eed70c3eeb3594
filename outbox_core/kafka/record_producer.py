"""Outbox records through a transactional producer: in their order, each with the header that tells repeats apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from outbox_core.kafka.clients import KafkaError, KafkaException, Message
from outbox_core.kafka.errors import ErrorKind, is_collateral, kind_of
from outbox_core.kafka.messages import Failure, message_headers, partition_of
from outbox_core.kafka.row_topics import NamedPartitions, RowTopics
from outbox_core.kafka.transactions import Ended, GiveUp, TransactionalProducer
from outbox_core.stores.interface import LaneKey, StoredRecord, lane_of

_NOW = 0  # the timestamp of a message that has none yet


@dataclass(frozen=True, slots=True)
class Sent:
    """Records handed to the producer, without later ones of a refused record's key."""

    records: list[StoredRecord]
    refused: list[Failure]  # by the client itself


class Reports:
    """Delivery reports of the records of one transaction; collateral failures are left out."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.arrived: list[StoredRecord] = []
        self.reached: set[tuple[str, int | None]] = set()  # the partitions of those


class RecordProducer(TransactionalProducer):
    """A transactional producer of outbox records. Used by one thread."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        id_header: str,
        outbox_name: str,
        timeout_seconds: float,
        topics: RowTopics | None = None,
    ) -> None:
        super().__init__(settings, timeout_seconds=timeout_seconds)
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self._topics = topics or RowTopics()
        self.sent: list[StoredRecord] = []  # by the last `send`
        self._partitions = NamedPartitions()  # of the present one

    def send(
        self, records: Iterable[StoredRecord], give_up: GiveUp, reports: Reports | None = None
    ) -> Sent | Ended | None:
        """Produce records in their order, without those that the client refuses and later ones of their keys.

        `reports` takes the delivery reports, which cost more than all the rest. None if `give_up`, asked while the
        queue is full, said so; `Ended` if the producer is broken.
        """
        self._partitions = NamedPartitions(self._producer)
        if reports is not None:
            records = list(records)
            # A new client knows no partitions, takes all, and fails those that do not exist with their transaction.
            self._partitions.learn_named(records)
        sent = Sent([], [])
        self.sent = sent.records
        stopped: set[LaneKey] = set()
        taken, produce, alone = sent.records.append, self._produce, self.is_unbatched
        for record in records:
            if stopped and lane_of(record) in stopped:
                continue
            on_delivery = None if reports is None else partial(_note, reports, record, alone)
            try:
                if not produce(record, give_up, on_delivery):
                    return None
                taken(record)
                continue
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if kind_of(cause) is ErrorKind.FATAL:
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

    def _produce(self, record: StoredRecord, give_up: GiveUp, on_delivery: Callable[..., None] | None) -> bool:
        """Produce one record. False if `give_up` said so while the queue was full."""
        identity, topic, key, value, names, values, partition, _ = record
        if names or values or not self._id_header:
            headers = message_headers(record, self._id_header, self._id_prefix)
        else:  # the same, quicker: this runs for every record
            headers = [(self._id_header, b"%b%d" % (self._id_prefix, identity))]
        if topic not in self._topics.known:
            self._topics.check(record)
        if not key or partition != -1:
            partition = partition_of(record)
        try:
            # By position, in the order of confluent's signature: names would cost a third of the whole call.
            self._producer.produce(topic, value, key, partition, on_delivery, None, _NOW, headers)
        except (BufferError, KafkaException) as error:
            if isinstance(error, KafkaException):
                refusal = self._partitions.refusal(record, error.args[0])
                if refusal is not None:
                    raise KafkaException(refusal) from None
            return self.produce(topic, value, key, partition, headers, give_up=give_up, on_delivery=on_delivery)
        return True


def _note(reports: Reports, record: StoredRecord, alone: bool, error: KafkaError | None, message: Message) -> None:
    if error is None:
        reports.arrived.append(record)
        reports.reached.add((record.topic, message.partition()))
    elif not is_collateral(error):
        partition = message.partition()
        reports.failures.append(Failure(record, error, alone, -1 if partition is None else partition))
