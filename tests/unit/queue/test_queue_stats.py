"""The counts of the commands, with topics and a Kafka client of our own."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.errors import KafkaUnavailable
from outbox_queue import QueueConfig, QueueTopicError
from outbox_queue.operations import stats, topic_reader
from outbox_queue.operations.stats import queue_stats
from outbox_queue.operations.topic_reader import TopicRecord, read_to_end

CONFIG = QueueConfig(bootstrap_servers="nowhere:1", message_topic="messages")


@pytest.fixture
def topics(monkeypatch):
    """Return the groups' offsets by queue, with a message topic of twenty records, of two queues in turn."""
    groups = {}
    begun = []

    def read(_config, topic, begin=None):
        if topic == CONFIG.message_topic:
            begun.append(begin)
            for offset in range((begin or {}).get(0, 0), 20):
                yield TopicRecord(0, offset, (1, 0), b"a" if offset % 2 else b"b", b"", [])

    monkeypatch.setattr(stats, "read_to_end", read)
    monkeypatch.setattr(stats, "_queues_with_groups", lambda _: sorted(groups))
    monkeypatch.setattr(stats, "_committed", lambda _config, group, _topic: groups.get(group[len("kafka-mq-") :], {}))
    monkeypatch.setattr(stats.DeadLetters, "all", lambda _: [])
    return groups, begun


def test_a_queue_without_a_group_is_counted_whole(topics):
    """A queue without a group is counted whole, independent of the offsets of another queue's group."""
    groups, _ = topics
    groups["a"] = {0: 20}
    assert {row.queue: row.waiting for row in queue_stats(CONFIG)} == {"a": 0, "b": 10}


def test_groups_of_other_topics_are_no_queues_of_these(topics):
    """A group that has committed nothing here belongs to another pair of topics, and is no queue of these."""
    groups, _ = topics
    groups |= {"a": {0: 12}, "elsewhere": {}}
    assert {row.queue: row.waiting for row in queue_stats(CONFIG)} == {"a": 4, "b": 10}


def test_one_queue_is_read_from_where_its_group_is(topics):
    """The numbers of one queue are read from its group's offsets on."""
    groups, begun = topics
    groups |= {"a": {0: 12}, "b": {0: 1}}
    assert [(row.queue, row.waiting) for row in queue_stats(CONFIG, "a")] == [("a", 4)]
    assert begun == [{0: 12}]
    assert [(row.queue, row.waiting) for row in queue_stats(CONFIG, "none")] == [("none", 0)]


class Failing:
    """A consumer whose reading fails."""

    def __init__(self, code, *, at_once):
        self._error, self._at_once = KafkaError(code), at_once
        self.is_closed = False

    def assign(self, _):
        pass

    def consume(self, *_):
        if self._at_once:
            raise KafkaException(self._error)
        return [self]

    def error(self):
        return self._error

    def topic(self):
        return "messages"

    def partition(self):
        return 0

    def offset(self):
        return -1001

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("code", "raised"),
    [(KafkaError.TOPIC_AUTHORIZATION_FAILED, QueueTopicError), (KafkaError._TRANSPORT, KafkaUnavailable)],
)
def test_what_cannot_be_read_is_told_in_a_line(monkeypatch, code, raised, at_once):
    """An error of the Kafka client becomes one of ours, which a command shows without a traceback."""
    client = Failing(code, at_once=at_once)
    monkeypatch.setattr(topic_reader, "make_consumer", lambda _: client)
    monkeypatch.setattr(topic_reader, "partition_ends", lambda *_: {0: 5})
    with pytest.raises(raised, match="messages" if raised is QueueTopicError else "nowhere:1"):
        list(read_to_end(CONFIG, "messages"))
    assert client.is_closed
