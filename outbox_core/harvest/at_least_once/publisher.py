"""The Kafka producer of at-least-once delivery, and its delivery reports.

Reports arrive on the thread that calls `poll`, which is the thread that sends: this module shares no state.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from outbox_core.errors import InvariantBroken, must
from outbox_core.harvest.at_least_once.flight_limit import FlightLimit
from outbox_core.kafka.clients import KafkaError, KafkaException, Message, Producer
from outbox_core.kafka.messages import Failure, message_headers, partition_of
from outbox_core.kafka.row_topics import NamedPartitions, RowTopics
from outbox_core.stores.interface import StoredRecord

_log = logging.getLogger(__name__)

_ANY_PARTITION: Final = -1
_SETTLE_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 10.0
_MAKE_AGAIN_SECONDS = 1.0

_ALONE: Final = -1
Sent = tuple[float, int]  # when, and the number of records sent before, or _ALONE

ProducerLimits = Mapping[str, int]
"""Settings of librdkafka in which a producer differs for now from those it was configured with."""


def _cause(error: Exception) -> KafkaError:
    """Return the client's refusal of a record, or that its row is no message: somebody wrote it by hand."""
    invalid = KafkaError._INVALID_ARG  # noqa: SLF001  its public name
    cause: KafkaError = error.args[0] if isinstance(error, KafkaException) else KafkaError(invalid, str(error))
    return cause


def _judged(failure: Failure, partitions: NamedPartitions) -> Failure:
    """Return a failure, not of the record alone if only the client did not know its partition."""
    refusal = partitions.refusal(failure.record, failure.error)
    return failure._replace(alone=False) if refusal is None else failure._replace(error=refusal)


class Publisher:
    """The producers, the records in flight, and the results of delivery: `delivered` and `failed`.

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
        self._producer = make_producer({})
        self._unbatched_producer: Producer | None = None
        self._unbatched_in_flight = 0
        self._topics = topics or RowTopics()
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self.is_broken = False  # after a fatal error: see `renew_if_broken`
        self.unmade = ""  # the reason why no producer can be made, '' if the last one was
        self._make_again_at = 0.0
        self.lingers = False
        self.delivered: list[StoredRecord] = []
        self.failed: list[Failure] = []
        self.flight_limit = FlightLimit()
        self._sent = 0  # since it was made
        self._taken = 0  # of these, by `take_delivered` and `take_failed`
        self._arrivals: list[Sent] = []  # since `take_send_times`
        self._overtaken = 0  # records sent before the newest that has arrived

    @property
    def in_flight(self) -> int:
        """Number of records sent and neither delivered nor failed."""
        return self._sent - self._taken - len(self.delivered) - len(self.failed)

    @property
    def queued(self) -> int:
        """Number of records in flight, without those that later ones overtook: they wait for their own partition."""
        return min(self.in_flight, self._sent - self._overtaken)

    def send(self, records: Sequence[StoredRecord], sent_at: float, *, alone: bool = False) -> int:
        """Hand records to the producer; return how many it took: if its queue is full, poll and try the others again.

        So it is with no producer for records that go alone, with the reason in `unmade`.

        Records that go `alone` are in batches of their own: if one fails, no other record is to blame.
        """
        producer, at = (self._unbatched(), (sent_at, _ALONE)) if alone else (self._producer, (sent_at, self._sent))
        report: Callable[..., None] = self._report_alone if alone else self._report
        if producer is None:
            return 0
        produce, known, id_header, id_prefix = producer.produce, self._topics.known, self._id_header, self._id_prefix
        sent = 0
        for record in records:
            identity, topic, key, value, names, values, partition, _ = record
            try:
                if names or values or not id_header:
                    headers = message_headers(record, id_header, id_prefix)
                else:  # the same, quicker: this runs for every record
                    headers = [(id_header, b"%b%d" % (id_prefix, identity))]
                if topic not in known:
                    self._topics.check(record)
                if not key or partition != _ANY_PARTITION:
                    partition = partition_of(record)
                produce(topic, value, key, partition, on_delivery=partial(report, record, at), headers=headers)
            except BufferError:
                break
            except (KafkaException, TypeError, ValueError, OverflowError) as error:
                self._note_failure(Failure(record, _cause(error), alone=True))
            else:
                self._unbatched_in_flight += alone
            sent += 1
        self._sent += sent
        self.lingers = self.lingers or sent > 0
        return sent

    def _unbatched(self) -> Producer | None:
        if self._unbatched_producer is None:
            self._unbatched_producer = self._made(self._make_unbatched_producer, self._limits)
        return self._unbatched_producer

    def _report(self, record: StoredRecord, at: Sent, error: KafkaError | None, message: Message | None) -> None:
        if error is None:
            self.delivered.append(record)
            self._arrivals.append(at)
        else:
            partition = None if message is None else message.partition()
            self._note_failure(Failure(record, error, at[1] == _ALONE, -1 if partition is None else partition))

    def _report_alone(self, *report: Any) -> None:
        self._unbatched_in_flight -= 1
        self._report(*report)

    def _note_failure(self, failure: Failure) -> None:
        error = failure.error
        self.is_broken = self.is_broken or error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001  its public name
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
            self.is_broken = True
            _log.warning("the producer has failed for good and is replaced: %s", error.args[0].str())

    def take_delivered(self) -> list[StoredRecord]:
        """Return the records delivered since the last call."""
        self._check_counts()
        delivered, self.delivered = self.delivered, []
        self._taken += len(delivered)
        return delivered

    def take_failed(self) -> list[Failure]:
        """Return the records that failed since the last call; waits for Kafka if one names an unknown partition."""
        self._check_counts()
        failed, self.failed = self.failed, []
        self._taken += len(failed)
        partitions = NamedPartitions(*self._producers())
        return [_judged(failure, partitions) for failure in failed]

    def _check_counts(self) -> None:
        alone, total = self._unbatched_in_flight, self.in_flight
        must(0 <= alone <= total, "each record must be reported once; %d of %d in flight are alone", alone, total)

    def take_send_times(self) -> list[tuple[float, int]]:
        """Return when records were sent that have been delivered since the last call, and how many each time."""
        arrivals, self._arrivals = Counter(self._arrivals), []
        self._overtaken = max([self._overtaken, *(before for _, before in arrivals)])
        return [(sent_at, number) for (sent_at, _), number in arrivals.items()]

    def close(self) -> None:
        """Drop the producers, with their threads and connections."""
        self._unbatched_producer = None
        del self._producer

    def cancel(self) -> None:
        """Fail all unacknowledged records, on the wire or not: the client would send them again by itself."""
        for producer in self._producers():
            producer.purge(in_queue=True, in_flight=True, blocking=False)

    def _producers(self) -> list[Producer]:
        return [producer for producer in (self._producer, self._unbatched_producer) if producer is not None]

    def fit(self, limits: ProducerLimits) -> bool:
        """Return True if the producer has these limits; make one that has them once no record is in flight."""
        return limits == self._limits or (not self.in_flight and self.renew(limits))

    def renew_if_broken(self) -> bool:
        """Make a new producer after a fatal error, with no record in flight; return True if there is a sound one."""
        return not self.is_broken or self.renew(self._limits)

    def renew(self, limits: ProducerLimits) -> bool:
        """Make a new producer, only with no record in flight; return False, with `unmade`, if that is not possible now.

        The old one stays then.
        """
        must(not self.in_flight, "a producer must not be replaced with records in flight; %d are", self.in_flight)
        producer = self._made(self._make_producer, limits)
        if producer is None:
            return False
        self._unbatched_producer = None  # made again when it is needed
        self._producer, self._limits, self.is_broken = producer, limits, False
        return True

    def _made(self, make: Callable[[ProducerLimits], Producer], limits: ProducerLimits) -> Producer | None:
        """Make a producer, not too soon after a failure; None if there is none, for a reason that may pass."""
        if self.unmade and time.monotonic() < self._make_again_at:
            return None
        try:
            producer = make(limits)
        except InvariantBroken:
            raise
        except Exception as error:  # of a user's own `producer_factory`, too
            self.unmade = " ".join(str(error).split()) or type(error).__name__
            self._make_again_at = time.monotonic() + _MAKE_AGAIN_SECONDS
            return None
        self.unmade = ""
        return producer
