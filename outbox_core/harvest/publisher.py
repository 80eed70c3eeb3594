"""Sends records through one Kafka producer and collects what became of them.

Delivery reports arrive on the thread that calls `poll`, which is the thread that sends: nothing here is shared.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from outbox_core.kafka import KafkaError, KafkaException, Producer
from outbox_core.ports import StoredRecord

_log = logging.getLogger(__name__)

_SETTLE_POLL_SECONDS = 0.1


class Failure(NamedTuple):
    """A record that was not delivered, as far as the producer knows."""

    record: StoredRecord
    error: KafkaError


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


class Publisher:
    """One producer and the records in flight through it.

    Args:
        make_producer: makes a producer; called at once, and again after a fatal error.
        id_header: name of the header that carries the record's identity; '' for none.
        outbox_name: identity of the outbox, written before the record's id.

    Attributes:
        in_flight: records sent whose delivery report has not arrived.
        lingers: whether anything was sent since the last `push`.
        delivered: records acknowledged since it was last emptied by `take_delivered`.
        failed: records that failed since the list was last emptied by `take_failed`.
        send_times: when the records delivered since the last `take_send_times` were sent, with how many of each.
    """

    def __init__(self, make_producer: Callable[[], Producer], *, id_header: str, outbox_name: str) -> None:
        self._make_producer = make_producer
        self._producer = make_producer()
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
        _, topic, key, value, _, _, partition = record[:7]
        try:
            headers = message_headers(record, self._id_header, self._id_prefix)
            self._producer.produce(
                topic, value, key, partition, on_delivery=partial(self._report, record, sent_at), headers=headers
            )
        except BufferError:
            return False
        except KafkaException as error:
            self._note_failure(record, error.args[0])
            return True
        except (TypeError, ValueError, OverflowError) as error:  # a row that is no message, written by hand
            self._note_failure(record, KafkaError(KafkaError._INVALID_ARG, str(error)))  # noqa: SLF001
            return True
        self.in_flight += 1
        self.lingers = True
        return True

    def _report(self, record: StoredRecord, sent_at: float, error: KafkaError | None, _message: object) -> None:
        self.in_flight -= 1
        if error is None:
            self.delivered.append(record)
            self.send_times[sent_at] += 1
        else:
            self._note_failure(record, error)

    def _note_failure(self, record: StoredRecord, error: KafkaError) -> None:
        self._fatal = self._fatal or error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001  its public name
        self.failed.append(Failure(record, error))

    def poll(self, timeout_seconds: float) -> None:
        """Serve delivery reports; wait up to the timeout for the first."""
        self._serve(self._producer.poll, timeout_seconds)

    def push(self, timeout_seconds: float) -> None:
        """Serve delivery reports, and put on the wire at once what still lingers in the producer's queue.

        Returns when everything is delivered, at the latest after the timeout.
        """
        self.lingers = False
        self._serve(self._producer.flush, timeout_seconds)

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
        self._producer.purge(in_queue=True, in_flight=False, blocking=False)

    def renew_if_broken(self) -> None:
        """After a fatal error the producer accepts nothing more; make a new one. Only with nothing in flight."""
        if self._fatal:
            self._producer = self._make_producer()
            self._fatal = False
