"""A tracker's commits and ticks, with Kafka clients that do nothing."""

import itertools

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_queue import QueueConfig, QueueError
from outbox_queue.metrics import QueueMetrics
from outbox_queue.redelivery import loop as tracker_loop
from outbox_queue.redelivery.loop import TrackerLoop

CONFIG = QueueConfig(bootstrap_servers="nowhere:1")


class Consumer:
    """A recorder of the commits."""

    def __init__(self):
        self.commits = []
        self.raising = None

    def assign(self, _):
        pass

    def memberid(self):
        return "us"

    def pause(self, _):
        pass

    def close(self):
        pass

    def commit(self, offsets, asynchronous):
        self.commits.append(([(one.partition, one.offset) for one in offsets], asynchronous))
        if self.raising is not None:
            raise self.raising


class Ticks:
    """A producer whose records stay under way until they are purged."""

    def __init__(self):
        self.reports = []

    def __len__(self):
        return len(self.reports)

    def produce(self, *_, on_delivery):
        self.reports.append(on_delivery)

    def purge(self):
        while self.reports:
            self.reports.pop()(KafkaError(KafkaError._PURGE_INFLIGHT), None)


@pytest.fixture
def consumer(monkeypatch):
    """Return the consumer of a tracker."""
    consumer = Consumer()
    monkeypatch.setattr(tracker_loop, "make_consumer", lambda _: consumer)
    monkeypatch.setattr(tracker_loop, "make_producer", lambda _: None)
    return consumer


@pytest.fixture
def loop(consumer):
    """Return a tracker that has read one marker, of a message that is not in progress."""
    loop = TrackerLoop(CONFIG, QueueMetrics(), lambda: False)
    loop._assigned(consumer, [TopicPartition("markers", 0)])
    loop._partitions[0].markers.read(4, (2, 1000), None, None, 0.0)
    return loop


def test_what_was_not_committed_is_committed_again(consumer, loop):
    """A commit whose failure is reported later is repeated, though no offset has moved; a good one is not."""
    error = KafkaError(KafkaError.REBALANCE_IN_PROGRESS)
    loop._commit_if_due(10_000.0)
    loop._note_commit(error, [TopicPartition("markers", 0, 5)])
    loop._commit_if_due(20_000.0)
    loop._note_commit(None, [TopicPartition("markers", 0, 5)])
    loop._commit_if_due(30_000.0)
    assert consumer.commits == [([(0, 5)], True)] * 2


def test_a_commit_that_fails_at_once_is_made_again(consumer, loop):
    """A commit that the client does not even send is repeated, too."""
    consumer.raising = KafkaException(KafkaError(KafkaError._STATE))
    loop._commit_if_due(10_000.0)
    loop._commit_if_due(20_000.0)
    assert len(consumer.commits) == 2


def test_an_old_failure_does_not_undo_a_later_commit(consumer, loop):
    """The failure of an old offset, or of a partition that is gone, repeats no commit."""
    loop._commit_if_due(10_000.0)
    old = [TopicPartition("markers", 0, 3), TopicPartition("markers", 7, 5)]
    loop._note_commit(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), old)
    loop._commit_if_due(20_000.0)
    assert len(consumer.commits) == 1


def test_a_tick_under_way_at_the_end_is_taken_back(loop, caplog):
    """A tick under way at the end is purged, as its report would keep the tracker; that does not count as an outage."""
    loop._ctx.ticks = ticks = Ticks()
    assert loop._partitions[0].send_tick(0.0)
    assert len(ticks) == 1
    loop.end()
    assert len(ticks) == 0
    assert "retrying" not in caplog.text


def test_slow_redelivery_does_not_put_off_reports(loop, monkeypatch):
    """Only the time of reporting itself stretches the pause between two reports, not what a turn did before."""
    reports = []
    monkeypatch.setattr(loop._ctx.metrics, "tracking", lambda *_, **__: reports.append(1))
    monkeypatch.setattr(tracker_loop, "now_ms", lambda: 14_000.0)
    loop._report_if_due(10_000.0)  # the turn began then
    loop._report_if_due(15_100.0)
    assert len(reports) == 2


class Marker:
    """A record of the marker topic that is no marker, or an error in its place."""

    _offsets = itertools.count(5)

    def __init__(self, error=None):
        self._error, self._offset = error, next(self._offsets)

    def error(self):
        return self._error

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def timestamp(self):
        return 2, 1000

    def key(self):
        return None

    value = key


REFUSED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


def test_what_may_not_be_read_is_told(loop):
    """A refusal before anything was read ends the tracker, with the right that is missing."""
    with pytest.raises(QueueError, match=r"cannot be read: .*; grant READ on topic 'markers'"):
        loop._read([Marker(REFUSED)])


def test_what_may_not_be_read_for_a_while_ends_nothing(loop, caplog):
    """A refusal after markers were read is an outage, told once and shown by health, until markers are read again."""
    loop._read([Marker()])
    for _ in range(3):
        loop._read([Marker(REFUSED)])
        loop._read([Marker(), Marker(REFUSED)])
    assert sum("grant READ on" in line for line in caplog.messages) == 1
    assert loop.outage.is_ongoing
    loop._ctx.ticks = Ticks()
    assert loop._partitions[0].attend(0.0)
    assert loop._ctx.ticks.reports  # perhaps there is nothing else to read
    loop._read([Marker()])
    assert not loop.outage.is_ongoing
    with pytest.raises(QueueError, match="cannot be read"):
        loop._read([Marker(KafkaError(KafkaError._FATAL, "fenced", fatal=True))])
