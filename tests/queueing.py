"""The parts that tests of queues share: markers written by hand, trackers, and readers of the topics."""

import faulthandler
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import Producer

from devstack.processes import wait_until
from outbox_queue.config import QueueConfig
from outbox_queue.consuming.delivery import Delivery, ReceivedMessage
from outbox_queue.protocol import headers
from outbox_queue.protocol import markers as wire
from outbox_queue.redelivery.tracker import RedeliveryTracker
from tests.kafka_reader import read_topic

PATIENCE = 60.0


def start_marker(partition, number, after_ms, queue, payload, *, max_attempts, **more):
    """Return the start marker of one message."""
    return wire.StartEncoder(queue, max_attempts).encode((partition, number), after_ms, payload, **more)


@dataclass
class Markers:
    """A writer of markers, as consumers of queues write them."""

    bootstrap: str
    topic: str
    partitions: int = 4
    queue: bytes = b"q"

    def __post_init__(self):
        self._producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, "enable.idempotence": True})

    def write(self, number, value):
        """Write a marker of message (0, number), to the one partition of all its markers."""
        while True:
            try:
                self._producer.produce(self.topic, value, str(number).encode(), number % self.partitions)
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def start(self, number, after_ms=60_000, *, payload=None, attempt=1, max_attempts=0, queue=None, **more):
        value = start_marker(
            0,
            number,
            after_ms,
            queue or self.queue,
            payload if payload is not None else b"payload %d" % number,
            attempt=attempt,
            enqueued_at_ms=more.pop("enqueued_at_ms", 1000),
            max_attempts=max_attempts,
            **more,
        )
        self.write(number, value)

    def end(self, number):
        self.write(number, wire.end_marker(0, number))

    def keep_alive(self, number, after_ms, **more):
        self.write(number, wire.keep_alive_marker(0, number, after_ms, **more))

    def flush(self):
        assert self._producer.flush(30) == 0


def received(payload=b"", *, place=(0, 0), attempt=1, enqueued_at_ms=0):
    """Return a message as a consumer reads it."""
    return ReceivedMessage("q", payload, (), attempt, None, place, place, enqueued_at_ms)


def delivery(*, deadline=float("inf"), **message):
    """Return a message in progress, whose deadline does not come."""
    return Delivery(received(**message), 0, b"q", deadline)


def queue_config(bootstrap, make_topic, **settings):
    """Return a config with topics of their own, the marker topic stamped by the broker."""
    marker_settings = {"message.timestamp.type": "LogAppendTime"}
    topics = {
        "message_topic": make_topic(4),
        "marker_topic": make_topic(4, config=marker_settings),
        "dead_letter_topic": make_topic(2, config={"cleanup.policy": "compact"}),
    }
    return QueueConfig(bootstrap_servers=bootstrap, **{**topics, "redelivery_timeout": "2s", **settings})


@contextmanager
def tracking(config, **arguments):
    """Run a tracker within the context, which begins when it has caught up."""
    with RedeliveryTracker(config, **arguments) as tracker:
        caught_up = wait_until(lambda: tracker.is_caught_up or not tracker.health().ok, PATIENCE)
        if not caught_up:
            faulthandler.dump_traceback()
        assert caught_up, tracker.health().detail
        yield tracker
    assert tracker.join(PATIENCE)


def messages_in(config):
    """Return the messages of the message topic: payload -> attempts of its copies."""
    found = {}
    for message in read_topic(config.bootstrap_servers, config.message_topic):
        found.setdefault(message.value, []).append(headers.read(message.headers).attempt)
    return found


def dead_letters_in(config):
    """Return the messages of the dead letter topic: payload -> the contents of its headers."""
    found = read_topic(config.bootstrap_servers, config.dead_letters)
    return {letter.value: headers.read(letter.headers) for letter in found}


def ended_ids(config):
    """Count the end markers of each message."""
    found = Counter()
    for record in read_topic(config.bootstrap_servers, config.marker_topic):
        marker = wire.Marker.FromString(record.value)
        if marker.type == wire.END:
            found[marker.message_id.partition, marker.message_id.offset] += 1
    return found


def eventually(condition, *, seconds=PATIENCE):
    """Wait until a condition holds, and return its answer."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(0.1)
    return answer
