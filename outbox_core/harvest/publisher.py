"""Sends records through a Kafka producer and collects what became of them.

Delivery reports arrive on the thread that calls `poll`, which is the thread that sends: nothing here is shared.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from outbox_core.harvest.topics import DeadLetter, RowTopics
from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.kafka import KafkaError, KafkaException, Message, Producer
from outbox_core.ports import StoredRecord

_log = logging.getLogger(__name__)

_PARTITION: Final = 6
_ANY_PARTITION: Final = -1
_PARTITION_OF_EMPTY_KEY: Final = 0
_SETTLE_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 10.0

ProducerLimits = Mapping[str, int]
"""Settings of librdkafka in which a producer differs for now from those it was configured with."""

ID_HEADER = "outbox-id"
ORIGIN_HEADER = "outbox-original-topic"
ORIGIN_PARTITION_HEADER = "outbox-original-partition"
ERROR_HEADER = "outbox-error"
"""Headers of a dead letter: where it was to go, and why it did not arrive there."""
_LETTER_HEADERS = frozenset({ORIGIN_HEADER, ORIGIN_PARTITION_HEADER, ERROR_HEADER})


class Failure(NamedTuple):
    """A record that was not delivered, as far as the producer knows.

    Attributes:
        record: the record.
        error: what it failed of.
        alone: whether it was judged by itself; else it shares the fate of its batch.
        partition: where it was to go; -1 if that was not known yet, None if it was never on its way.
    """

    record: StoredRecord
    error: KafkaError
    alone: bool = False
    partition: int | None = None

    @property
    def verdict(self) -> Verdict:
        """What the error says about the record.

        A partition that the topic does not have is the fault of a record that names it; else the topic has just been
        deleted, or made anew with fewer.
        """
        names_none = self.record[_PARTITION] == _ANY_PARTITION and self.error.code() == KafkaError._UNKNOWN_PARTITION  # noqa: SLF001
        return Verdict.AWAY if names_none else verdict_on(self.error)


def message_headers(record: StoredRecord, id_header: str, id_prefix: bytes) -> list[tuple[str, Any]]:
    """The record's own headers, and the one that tells repeats apart: `<outbox name>:<id>`.

    Of its own, one that is named like that is left out: an inbox would take another record's id from it. That happens
    to honest records too, when a consumer hands on the headers of what it read; so they are not held for it.

    Raises:
        ValueError: naming the column, if names and values are no headers.
    """
    keys, values = record[4], record[5]
    headers: list[tuple[str, Any]] = []
    if keys or values:
        headers = _own_headers(keys or (), values or ())
        forged = {ID_HEADER, id_header or ID_HEADER}  # an empty name is one that a row may have
        if not forged.isdisjoint(keys or ()):
            headers = [header for header in headers if header[0] not in forged]
    if id_header:
        headers.append((id_header, b"%b%d" % (id_prefix, record[0])))
    return headers


def _own_headers(keys: Sequence[str], values: Sequence[bytes | str | None]) -> list[tuple[str, Any]]:
    try:
        "".join(keys)  # a name that is NULL, or an array, would be sent as Python writes it
        return list(zip(keys, values, strict=True))
    except TypeError:
        raise ValueError("kafka_header_keys: not every name is a text") from None
    except ValueError:
        counts = f"{len(keys)} names and {len(values)} values"
        raise ValueError(f"kafka_header_keys, kafka_header_values: {counts}") from None


def partition_of(record: StoredRecord) -> int:
    """The partition to send a record to, -1 if its key decides.

    librdkafka spreads records with an empty key over all partitions, as if they had none, and a key's order is worth
    nothing then. They go to partition 0, which is what `consistent` makes of an empty key.

    Raises:
        ValueError: if the row names a partition that cannot be.
    """
    partition = record[_PARTITION]
    if partition >= 0:
        return partition
    if partition != _ANY_PARTITION:
        raise ValueError(f"kafka_partition: there is no partition {partition}; NULL lets the key decide")
    return _PARTITION_OF_EMPTY_KEY if record[2] == "" else _ANY_PARTITION


def _partition(message: Message | None) -> int:
    found = message.partition() if message is not None else None
    return -1 if found is None else found


def dead_letter(record: StoredRecord, topic: str, error: str) -> DeadLetter:
    """The record as it goes to the dead-letter topic: the same, with where it was to go and why it did not.

    Of its own headers, those that are named like that are left out: it cannot say that it came from elsewhere.
    """
    _, origin, _, _, keys, values, partition = record[:7]
    # Not strict: that there are not as many values as names may be what is wrong with it.
    own = zip(keys or (), values or (), strict=False)
    headers: list[tuple[str, Any]] = [header for header in own if header[0] not in _LETTER_HEADERS]
    headers.append((ORIGIN_HEADER, origin))
    if partition >= 0:
        headers.append((ORIGIN_PARTITION_HEADER, str(partition)))
    headers.append((ERROR_HEADER, error))
    names, texts = [name for name, _ in headers], [value for _, value in headers]
    return DeadLetter(record[0], topic, record[2], record[3], names, texts, _ANY_PARTITION, record[7])


class Publisher:
    """Its producers and the records in flight through them.

    Most records go through one producer. One that may be to blame for the failure of its batch goes alone: through a
    second producer, made when it is first needed, whose batches have one record each.

    Args:
        make_producer: makes a producer within limits, which are settings of librdkafka; called at once, and again after
            a fatal error or for other limits.
        make_lone_producer: makes a producer whose batches have one record; by default the same as the other.
        id_header: name of the header that carries the record's identity; '' for none.
        outbox_name: identity of the outbox, written before the record's id.
        topics: tells which topics rows may name; by default those that no outbox may have rows for are refused.

    Attributes:
        in_flight: records sent whose delivery report has not arrived.
        lingers: whether anything was sent since the last `push`.
        delivered: records acknowledged since it was last emptied by `take_delivered`.
        failed: records that failed since the list was last emptied by `take_failed`.
        send_times: when the records delivered since the last `take_send_times` were sent, with how many of each.
    """

    def __init__(
        self,
        make_producer: Callable[[ProducerLimits], Producer],
        make_lone_producer: Callable[[ProducerLimits], Producer] | None = None,
        *,
        id_header: str,
        outbox_name: str,
        topics: RowTopics | None = None,
    ) -> None:
        self._make_producer = make_producer
        self._make_lone_producer = make_lone_producer or make_producer
        self._limits: ProducerLimits = {}
        self._made_for: ProducerLimits = {}
        self._producer = make_producer({})
        self._lone_producer: Producer | None = None
        self._alone_in_flight = 0
        self._topics = topics or RowTopics()
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self._fatal = False
        self.in_flight = 0
        self.lingers = False
        self.delivered: list[StoredRecord] = []
        self.failed: list[Failure] = []
        self.send_times: Counter[float] = Counter()

    def send(self, record: StoredRecord, sent_at: float) -> bool:
        """Hand a record to the producer. False if its queue is full: poll and try again.

        A record that the producer refuses is a failed one, like one that the broker refuses.
        """
        return self._hand_over(self._producer, record, partial(self._report, record, sent_at))

    def send_alone(self, record: StoredRecord, sent_at: float) -> bool:
        """The same, in a batch of its own: if it fails, no other record is to blame."""
        if self._lone_producer is None:
            self._lone_producer = self._make_lone_producer(self._made_for)
        before = self.in_flight
        taken = self._hand_over(self._lone_producer, record, partial(self._report_alone, record, sent_at))
        self._alone_in_flight += self.in_flight - before
        return taken

    def _hand_over(self, producer: Producer, record: StoredRecord, on_delivery: Callable[..., None]) -> bool:
        _, topic, key, value, _, _, partition = record[:7]
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
        self.lingers = True
        return True

    def _report(self, record: StoredRecord, sent_at: float, error: KafkaError | None, message: Message | None) -> None:
        self.in_flight -= 1
        if error is None:
            self.delivered.append(record)
            self.send_times[sent_at] += 1
        else:
            self._note_failure(Failure(record, error, alone=False, partition=_partition(message)))

    def _report_alone(
        self, record: StoredRecord, sent_at: float, error: KafkaError | None, message: Message | None
    ) -> None:
        self._alone_in_flight -= 1
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
        self._serve(self._producer.poll, self._serve_lone(timeout_seconds))

    def push(self, timeout_seconds: float) -> None:
        """Serve delivery reports, and put on the wire at once what still lingers in the producer's queue.

        Returns when everything is delivered, at the latest after the timeout.
        """
        self.lingers = False
        self._serve(self._producer.flush, self._serve_lone(timeout_seconds))

    def _serve_lone(self, timeout_seconds: float) -> float:
        """Serve the reports of what goes alone; return how long to wait for the others."""
        if self._lone_producer is None:
            return timeout_seconds
        nothing_else = 0 < self._alone_in_flight == self.in_flight
        self._serve(self._lone_producer.poll, timeout_seconds if nothing_else else 0.0)
        return 0.0 if nothing_else else timeout_seconds

    def settle(self) -> None:
        """Give up what is in flight, and wait until all of it was reported."""
        end = time.monotonic() + _SETTLE_SECONDS
        while self.in_flight and time.monotonic() < end:
            self.drop()
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
        """Whether a producer has failed for good: see `renew_if_broken`."""
        return self._fatal

    def take_delivered(self) -> list[StoredRecord]:
        """The records delivered since the last call."""
        delivered, self.delivered = self.delivered, []
        return delivered

    def take_failed(self) -> list[Failure]:
        """The records that failed since the last call."""
        failed, self.failed = self.failed, []
        return failed

    def take_send_times(self) -> Counter[float]:
        """When the records delivered since the last call were sent: send time -> number of records."""
        send_times, self.send_times = self.send_times, Counter()
        return send_times

    def close(self) -> None:
        """Let go of the producers, and with them of their threads and connections. Nothing can be sent any more."""
        self._lone_producer = None
        del self._producer

    def drop(self) -> None:
        """Fail at once what is not acknowledged, on the wire or not: the client would send it again by itself."""
        for producer in (self._producer, self._lone_producer):
            if producer is not None:
                producer.purge(in_queue=True, in_flight=True, blocking=False)

    def limit(self, limits: ProducerLimits) -> None:
        """Set the limits of producers. Takes effect with `renew`."""
        self._limits = limits

    @property
    def is_outdated(self) -> bool:
        """True if the producer has other limits than it should: send nothing more, and `renew` it."""
        return self._limits != self._made_for

    def renew_if_broken(self) -> None:
        """After a fatal error the producer accepts nothing more; make a new one. Only with nothing in flight."""
        if self._fatal:
            self._fatal = False
            self.renew()

    def renew(self) -> None:
        """Make a new producer. Only with nothing in flight."""
        self._made_for = self._limits
        self._lone_producer = None  # made again when it is needed
        self._producer = self._make_producer(self._made_for)
