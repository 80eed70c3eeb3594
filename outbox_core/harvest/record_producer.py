"""Outbox records through a transactional producer: in their order, each with the header that tells repeats apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from outbox_core.harvest.lanes import lane_of
from outbox_core.harvest.publisher import Failure, message_headers, partition_of
from outbox_core.harvest.topics import RowTopics
from outbox_core.harvest.transaction import Ended, GiveUp, TransactionalProducer
from outbox_core.harvest.verdicts import Verdict, is_bystander, verdict_on
from outbox_core.kafka import KafkaError, KafkaException, Message
from outbox_core.ports import LaneKey, StoredRecord


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of records that were to be produced.

    Attributes:
        records: those that are in the transaction.
        refused: those that the client itself refused; what follows them in their keys is in neither list.
    """

    records: list[StoredRecord]
    refused: list[Failure]


class RecordProducer(TransactionalProducer):
    """A transactional producer of outbox records. Used by one thread.

    Args:
        settings: librdkafka settings, `transactional.id` and `transaction.timeout.ms` among them.
        id_header: name of the header with the record's identity, '' for none.
        outbox_name: identity of the outbox, written before the record's id.
        timeout_seconds: how long a commit or an abort may take.
        topics: tells which topics rows may name; by default those that no outbox may have rows for are refused.
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
        super().__init__(settings, timeout_seconds=timeout_seconds)
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self._topics = topics or RowTopics()

    def send(
        self, records: Iterable[StoredRecord], give_up: GiveUp, failures: list[Failure] | None = None
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

    def _produce(self, record: StoredRecord, give_up: GiveUp, more: dict[str, Any]) -> bool:
        """Produce one record. False if `give_up` said so while the queue was full."""
        identity, topic, key, value, names, values, partition = record[:7]
        if names or values or not self._id_header:
            headers = message_headers(record, self._id_header, self._id_prefix)
        else:  # the same, quicker: this runs for every record
            headers = [(self._id_header, b"%b%d" % (self._id_prefix, identity))]
        if topic not in self._topics.known:
            self._topics.check(record)
        if not key or partition != -1:
            partition = partition_of(record)
        try:
            self._producer.produce(topic, value, key, partition, headers=headers, **more)
        except BufferError:
            return self.produce(topic, value, key, partition, headers, give_up=give_up, **more)
        return True


def _note(failures: list[Failure], record: StoredRecord, error: KafkaError | None, message: Message) -> None:
    if error is not None and not is_bystander(error):
        partition = message.partition()
        failures.append(Failure(record, error, partition=-1 if partition is None else partition))
