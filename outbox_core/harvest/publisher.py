"""Sends records through a Kafka producer and collects what became of them.

Delivery reports arrive on the thread that calls `poll`, which is the thread that sends: nothing here is shared.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from outbox_core.harvest.verdicts import Verdict, verdict_on
from outbox_core.kafka import KafkaError, KafkaException, Message, Producer
from outbox_core.ports import StoredRecord

_log = logging.getLogger(__name__)

_PARTITION: Final = 6
_SETTLE_POLL_SECONDS = 0.1
_REMEMBERED_TOPICS = 10_000
_LEGAL_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")

ORIGIN_HEADER = "outbox-original-topic"
ORIGIN_PARTITION_HEADER = "outbox-original-partition"
ERROR_HEADER = "outbox-error"
"""Headers of a dead letter: where it was to go, and why it did not arrive there."""


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
        names_none = self.record[_PARTITION] < 0 and self.error.code() == KafkaError._UNKNOWN_PARTITION  # noqa: SLF001
        return Verdict.AWAY if names_none else verdict_on(self.error)


def message_headers(record: StoredRecord, id_header: str, id_prefix: bytes) -> list[tuple[str, Any]]:
    """The record's own headers, and the one that tells repeats apart: `<outbox name>:<id>`.

    Raises:
        ValueError: if there are not as many header values as names.
    """
    keys, values = record[4], record[5]
    headers: list[tuple[str, Any]] = list(zip(keys or (), values or (), strict=True)) if keys or values else []
    if id_header:
        headers.append((id_header, b"%b%d" % (id_prefix, record[0])))
    return headers


def _partition(message: Message | None) -> int:
    found = message.partition() if message is not None else None
    return -1 if found is None else found


def dead_letter(record: StoredRecord, topic: str, error: str) -> StoredRecord:
    """The record as it goes to the dead-letter topic: the same, with where it was to go and why it did not."""
    _, origin, _, _, keys, values, partition = record[:7]
    # Not strict: that there are not as many values as names may be what is wrong with it.
    headers: list[tuple[str, Any]] = [*zip(keys or (), values or (), strict=False), (ORIGIN_HEADER, origin)]
    if partition >= 0:
        headers.append((ORIGIN_PARTITION_HEADER, str(partition)))
    headers.append((ERROR_HEADER, error))
    names, texts = [name for name, _ in headers], [value for _, value in headers]
    return StoredRecord(record[0], topic, record[2], record[3], names, texts, -1, record[7])


def is_legal_topic(topic: str) -> bool:
    """Whether Kafka could have a topic of this name."""
    return _LEGAL_TOPIC.match(topic) is not None and topic not in (".", "..")


class Publisher:
    """Its producers and the records in flight through them.

    Most records go through one producer. One that may be to blame for the failure of its batch goes alone: through a
    second producer, made when it is first needed, whose batches have one record each.

    Args:
        make_producer: makes a producer; called at once, and again after a fatal error.
        make_lone_producer: makes a producer whose batches have one record; by default the same as the other.
        id_header: name of the header that carries the record's identity; '' for none.
        outbox_name: identity of the outbox, written before the record's id.

    Attributes:
        in_flight: records sent whose delivery report has not arrived.
        lingers: whether anything was sent since the last `push`.
        delivered: records acknowledged since it was last emptied by `take_delivered`.
        failed: records that failed since the list was last emptied by `take_failed`.
        send_times: when the records delivered since the last `take_send_times` were sent, with how many of each.
    """

    def __init__(
        self,
        make_producer: Callable[[], Producer],
        make_lone_producer: Callable[[], Producer] | None = None,
        *,
        id_header: str,
        outbox_name: str,
    ) -> None:
        self._make_producer = make_producer
        self._make_lone_producer = make_lone_producer or make_producer
        self._producer = make_producer()
        self._lone_producer: Producer | None = None
        self._alone_in_flight = 0
        self._legal_topics: set[str] = set()
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
            self._lone_producer = self._make_lone_producer()
        before = self.in_flight
        taken = self._hand_over(self._lone_producer, record, partial(self._report_alone, record, sent_at))
        self._alone_in_flight += self.in_flight - before
        return taken

    def _hand_over(self, producer: Producer, record: StoredRecord, on_delivery: Callable[..., None]) -> bool:
        _, topic, key, value, _, _, partition = record[:7]
        try:
            headers = message_headers(record, self._id_header, self._id_prefix)
            if topic not in self._legal_topics:
                self._check_topic(topic)
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

    def _check_topic(self, topic: str) -> None:
        if not is_legal_topic(topic):
            raise ValueError(f"{topic[:300]!r} is not a legal topic name")
        if len(self._legal_topics) >= _REMEMBERED_TOPICS:
            self._legal_topics.clear()
        self._legal_topics.add(topic)

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
        """Wait until nothing is in flight any more: at most `delivery.timeout.ms`."""
        self.drop_unsent()
        while self.in_flight:
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

    def drop_unsent(self) -> None:
        """Fail at once what the producer has queued and not yet put on the wire."""
        for producer in (self._producer, self._lone_producer):
            if producer is not None:
                producer.purge(in_queue=True, in_flight=False, blocking=False)

    def renew_if_broken(self) -> None:
        """After a fatal error the producer accepts nothing more; make a new one. Only with nothing in flight."""
        if self._fatal:
            self._producer = self._make_producer()
            self._lone_producer = None
            self._fatal = False
