"""The Kafka producer of at-least-once delivery, and its delivery reports.

Reports arrive on the thread that calls `poll`, which is the thread that sends: this module shares no state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from outbox_core.errors import must
from outbox_core.kafka.clients import KafkaError, KafkaException, Message, Producer
from outbox_core.kafka.messages import Failure, message_headers, partition_of
from outbox_core.kafka.row_topics import RowTopics
from outbox_core.stores.interface import StoredRecord

_log = logging.getLogger(__name__)

_ANY_PARTITION: Final = -1
_SETTLE_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 10.0

ProducerLimits = Mapping[str, int]
"""Settings of librdkafka in which a producer differs for now from those it was configured with."""


def _partition(message: Message | None) -> int:
    found = message.partition() if message is not None else None
    return -1 if found is None else found


class Publisher:
    """The producers, the records in flight, and the results of delivery: `delivered`, `failed` and `send_times`.

    A record that may be to blame for the failure of its batch goes alone, through a second producer whose batches have
    one record each.
    """

    def __init__(
        self,
        make_producer: Callable[[ProducerLimits], Producer],
        make_unbatched_producer: Callable[[ProducerLimits], Producer] | None = None,
        *,
        id_header: str,
        outbox_name: str,
        topics: RowTopics | None = None,
    ) -> None:
        self._make_producer = make_producer
        self._make_unbatched_producer = make_unbatched_producer or make_producer
        self._limits: ProducerLimits = {}
        self._made_for: ProducerLimits = {}
        self._producer = make_producer({})
        self._unbatched_producer: Producer | None = None
        self._unbatched_in_flight = 0
        self._topics = topics or RowTopics()
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self._fatal = False
        self.in_flight = 0
        self.lingers = False
        self.delivered: list[StoredRecord] = []
        self.failed: list[Failure] = []
        self.send_times: list[float] = []  # of the delivered ones

    def send(self, record: StoredRecord, sent_at: float, *, alone: bool = False) -> bool:
        """Hand a record to the producer; return False if its queue is full: poll and try again.

        One that goes `alone` is in a batch of its own: if it fails, no other record is to blame.
        """
        _, topic, key, value, _, _, partition, _ = record
        producer, on_delivery = self._producer, partial(self._report, record, sent_at)
        if alone:
            producer, on_delivery = self._unbatched(), partial(self._report_alone, record, sent_at)
        try:
            headers = message_headers(record, self._id_header, self._id_prefix)
            if topic not in self._topics.known:
                self._topics.check(record)
            if not key or partition != _ANY_PARTITION:
                partition = partition_of(record)
            producer.produce(topic, value, key, partition, on_delivery=on_delivery, headers=headers)
        except BufferError:
            return False
        except KafkaException as error:
            self._note_failure(Failure(record, error.args[0], alone=True))
            return True
        except (TypeError, ValueError, OverflowError) as error:  # a row that is no message, written by hand
            cause = KafkaError(KafkaError._INVALID_ARG, str(error))  # noqa: SLF001
            self._note_failure(Failure(record, cause, alone=True))
            return True
        self.in_flight += 1
        self._unbatched_in_flight += alone
        self.lingers = True
        return True

    def _unbatched(self) -> Producer:
        if self._unbatched_producer is None:
            self._unbatched_producer = self._make_unbatched_producer(self._made_for)
        return self._unbatched_producer

    def _report(self, record: StoredRecord, sent_at: float, error: KafkaError | None, message: Message | None) -> None:
        self.in_flight -= 1
        if error is None:
            self.delivered.append(record)
            self.send_times.append(sent_at)
        else:
            self._note_failure(Failure(record, error, alone=False, partition=_partition(message)))

    def _report_alone(
        self, record: StoredRecord, sent_at: float, error: KafkaError | None, message: Message | None
    ) -> None:
        self._unbatched_in_flight -= 1
        if error is None:
            self._report(record, sent_at, None, message)
        else:
            self.in_flight -= 1
            self._note_failure(Failure(record, error, alone=True, partition=_partition(message)))

    def _note_failure(self, failure: Failure) -> None:
        error = failure.error
        self._fatal = self._fatal or error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001  its public name
        self.failed.append(failure)

    def poll(self, timeout_seconds: float) -> None:
        """Serve delivery reports; wait up to the timeout for the first."""
        self._serve(self._producer.poll, self._serve_unbatched(timeout_seconds))

    def push(self, timeout_seconds: float) -> None:
        """Send records that linger in the producer's queue; serve reports until all are delivered, or the timeout."""
        self.lingers = False
        self._serve(self._producer.flush, self._serve_unbatched(timeout_seconds))

    def _serve_unbatched(self, timeout_seconds: float) -> float:
        if self._unbatched_producer is None:
            return timeout_seconds
        nothing_else = 0 < self._unbatched_in_flight == self.in_flight
        self._serve(self._unbatched_producer.poll, timeout_seconds if nothing_else else 0.0)
        return 0.0 if nothing_else else timeout_seconds

    def cancel_all(self) -> None:
        """Cancel the records in flight, and wait for their reports."""
        end = time.monotonic() + _SETTLE_SECONDS
        while self.in_flight and time.monotonic() < end:
            self.cancel()
            self.poll(_SETTLE_POLL_SECONDS)

    def _serve(self, call: Callable[[float], int], timeout_seconds: float) -> None:
        try:
            call(timeout_seconds)
        except KafkaException as error:
            # A fatal error is raised here, once; the reports of what it cost follow at the next call.
            if not error.args[0].fatal():
                raise
            self._fatal = True
            _log.warning("the producer has failed for good and is replaced: %s", error.args[0].str())

    @property
    def is_broken(self) -> bool:
        """True after a fatal error: see `renew_if_broken`."""
        return self._fatal

    def take_delivered(self) -> list[StoredRecord]:
        """Return the records delivered since the last call."""
        self._check_counts()
        delivered, self.delivered = self.delivered, []
        return delivered

    def take_failed(self) -> list[Failure]:
        """Return the records that failed since the last call."""
        self._check_counts()
        failed, self.failed = self.failed, []
        return failed

    def _check_counts(self) -> None:
        alone, total = self._unbatched_in_flight, self.in_flight
        must(0 <= alone <= total, "each record must be reported once; %d of %d in flight are alone", alone, total)

    def take_send_times(self) -> list[float]:
        """Return the send times of the records delivered since the last call."""
        send_times, self.send_times = self.send_times, []
        return send_times

    def close(self) -> None:
        """Drop the producers, with their threads and connections."""
        self._unbatched_producer = None
        del self._producer

    def cancel(self) -> None:
        """Fail all unacknowledged records, on the wire or not: the client would send them again by itself."""
        for producer in (self._producer, self._unbatched_producer):
            if producer is not None:
                producer.purge(in_queue=True, in_flight=True, blocking=False)

    def limit(self, limits: ProducerLimits) -> None:
        """Set the limits of producers. Takes effect with `renew`."""
        self._limits = limits

    @property
    def is_outdated(self) -> bool:
        """True if the producer has other limits than it should: stop sending, and `renew` it."""
        return self._limits != self._made_for

    def renew_if_broken(self) -> None:
        """Make a new producer after a fatal error, with no record in flight: the old one accepts no record."""
        if self._fatal:
            self._fatal = False
            self.renew()

    def renew(self) -> None:
        """Make a new producer. Only with no record in flight."""
        must(not self.in_flight, "a producer must not be replaced with records in flight; %d are", self.in_flight)
        self._made_for = self._limits
        self._unbatched_producer = None  # made again when it is needed
        self._producer = self._make_producer(self._made_for)
