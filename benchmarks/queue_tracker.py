"""The time until a tracker is ready: with a long history after its committed offset, and with a normal one.

    python -m benchmarks.queue_tracker [--markers 10000000]

The history is start, keep-alive and end markers of messages of 100 bytes, as 200 consumers' worth of messages in
progress would leave them; the last 10,000 messages are unfinished. "Normal" is the history of a tracker that committed
a second ago.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection

from benchmarks.stage import VALUE_BYTES, fresh_topic, machine
from devstack.stack import DevStack
from outbox_core.kafka.clients import Producer, make_producer
from outbox_queue import QueueConfig
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.clients import producer_settings
from outbox_queue.protocol.topics import ensure_topics
from outbox_queue.redelivery.tracker import RedeliveryTracker

_PARTITIONS = 8
_UNFINISHED = 10_000
_IN_PROGRESS = 2_000
_PATIENCE_SECONDS = 1800
_AFTER_MS = 3_600_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long a tracker takes until it is ready.")
    parser.add_argument("--markers", type=int, default=10_000_000, metavar="N", help="default: %(default)s")
    markers: int = parser.parse_args().markers
    print(machine())
    with DevStack(embedded=False) as stack:
        stack.start_kafka()
        topic = fresh_topic("markers")
        config = QueueConfig(bootstrap_servers=stack.kafka.bootstrap, marker_topic=topic, marker_partitions=_PARTITIONS)
        ensure_topics(config)
        begun = time.monotonic()
        _write_history(config, markers)
        print(f"history: {markers:,} markers written in {time.monotonic() - begun:.0f} s")
        _measure(config, f"ready after {markers:,} markers")
        _measure(config, "ready with a normal history")


def _measure(config: QueueConfig, what: str) -> None:
    """Measure in a process of its own, so that the memory is the tracker's alone."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run_tracker, args=(config.model_dump(), there))
    process.start()
    if not here.poll(_PATIENCE_SECONDS):
        sys.exit("the tracker is not ready in half an hour")
    seconds, unfinished, mebibytes = here.recv()
    process.join()
    print(f"{what}: {seconds:.1f} s, {unfinished:,} messages in progress, {mebibytes:.0f} MiB at most")


def _run_tracker(settings: dict[str, object], result: Connection) -> None:
    begun = time.monotonic()
    tracker = RedeliveryTracker(QueueConfig(**settings))
    with tracker:
        while not tracker.is_caught_up:
            time.sleep(0.01)
        seconds, unfinished = time.monotonic() - begun, tracker.in_progress
        time.sleep(2)  # it commits
    tracker.join(30)
    result.send((seconds, unfinished, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def _write_history(config: QueueConfig, markers: int) -> None:
    producer = make_producer({**producer_settings(config, linger_ms=20), "queue.buffering.max.messages": 1_000_000})
    messages = (markers - _UNFINISHED) // 3 + _UNFINISHED
    payload = b"x" * VALUE_BYTES
    encoder = wire.StartEncoder(b"bench", max_attempts=10)
    for number in range(messages):
        start = encoder.encode((0, number), _AFTER_MS, payload, attempt=1, enqueued_at_ms=time.time_ns() // 10**6)
        _write(producer, config, number, start)
        behind = number - _IN_PROGRESS
        if 0 <= behind < messages - _UNFINISHED:
            _write(producer, config, behind, wire.keep_alive_marker(0, behind, _AFTER_MS))
            _write(producer, config, behind, wire.end_marker(0, behind))
    producer.flush(300)


def _write(producer: Producer, config: QueueConfig, number: int, value: bytes) -> None:
    while True:
        try:
            producer.produce(config.marker_topic, value, b"%d" % number, number % _PARTITIONS)
        except BufferError:
            producer.poll(0.05)
        else:
            return


if __name__ == "__main__":
    main()
