"""The thread that reads for a consumer, step by step, with a Kafka client that does as it is told."""

from collections import deque

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_queue import QueueConfig, QueueError, fetching
from outbox_queue.fetching import Fetcher
from outbox_queue.metrics import QueueCounters
from outbox_queue.starts import NotStarted

CONFIG = QueueConfig(bootstrap_servers="nowhere:1", message_topic="messages")


class Record:
    """A record of the message topic, or the news that a partition ends."""

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
    """What the client says when it has read a partition to its end."""
    return Record(partition, offset, error=KafkaError(KafkaError._PARTITION_EOF))


class Client:
    """Hands out batches; notes where it is set back to, and what is committed."""

    def __init__(self):
        self.batches = deque()
        self.sought = []
        self.committed = {}
        self.waits = []
        self.error = None

    def poll(self, seconds):
        self.waits.append(seconds)
        return self.batches[0].popleft() if self.batches else None

    def consume(self, _most, _seconds):
        return list(self.batches.popleft())

    def seek(self, partition):
        self.sought.append((partition.partition, partition.offset))

    def commit(self, offsets, asynchronous):
        assert not asynchronous
        self.committed |= {one.partition: one.offset for one in offsets}
        return []

    def assignment(self):
        return [TopicPartition("messages", 0)]

    def pause(self, _):
        pass

    def get_watermark_offsets(self, _partition, *, timeout, cached):
        assert timeout < 1
        if not cached and self.error is not None:
            raise KafkaException(self.error)
        return 0, 10 if cached else 25


class Starts:
    """Starts messages; fails as often as it is told to."""

    def __init__(self, committed):
        self.failures = deque()
        self.committed = committed

    def write(self, _markers, offsets, _seconds_left):
        if self.failures:
            raise self.failures.popleft()
        self.committed |= offsets


class World:
    """A fetcher, its client and its starts; `started` are the records that were handed over."""

    def __init__(self, monkeypatch, config=CONFIG):
        self.client, self.started = Client(), []
        self.starts = Starts(self.client.committed)
        monkeypatch.setattr(fetching, "make_consumer", lambda _: self.client)
        monkeypatch.setattr(fetching, "PlainStarts", lambda *_: self.starts)
        monkeypatch.setattr(fetching, "_PAUSE_AFTER_FAILURE_SECONDS", 0.0)
        self.fetcher = Fetcher(
            config, "q", room=lambda _: 100, start=self._start, counters=QueueCounters(), fail=lambda _: None
        )

    def _start(self, records, write, _there_are_more):
        write([])
        self.started += map(repr, records)

    def step(self, *records):
        """One turn of the thread, which reads these."""
        if records:
            self.client.batches.append(deque(records))
        self.fetcher._step()
        self.fetcher._commit_skipped()

    @property
    def committed(self):
        """The next offset by partition, as Kafka knows it."""
        return self.client.committed


@pytest.fixture
def world(monkeypatch):
    """A fetcher without Kafka."""
    return World(monkeypatch)


def test_what_follows_the_last_record_is_committed_at_the_end_of_a_partition(world):
    """Marks of transactions at the end of a partition are no records, and do not count as lag."""
    world.step(Record(0, 5), end_of(0, 7))
    assert world.committed == {0: 7}


def test_a_failed_start_forgets_where_the_partition_ends(world):
    """Messages that are read again after a failed start are not taken for the marks before a partition's end."""
    world.step(Record(0, 4))
    assert world.committed == {0: 5}
    world.starts.failures.append(NotStarted("no answer"))
    world.step(*(Record(0, offset) for offset in range(5, 10)), end_of(0, 10))
    assert world.client.sought == [(0, 5)]
    world.step(Record(1, 0))
    assert world.committed == {0: 5, 1: 1}
    world.step(*(Record(0, offset) for offset in range(5, 10)), end_of(0, 10))
    assert world.committed == {0: 10, 1: 1}
    assert world.started == ["0-4", "1-0", *(f"0-{offset}" for offset in range(5, 10))]


def test_what_may_not_be_written_is_told(world):
    """A refusal that does not pass ends the reading, whatever step it comes from; another is tried again."""
    world.starts.failures.append(NotStarted("later", KafkaError(KafkaError.REQUEST_TIMED_OUT)))
    world.step(Record(0, 0))
    world.starts.failures.append(NotStarted("forbidden", KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    with pytest.raises(QueueError, match="cannot be started: forbidden"):
        world.step(Record(0, 0))


def test_no_poll_takes_long(monkeypatch):
    """However long a consumer may wait for a message, it can be closed meanwhile."""
    world = World(monkeypatch, CONFIG.for_queue(next_message_timeout="1h"))
    world.step()
    assert max(world.client.waits) <= 0.2


def test_the_lag_grows_while_partitions_are_paused(world):
    """Nothing is read while there is no room: then Kafka is asked where the partitions end."""
    world.step(Record(0, 4))
    assert world.fetcher._lag() == 5
    world.fetcher._polled_at = -100.0
    world.fetcher._stay_in_group()
    assert world.fetcher._lag() == 20
    world.client.error = KafkaError(KafkaError._TIMED_OUT)
    assert world.fetcher._lag() is None
