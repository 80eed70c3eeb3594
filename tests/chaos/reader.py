"""The reader: one consumer with `read_committed` that follows all topics of a run from beginning to end.

It reads while the run goes on, so that a fault is known when it happens, and so that it meets the same as consumers
do: open transactions, aborted ones, a broker that restarts.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox_core.kafka.messages import headers_of
from tests.chaos.checker import Arrival, Checker

ID_HEADER = "outbox-id"
_BATCH = 500
_POLL_SECONDS = 0.1
_SETTINGS = {
    "group.id": "chaos-reader",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 50,
    "reconnect.backoff.max.ms": 500,
}


@dataclass
class Pulse:
    """The times at which an outbox's records arrive, in seconds on the monotonic clock.

    Attributes:
        arrived_at: time of the last one.
        sent_at: latest time of production, in seconds since the epoch.
        longest_pause: longest time without any, while `Reader.measuring` was set.
        paused_at: beginning of that pause, in seconds since the epoch.
    """

    arrived_at: float = 0.0
    sent_at: float = 0.0
    longest_pause: float = 0.0
    paused_at: float = 0.0


class Reader:
    """A reader on a thread of its own, until `finish`.

    Args:
        bootstrap: the broker, undisturbed.
        topics: the topics, each with the name of the outbox that feeds it.
        partitions: of each topic.
        on_row: called on the reader's thread with the outbox and the id of each row that has arrived.

    Attributes:
        checker: the judge of the messages. Other threads may read only its counts.
        pulses: by outbox.
        measuring: whether pauses count.
        odd: number of records that are of hostile rows, not of the load.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: dict[str, str],
        partitions: int,
        on_row: Callable[[str, int], None] = lambda _outbox, _row: None,
    ) -> None:
        self.checker = Checker()
        self.pulses = {outbox: Pulse() for outbox in topics.values()}
        self.measuring = threading.Event()
        self.failure: BaseException | None = None
        self.odd = 0
        self._bootstrap = bootstrap
        self._outboxes = topics
        self._on_row = on_row
        self._places = [(topic, number) for topic in topics for number in range(partitions)]
        self._reached = dict.fromkeys(self._places, 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout: float) -> list[str]:
        """Read to the end of every partition, and stop; return the partitions whose end was not reached."""
        deadline = time.monotonic() + timeout
        ends = self._retry(self._ends, deadline)
        while time.monotonic() < deadline and self.failure is None:
            if all(self._reached[place] >= end for place, end in ends.items()):
                break
            time.sleep(0.05)
        self._stopping.set()
        self._thread.join(10)
        if self.failure is not None:
            raise self.failure
        return [
            f"{topic}[{number}]: read to {self._reached[topic, number]}, ends at {end}"
            for (topic, number), end in ends.items()
            if self._reached[topic, number] < end
        ]

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(10)

    def wait_for_delivery(self, outbox: str, since: float, timeout: float) -> float | None:
        """Return the seconds from `since` (on the epoch) to a read record produced after it; None after the timeout."""
        deadline = time.monotonic() + timeout
        while self.pulses[outbox].sent_at <= since:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        return time.time() - since

    def _run(self) -> None:
        try:
            consumer = _consumer(self._bootstrap, "read_committed")
            consumer.assign([TopicPartition(*place, OFFSET_BEGINNING) for place in self._places])
            while not self._stopping.is_set():
                for message in consumer.consume(_BATCH, _POLL_SECONDS):
                    self._take(message)
            consumer.close()
        except BaseException as error:
            self.failure = error

    def _take(self, message: Message) -> None:
        error = message.error()
        place = message.topic(), message.partition()
        if error is None:
            if (message.value() or b"x")[:1].isdigit():
                arrival = _arrival(message)
                self.checker.see(arrival)
                if arrival.row is not None:
                    self._on_row(self._outboxes[arrival.topic], arrival.row)
            else:
                self.odd += 1
            self._reached[place] = message.offset() + 1
            self._note_pulse(self.pulses[self._outboxes[message.topic()]], message.timestamp()[1] / 1000)
        elif error.code() == KafkaError._PARTITION_EOF:
            self._reached[place] = max(self._reached[place], message.offset())
        elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise KafkaException(error)

    def _note_pulse(self, pulse: Pulse, sent_at: float) -> None:
        now = time.monotonic()
        pause = now - pulse.arrived_at
        if self.measuring.is_set() and pulse.arrived_at and pause > pulse.longest_pause:
            pulse.longest_pause, pulse.paused_at = pause, time.time() - pause
        pulse.arrived_at = now
        pulse.sent_at = max(pulse.sent_at, sent_at)

    def _ends(self) -> dict[tuple[str, int], int]:
        """Return the ends of the partitions, open transactions included."""
        consumer = _consumer(self._bootstrap, "read_uncommitted")
        try:
            return {
                place: consumer.get_watermark_offsets(TopicPartition(*place), timeout=5, cached=False)[1]
                for place in self._places
            }
        finally:
            consumer.close()

    @staticmethod
    def _retry(ask: Callable[[], Any], deadline: float) -> Any:
        while True:
            try:
                return ask()
            except KafkaException:
                if time.monotonic() > deadline:
                    raise


def _consumer(bootstrap: str, isolation: str) -> Consumer:
    return Consumer({**_SETTINGS, "bootstrap.servers": bootstrap, "isolation.level": isolation, "log_level": 0})


def _arrival(message: Message) -> Arrival:
    key = message.key()
    row = dict(headers_of(message)).get(ID_HEADER, b"").rpartition(b":")[2]
    return Arrival(
        topic=message.topic(),
        key=key.decode() if key is not None else None,
        n=int(message.value().split(maxsplit=1)[0]),
        row=int(row) if row else None,
        partition=message.partition(),
        offset=message.offset(),
        sent_at=message.timestamp()[1] / 1000,
    )
