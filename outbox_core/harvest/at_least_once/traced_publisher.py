"""The publisher of a harvester whose process makes spans: it notes each record's way for its batch's `send` span."""

from __future__ import annotations

from typing import Any

from outbox_core.harvest.at_least_once.publisher import Publisher
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

    def send(self, record: StoredRecord, sent_at: float, *, alone: bool = False) -> bool:
        """Hand a record to the producer, and note it."""
        is_taken = super().send(record, sent_at, alone=alone)
        if is_taken:
            self._batches.handed_over(record, ("unbatched", record.id) if alone else sent_at)
            failure = self.failed[-1] if self.failed else None
            if failure is not None and failure.record is record:  # the client refused it at once
                self._batches.failed(record, failure.error.name())
        return is_taken

    def _report(self, record: StoredRecord, sent_at: float, error: KafkaError | None, message: Message | None) -> None:
        super()._report(record, sent_at, error, message)
        if error is None:
            self._batches.arrived(record)

    def _note_failure(self, failure: Failure) -> None:
        super()._note_failure(failure)
        self._batches.failed(failure.record, failure.error.name())

    def close(self) -> None:
        """Drop the producers; records under way have an unknown outcome."""
        super().close()
        self._batches.end("unknown")
