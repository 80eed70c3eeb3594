"""The redelivery of a partition's messages: what is in a transaction, and when the rest has to be judged again."""

from dataclasses import replace

import pytest
from confluent_kafka import KafkaError

from outbox_core.kafka.transactions import Aborted, Committed, Ended
from outbox_queue import QueueConfig
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol import transaction
from outbox_queue.protocol.headers import ATTEMPT, ID
from outbox_queue.redelivery.in_progress import Unfinished
from outbox_queue.redelivery.redeliverer import REDELIVERED, Redeliverer

CONFIG = QueueConfig(bootstrap_servers="nowhere:1", max_attempts=3)
PARTITION = 5
TOO_LARGE = Aborted(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), record_at_fault=True)


class Producer:
    """A transactional producer.

    Attributes:
        must_replace: whether its next transaction would begin in another epoch; so after each commit if `tires`.
        outcomes: of the next commits; then they succeed.
        batches: the records of each committed transaction, as (topic, key, partition, value).
        headers: those of each record.
    """

    def __init__(self):
        self.must_replace = self.tires = self.is_discarded = False
        self.outcomes, self.batches, self._records, self.headers = [], [], [], []

    def init(self, _):
        return None

    def begin(self):
        assert not self.must_replace, "another tracker would be fenced by what it has decided before"
        self._records = []

    def produce(self, topic, value, key=None, partition=-1, headers=None):
        self.headers.append(headers)
        self._records.append((topic, key, partition, value))

    def commit(self, _):
        outcome = self.outcomes.pop(0) if self.outcomes else Committed()
        if isinstance(outcome, Committed):
            self.batches.append(self._records)
        self.must_replace = self.tires
        return outcome

    def discard(self):
        self.is_discarded = True


@pytest.fixture
def producer(monkeypatch):
    """Return the producer of redeliveries."""
    made = Producer()
    monkeypatch.setattr(transaction, "transactional_producer", lambda _: made)
    return made


@pytest.fixture
def redeliverer(producer):
    """Return a redeliverer that is prepared."""
    del producer
    made = Redeliverer(CONFIG, PARTITION)
    assert made.prepare(lambda: False) is None
    return made


def expired(offset, *, attempt=1):
    """Return an expired message."""
    marker = wire.Marker(version=wire.VERSION_1, type=wire.START, key=b"q", value=b"payload", attempt=attempt)
    return Unfinished((0, offset), b"q", offset, 0.0, 0.0, (b"key", marker.SerializeToString()))


def topics(batch):
    """Return the topics of a batch's records."""
    return [record[0] for record in batch]


def test_a_copy_and_the_end_of_the_old_one_are_one_transaction(redeliverer, producer):
    """The end marker goes to the partition of the start marker, whatever key that has."""
    one = expired(7)
    assert redeliverer.redeliver([one]).done == [one]
    (batch,) = producer.batches
    assert topics(batch) == [CONFIG.message_topic, CONFIG.marker_topic]
    _, key, partition, value = batch[1]
    end = wire.Marker.FromString(value)
    assert (key, partition) == (b"key", PARTITION)
    assert (end.type, end.message_id.offset, end.reason) == (wire.END, 7, REDELIVERED)


def test_a_copy_of_a_copy_tells_where_the_first_one_was(redeliverer, producer):
    """Consumers know a message by the place of its first copy, and count its attempts on."""
    one = expired(7, attempt=2)
    marker = wire.Marker.FromString(one.start[1])
    marker.origin.partition, marker.origin.offset = 1, 4
    redeliverer.redeliver([one, replace(one, message_id=(0, 8), start=(b"key", marker.SerializeToString()))])
    assert [dict(headers) for headers in producer.headers[::2]] == [
        {ID: b"0-7", ATTEMPT: b"3"},
        {ID: b"1-4", ATTEMPT: b"3"},
    ]


def test_the_rest_waits_for_another_producer(redeliverer, producer):
    """A new producer fences other trackers: what they had committed is read before anything else is redelivered."""
    producer.tires = True
    redeliverer._limit = 1
    one, two = expired(1), expired(2)
    result = redeliverer.redeliver([one, two])
    assert (result.done, result.left, result.failure) == ([one], [two], None)
    assert not redeliverer.is_prepared


def test_a_producer_that_is_over_is_discarded(redeliverer, producer):
    """After an unknown outcome all of it is judged again, by what a new producer has settled."""
    producer.outcomes = [Ended("fenced")]
    one = expired(1)
    result = redeliverer.redeliver([one])
    assert (result.done, result.left, result.failure.reason) == ([], [one], "fenced")
    assert producer.is_discarded
    assert not redeliverer.is_prepared


def test_attempts_that_are_used_up_make_a_dead_letter(redeliverer, producer):
    """The last keep-alive's attempt counts, not the start marker's: one that no handler got costs none."""
    behind = expired(2, attempt=3)
    behind.attempt = 2
    result = redeliverer.redeliver([expired(1, attempt=3), behind])
    assert topics(producer.batches[0])[::2] == [CONFIG.dead_letters, CONFIG.message_topic]
    assert (result.dead[b"q"], result.copies[b"q"]) == (1, 1)


def test_a_refused_record_is_found_and_becomes_a_dead_letter_without_headers(redeliverer, producer):
    """The batch is halved until the refused message is alone; the others are sent, and each is counted once."""
    producer.outcomes = [TOO_LARGE, TOO_LARGE]
    one, two = expired(1), expired(2)
    result = redeliverer.redeliver([one, two])
    assert result.done == [one, two]
    assert [topics(batch)[0] for batch in producer.batches] == [CONFIG.dead_letters, CONFIG.message_topic]
    assert (result.dead[b"q"], result.copies[b"q"]) == (1, 1)
    producer.outcomes = [TOO_LARGE, TOO_LARGE]
    assert redeliverer.redeliver([one]).refused == [one]
