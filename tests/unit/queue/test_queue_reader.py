"""The thread that reads for a consumer, step by step, with a Kafka client on demand."""

from collections import deque

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_queue import QueueConfig, QueueError
from outbox_queue.consuming import group_member, reader
from outbox_queue.consuming.acks import AckHandler
from outbox_queue.consuming.buffer import PrefetchBuffer
from outbox_queue.consuming.reader import QueueReader
from outbox_queue.consuming.start_markers import Batch
from outbox_queue.consuming.start_writers import NotStarted
from outbox_queue.metrics import QueueCounters
from tests.queueing import delivery

CONFIG = QueueConfig(bootstrap_servers="nowhere:1", message_topic="messages")


class Record:
    """A record of the message topic, or the end of a partition."""

    def __init__(self, partition, offset, *, key=b"q", error=None):
        self._partition, self._offset, self._key, self._error = partition, offset, key, error

    def __repr__(self):
        return f"{self._partition}-{self._offset}"

    def partition(self):
        return self._partition

    def offset(self):
        return self._offset

    def key(self):
        return self._key

    def error(self):
        return self._error


def end_of(partition, offset):
    """Return the client's event at the end of a partition."""
    return Record(partition, offset, error=KafkaError(KafkaError._PARTITION_EOF))


class Client:
    """A client that hands out batches; `known` has the group's offsets."""

    def __init__(self):
        self.batches = deque()
        self.waits = []
        self.error = None
        self.paused = set()  # a real client keeps it from one assignment to the next
        self.rebalances = deque()
        self.known = {}

    def poll(self, seconds):
        self.waits.append(seconds)
        if self.rebalances:
            self.rebalances.popleft()()
        return self.batches[0].popleft() if self.batches and not self.paused else None

    def consume(self, _most, _seconds):
        return list(self.batches.popleft())

    def committed(self, places, _timeout):
        return [TopicPartition("messages", one.partition, self.known.get(one.partition, -1001)) for one in places]

    def assignment(self):
        return [TopicPartition("messages", 0)]

    def memberid(self):
        return "us"

    def assign(self, _):
        pass

    def pause(self, partitions):
        self.paused |= {one.partition for one in partitions}

    def resume(self, partitions):
        self.paused -= {one.partition for one in partitions}

    def get_watermark_offsets(self, _partition, *, timeout, cached):
        assert timeout < 1
        if not cached and self.error is not None:
            raise KafkaException(self.error)
        return 0, 10 if cached else 25


class Writer:
    """A writer that starts messages, and fails on demand."""

    def __init__(self):
        self.failures = deque()
        self.committed = {}
        self.is_in_doubt = False

    def settle(self, _seconds_left):
        if self.failures:
            raise self.failures.popleft()

    def write(self, _markers, offsets, _seconds_left):
        if self.failures:
            raise self.failures.popleft()
        self.committed |= offsets


class StartMarkers:
    """A builder that makes each record a delivery of its own."""

    queue = "q"

    def build(self, records):
        return Batch([], [delivery(place=(one.partition(), one.offset())) for one in records], 0)


class World:
    """A reader, its client and its writer of start markers."""

    def __init__(self, monkeypatch, config=CONFIG):
        self.client = Client()
        self.writer = Writer()
        monkeypatch.setattr(group_member, "make_consumer", lambda _: self.client)
        monkeypatch.setattr(reader, "PlainStartWriter", lambda *_: self.writer)
        monkeypatch.setattr(reader, "_PAUSE_AFTER_FAILURE_SECONDS", 0.0)
        self.buffer = PrefetchBuffer(concurrency=None, max_in_progress=100, capacity=100, processing_seconds=3600)
        monkeypatch.setattr(self.buffer, "capacity", lambda _: 100)
        counters = QueueCounters()
        acks = AckHandler(config, self.buffer, None, counters)
        self.reader = QueueReader(config, StartMarkers(), self.buffer, acks, counters)

    @property
    def started(self):
        """Return the places of the messages that are in the buffer."""
        return [one.message.id for one in self.buffer.due(float("inf"))]

    def step(self, *records):
        """Run one turn of the thread, which reads these."""
        if records:
            self.client.batches.append(deque(records))
        self.reader._step()
        self.reader._member.commit_skipped()

    @property
    def committed(self):
        """Return the next offset by partition, as Kafka knows it."""
        return self.writer.committed


@pytest.fixture
def world(monkeypatch):
    """Return a reader without Kafka."""
    return World(monkeypatch)


def test_what_follows_the_last_record_is_committed_at_the_end_of_a_partition(world):
    """Transaction markers at the end of a partition are committed, too, so that they do not count as lag."""
    world.step(Record(0, 5), end_of(0, 7))
    assert world.committed == {0: 7}


def test_a_failed_start_is_tried_again_with_the_same_messages(world):
    """After a failed start no offset is committed, not even at a partition's end, until its messages are started."""
    world.step(Record(0, 4))
    world.writer.failures.append(NotStarted("no answer"))
    world.step(*(Record(0, offset) for offset in range(5, 10)), Record(0, 10, key=b"another"), end_of(0, 11))
    assert world.committed == {0: 5}
    world.step()
    assert world.committed == {0: 11}
    assert world.started == ["0-4", *(f"0-{offset}" for offset in range(5, 10))]


def test_messages_of_a_failed_start_are_left_to_a_new_owner(world):
    """Of the messages of a failed start, those in a partition that is revoked are not started."""
    world.writer.failures.append(NotStarted("no answer"))
    world.step(Record(0, 5), Record(1, 0))
    world.reader._member._revoked(world.client, [TopicPartition("messages", 0)])
    world.step()
    assert world.committed == {1: 1}
    assert world.started == ["1-0"]


def test_the_group_is_heard_before_another_try(world):
    """Between two tries the group is polled, so that messages of partitions that it has revoked are not started."""
    member = world.reader._member
    world.step(Record(0, 4))
    world.writer.failures.append(NotStarted("fenced"))
    world.client.rebalances += [lambda: None, lambda: member._lost(world.client, [TopicPartition("messages", 0)])]
    world.step(Record(0, 5))
    world.step()
    assert world.committed == {0: 5}
    assert world.started == ["0-4"]


def test_what_was_committed_in_doubt_is_not_started_again(world):
    """After a start of unknown outcome, messages whose offsets turn out to be committed are left to the trackers."""
    world.writer.failures += [NotStarted("unknown"), NotStarted("no answer yet")]
    world.writer.is_in_doubt = True
    world.client.known = {0: 6}
    world.step(Record(0, 5), Record(1, 0))
    world.step()
    assert (world.started, world.writer.is_in_doubt) == ([], True)
    world.step()
    world.step()
    assert (world.started, world.writer.is_in_doubt) == (["1-0"], False)
    assert world.committed == {1: 1}


def test_offsets_that_begin_again(world):
    """In a topic that was made anew, each message is started once, and none is passed over."""
    world.step(Record(0, 4), end_of(0, 5))
    world.step(*(Record(0, offset) for offset in (5, 6, 0, 1)))
    assert world.committed == {0: 2}
    world.step()
    assert world.started == ["0-4", "0-5", "0-6", "0-0", "0-1"]


def test_what_may_not_be_written_is_told(world):
    """A refusal of the first messages ends the reading; what may pass is tried again."""
    world.writer.failures.append(NotStarted("later", KafkaError(KafkaError.REQUEST_TIMED_OUT)))
    world.step(Record(0, 0))
    world.writer.failures.append(NotStarted("forbidden", KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    with pytest.raises(QueueError, match="cannot be started: forbidden"):
        world.step()


def test_what_may_not_be_written_for_a_while_is_tried_again(world, caplog):
    """A refusal after messages were started is told once, with the principal, and their like are started later."""
    world.step(Record(0, 0))
    refusal = NotStarted("forbidden", KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    world.writer.failures += [refusal] * 3
    world.step(Record(0, 1))
    for _ in range(3):
        world.step()
    assert world.started == ["0-0", "0-1"]
    assert [line for line in caplog.messages if "not started" in line] == [
        "queue 'q': messages are not started yet: forbidden (as User:ANONYMOUS)"
    ]


def refused():
    """Return the event of a refusal in place of a record."""
    return Record(0, 0, error=KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))


def test_what_may_not_be_read_is_told(world):
    """A refusal before anything was read ends the reading, with the right that is missing."""
    with pytest.raises(QueueError, match=r"cannot be read: .*; grant READ on group 'kafka-mq-q' to"):
        world.step(refused())


def test_what_may_not_be_read_for_a_while_ends_nothing(world, caplog):
    """A refusal after something was read, if only a partition's end, is told once, though others come between."""
    world.step(end_of(0, 5))
    for _ in range(3):
        world.step(refused())
        world.step(Record(0, 0, error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    world.step(Record(0, 5))
    assert world.started == ["0-5"]
    assert sum("grant READ on" in line for line in caplog.messages) == 2
    with pytest.raises(QueueError, match="cannot be read"):
        world.step(Record(0, 0, error=KafkaError(KafkaError._FATAL, "fenced", fatal=True)))


def test_no_poll_takes_long(monkeypatch):
    """No poll takes long, so that a consumer can be closed however long it may wait for a message."""
    world = World(monkeypatch, CONFIG.for_queue(next_message_timeout="1h"))
    world.step()
    assert max(world.client.waits) <= 0.2


def test_the_lag_grows_while_partitions_are_paused(world):
    """While there is no room to read, Kafka is asked for the ends of partitions, so that the lag grows."""
    world.step(Record(0, 4))
    assert world.reader._member.lag() == 5
    world.reader._member._polled_at = -100.0
    world.reader._member.poll_while_full()
    assert world.reader._member.lag() == 20
    world.client.error = KafkaError(KafkaError._TIMED_OUT)
    assert world.reader._member.lag() is None


def test_a_rebalance_while_handlers_are_slow_leaves_no_partition_paused(world):
    """Partitions that were paused for want of capacity, taken away and given back are read, without another pause."""
    member, partitions = world.reader._member, [TopicPartition("messages", 0)]
    member._polled_at = 0.0
    member.poll_while_full()
    assert world.client.paused
    member._revoked(world.client, partitions)
    member._assigned(world.client, partitions)
    world.step(Record(0, 7))
    assert world.started == ["0-7"]
