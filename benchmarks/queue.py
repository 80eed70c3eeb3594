"""The messages a second that a queue takes and hands out (`make bench-queue`).

One process, as a service would be: it sends messages of 100 bytes, then receives and acknowledges them one by one with
a handler that does nothing, with plain and with transactional starts. A tracker is not running: it is a process of
its own elsewhere (see `benchmarks.queue_tracker`).

The raw limits of the same run, on the same clients without a queue around them:

- *produce*: the same messages with bare `produce` calls and one flush;
- *read + 2 markers*: read them in batches, and for each produce two records of the sizes of a start and an end marker.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from benchmarks.stage import VALUE_BYTES, fresh_topic, machine, services
from outbox_core.kafka.clients import make_consumer, make_producer
from outbox_queue import Queue, QueueConfig, QueueService
from outbox_queue.protocol.clients import consumer_settings, producer_settings

_PATIENCE_SECONDS = 60
_START_BYTES, _END_BYTES = VALUE_BYTES + 40, 10
_PAYLOAD = b"x" * VALUE_BYTES


class Stopwatch:
    """A measurement of wall clock and CPU time of this process for so many messages."""

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._wall, self._cpu = time.monotonic(), _cpu_seconds()

    def rate(self) -> tuple[float, float]:
        """Return messages a second, and microseconds of CPU for each."""
        wall, cpu = time.monotonic() - self._wall, _cpu_seconds() - self._cpu
        return self._messages / wall, cpu / self._messages * 1e6


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def fresh_queue(bootstrap: str, **settings: object) -> Iterator[Queue]:
    """Yield a queue over topics of its own."""
    name = fresh_topic("queue")
    config = QueueConfig(bootstrap_servers=bootstrap, message_topic=name, marker_topic=f"{name}-markers", **settings)
    service = QueueService(config)
    service.topics()
    yield service.queue("bench")


def send(queue: Queue, messages: int) -> tuple[float, float]:
    """Send through a producer, and wait until all are in Kafka."""
    with queue.producer() as producer:
        producer.send_and_wait(b"warm")
        watch = Stopwatch(messages)
        for _ in range(messages):
            producer.send(_PAYLOAD)
        producer.flush()
        return watch.rate()


def receive(queue: Queue, messages: int) -> tuple[float, float]:
    """Receive and acknowledge one by one; the clock begins with the first message and ends with the last end marker."""
    with queue.consumer() as consumer:
        for _ in range(messages // 10):  # connections, and the prefetch finding its size
            _next(consumer.receive(_PATIENCE_SECONDS))
        rest = messages - messages // 10
        watch = Stopwatch(rest)
        for _ in range(rest):
            _next(consumer.receive(_PATIENCE_SECONDS))
        consumer.close()
        return watch.rate()


def _next(message: object) -> None:
    if message is None:
        raise SystemExit("a message is missing")
    message.ack()  # type: ignore[attr-defined]


def bare_produce(queue: Queue, messages: int) -> tuple[float, float]:
    """Measure the limit of sending."""
    producer = make_producer(producer_settings(queue.config))
    producer.produce(queue.config.message_topic, b"warm", b"bare")
    producer.flush()
    watch = Stopwatch(messages)
    for _ in range(messages):
        _produce(lambda: producer.produce(queue.config.message_topic, _PAYLOAD, b"bench"), producer.poll)
    producer.flush()
    return watch.rate()


def bare_receive(queue: Queue, messages: int) -> tuple[float, float]:
    """Measure the limit of receiving: read, and write two markers for each."""
    consumer = make_consumer(consumer_settings(queue.config, "bare"))
    consumer.subscribe([queue.config.message_topic])
    producer = make_producer(producer_settings(queue.config))
    topic, start, end = queue.config.marker_topic, b"s" * _START_BYTES, b"e" * _END_BYTES
    seen = len(consumer.consume(1, _PATIENCE_SECONDS))
    watch = Stopwatch(messages)
    while seen < messages:
        for _ in consumer.consume(1000, 1):
            for value in (start, end):
                _produce(lambda value=value: producer.produce(topic, value, b"0-1"), producer.poll)  # type: ignore[misc]
            seen += 1
    producer.flush()
    rate = watch.rate()
    consumer.close()
    return rate


def _produce(produce: Callable[[], None], poll: Callable[[float], int]) -> None:
    while True:
        try:
            produce()
        except BufferError:
            poll(0.01)
        else:
            return


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many, after one that warms the broker")
    options = parser.parse_args()
    console = Console(width=110)
    console.print(machine())
    console.print(f"{'':40} {'messages/s':>12} {'µs of CPU':>12} {'goal':>10}")

    def show(what: str, measured: Sequence[tuple[float, float]], goal: str = "") -> None:
        rate, cpu = (statistics.median(values) for values in zip(*measured, strict=True))
        console.print(f"{what:40} {rate:>12,.0f} {cpu:>12.1f} {goal:>10}")

    with services() as at:
        rounds = [_round(at.bootstrap, options.messages) for _ in range(options.rounds + 1)]
    send_, receive_, transactional, produce, bare = zip(*rounds[1:], strict=True)  # the first one warms the broker
    show("send", send_, "50,000")
    show("receive + acknowledge", receive_, "40,000")
    show("receive + acknowledge, transactional", transactional, "5,000")
    show("raw: produce", produce)
    show("raw: read + 2 markers", bare)


def _round(bootstrap: str, messages: int) -> tuple[tuple[float, float], ...]:
    """Measure everything once."""
    with fresh_queue(bootstrap) as queue:
        sent = send(queue, messages)
        received = receive(queue, messages)
    with fresh_queue(bootstrap, transactional=True) as queue:
        send(queue, messages)
        in_transactions = receive(queue, messages)
    with fresh_queue(bootstrap) as queue:
        return sent, received, in_transactions, bare_produce(queue, messages), bare_receive(queue, messages)


if __name__ == "__main__":
    main()
