"""The publisher of a harvester whose process makes spans: it notes each record's way for its batch's `send` span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox_core.harvest.at_least_once.publisher import Publisher, Sent
from outbox_core.kafka.clients import KafkaError, Message
from outbox_core.kafka.messages import Failure
from outbox_core.stores.interface import StoredRecord
from outbox_core.tracing.batches import SendBatches
from outbox_core.tracing.spans import Spans


class TracedPublisher(Publisher):
    """A publisher with `send` spans: one for the records that are sent at one time, one for each unbatched record."""

    def __init__(self, *makers: Any, spans: Spans, outbox_name: str, **options: Any) -> None:
        super().__init__(*makers, outbox_name=outbox_name, **options)
        self._batches = SendBatches(spans, outbox_name)

    def send(self, records: Sequence[StoredRecord], sent_at: float, *, alone: bool = False) -> int:
        """Hand records to the producer, and note those that it took."""
        first = len(self.failed)
        sent = super().send(records, sent_at, alone=alone)
        for record in records[:sent]:
            self._batches.handed_over(record, ("unbatched", record.id) if alone else sent_at)
        for failure in self.failed[first:]:  # the client refused them at once
            self._batches.failed(failure.record, failure.error.name())
        return sent

    def _report(self, record: StoredRecord, at: Sent, error: KafkaError | None, message: Message | None) -> None:
        super()._report(record, at, error, message)
        if error is None:
            self._batches.arrived(record)

    def _note_failure(self, failure: Failure) -> None:
        super()._note_failure(failure)
        self._batches.failed(failure.record, failure.error.name())

    def close(self) -> None:
        """Drop the producers; records under way have an unknown outcome."""
        super().close()
        self._batches.end("unknown")
