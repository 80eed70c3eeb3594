"""The transactional producer of a process that makes spans: one `send` span for the records of a transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.record_producer import RecordProducer, Reports, Sent
from outbox_core.kafka.transactions import Aborted, Committed, Ended, GiveUp, Outcome, never
from outbox_core.stores.interface import StoredRecord
from outbox_core.tracing.batches import SendBatches
from outbox_core.tracing.spans import Spans, now_ns


class TracedRecordProducer(RecordProducer):
    """A producer of outbox records whose `send` spans end with their transaction."""

    def __init__(self, *settings: Any, spans: Spans, outbox_name: str, **options: Any) -> None:
        super().__init__(*settings, outbox_name=outbox_name, **options)
        self._batches = SendBatches(spans, outbox_name)
        self._transaction = 0

    def send(
        self, records: Iterable[StoredRecord], give_up: GiveUp, reports: Reports | None = None
    ) -> Sent | Ended | None:
        """Produce records as `RecordProducer.send` does, and note them."""
        given, began_ns = list(records), now_ns()
        sent = super().send(given, give_up, reports)
        refused = sent.refused if isinstance(sent, Sent) else []
        tried = [*sent.records, *(failure.record for failure in refused)] if isinstance(sent, Sent) else given
        for record in tried:
            self._batches.handed_over(record, self._transaction, began_ns)
        for failure in refused:
            self._batches.failed(failure.record, failure.error.name())
        return sent

    def commit(self, give_up: GiveUp = never) -> Outcome:
        """Commit, and end the span."""
        outcome = super().commit(give_up)
        self._ended(outcome)
        return outcome

    def abort(self, cause: KafkaError | None = None, give_up: GiveUp = never) -> Aborted | Ended:
        """Abort, and end the span with the error."""
        outcome = super().abort(cause, give_up)
        self._ended(outcome)
        return outcome

    def discard(self) -> None:
        """Throw the producer away; what is under way has an unknown outcome."""
        super().discard()
        self._batches.end("unknown")

    def _ended(self, outcome: Outcome) -> None:
        self._transaction += 1
        if isinstance(outcome, Committed):
            self._batches.end()
        elif outcome.error is not None:
            self._batches.end(outcome.error.name())
        else:
            self._batches.end("aborted" if isinstance(outcome, Aborted) else "unknown")
