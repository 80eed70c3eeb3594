"""The sizes of batches: as large as the topics in use take, as their settings say or their refusals show."""

from concurrent.futures import Future

import pytest

from outbox_core.kafka import batch_sizes
from outbox_core.kafka.batch_sizes import SMALLEST_BATCH_BYTES, BatchSizes
from outbox_core.kafka.clients import KafkaError, KafkaException
from outbox_core.stores.interface import StoredRecord


class Broker:
    """A broker that answers questions about topics on demand.

    Attributes:
        limits: by topic.
        asked: the questions, each a list of topics.
        time: of the clock.
    """

    def __init__(self):
        self.limits, self.asked, self.time = {}, [], 100.0
        self._open = {}

    def ask(self, topics):
        self.asked.append(sorted(topics))
        futures = {topic: Future() for topic in topics}
        self._open |= futures
        return futures

    def answer(self):
        for topic, future in self._open.items():
            if topic in self.limits:
                future.set_result(self.limits[topic])
            else:
                future.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
        self._open = {}


@pytest.fixture
def broker():
    """Return a broker that answers on demand."""
    return Broker()


@pytest.fixture
def sizes(broker):
    """Return the batch sizes that a harvester asks for there."""
    return BatchSizes(broker.ask, clock=lambda: broker.time)


def row(topic, size):
    """Return a stored record with a value of so many bytes."""
    return StoredRecord(1, topic, "k", b"v" * size, None, None, -1, 0)


def test_smallest_limit_of_the_topics_in_use(sizes, broker):
    """Batches are no larger than each topic in use takes; a limit above the default changes nothing."""
    broker.limits = {"large": 2**24, "small": 65_536, "smaller": 40_000}
    assert sizes.limit is None
    for topics, limit in (({"large"}, None), ({"large", "small"}, 65_536), ({"small", "smaller"}, 40_000)):
        sizes.meet(topics)
        assert sizes.are_awaited
        broker.answer()
        assert not sizes.are_awaited
        assert sizes.limit == limit
    assert broker.asked == [["large"], ["small"], ["smaller"]]


def test_limits_are_asked_for_again_and_forgotten_with_their_topics(sizes, broker):
    """A raised limit counts within a minute; a topic that is no longer used limits no batch."""
    broker.limits = {"small": 65_536, "other": 2**20}
    sizes.meet({"small"})
    broker.answer()
    broker.limits["small"] = 80_000
    broker.time += 61
    sizes.meet({"small"})
    assert not sizes.are_awaited, "there is an answer, if an old one"
    assert sizes.limit == 65_536
    broker.answer()
    assert sizes.limit == 80_000
    broker.time += 601
    sizes.meet({"other"})
    broker.answer()
    assert sizes.limit is None
    sizes.meet({"small"})
    assert sizes.limit == 80_000


def test_answer_that_does_not_come_is_not_waited_for(sizes, broker):
    """A broker that does not answer delays the first records for a topic by a second; a late answer counts."""
    broker.limits = {"small": 65_536}
    sizes.meet({"small"})
    assert sizes.await_seconds == pytest.approx(1.0)
    broker.time += 1.1
    assert not sizes.are_awaited
    assert sizes.limit is None
    broker.answer()
    assert sizes.limit == 65_536


def test_limit_is_learned_without_the_right_to_ask(sizes, broker):
    """Without the right to ask, each refused batch halves the next, down to a size that spares other topics."""
    sizes.meet({"secret"})
    broker.answer()
    learned = []
    for _ in range(8):
        sizes.refused({"secret"})
        learned.append(sizes.limit)
    assert learned[:3] == [500_000, 250_000, 125_000]
    assert learned[-1] == SMALLEST_BATCH_BYTES
    assert not sizes.too_large([row("secret", 10**6)]), "nobody knows"


def test_tiny_topics_do_not_slow_the_others(sizes, broker):
    """A topic with a limit below the bound does not make batches smaller than the bound."""
    broker.limits = {"tiny": 100}
    sizes.meet({"tiny"})
    broker.answer()
    assert sizes.limit == SMALLEST_BATCH_BYTES


def test_settings_of_the_producer_are_the_most(broker):
    """Batches are never larger than the user's settings."""
    sizes = BatchSizes(broker.ask, largest=30_000, clock=lambda: broker.time)
    broker.limits = {"small": 65_536, "smaller": 20_000}
    sizes.meet({"small"})
    broker.answer()
    assert sizes.limit is None
    sizes.meet({"smaller"})
    broker.answer()
    assert sizes.limit == 20_000


def test_records_that_cannot_arrive(sizes, broker):
    """Once a topic has refused a batch, records that exceed its limit alone are known to be too large."""
    broker.limits = {"small": 65_536, "other": 10}
    sizes.meet({"small", "other"})
    broker.answer()
    assert sizes.limit == SMALLEST_BATCH_BYTES
    rows = [row("small", 60_000), row("small", 70_000), row("other", 70_000), row("unknown", 70_000)]
    assert sizes.too_large(rows) == []
    sizes.refused({"small"})
    assert sizes.too_large(rows) == rows[1:2]
    broker.limits = {"small": 80_000, "other": 65_536}
    sizes.ask_anew({"small"})
    assert sizes.are_awaited
    assert sizes.too_large(rows) == [], "that is not known any more"
    broker.answer()
    assert not sizes.are_awaited
    assert sizes.too_large(rows) == []
    assert sizes.too_large([row("small", 90_000)])


def test_compression_leaves_it_open(broker):
    """With compression no record is known to be too large, as it may shrink."""
    sizes = BatchSizes(broker.ask, is_compressed=True, clock=lambda: broker.time)
    broker.limits = {"small": 1_000}
    sizes.meet({"small"})
    broker.answer()
    sizes.refused({"small"})
    assert sizes.too_large([row("small", 10**6)]) == []


def test_header_without_a_name_has_a_size(sizes, broker):
    """A row whose header has a name or value of NULL has a size, and is refused later."""
    broker.limits = {"small": 65_536}
    sizes.meet({"small"})
    broker.answer()
    sizes.refused({"small"})
    odd = StoredRecord(1, "other", None, None, [None, "name"], [None, b"v"], -1, 0)
    assert sizes.too_large([odd, odd._replace(topic="small", header_values=[b"v" * 70_000])])[0].topic == "small"


def test_memory_is_bounded(broker, monkeypatch):
    """Neither memory nor questions grow without bound if each row names another topic."""
    monkeypatch.setattr(batch_sizes, "_MOST_TOPICS", 100)
    sizes = BatchSizes(broker.ask, clock=lambda: broker.time)
    for number in range(20):
        broker.time += 1
        sizes.meet({f"t{number}-{n}" for n in range(40)} | {"kept"})
        assert len(sizes._topics) <= 100
        assert "kept" in sizes._topics
    assert sum(map(len, broker.asked)) <= batch_sizes._ASKED_AT_ONCE + 41
    broker.answer()
    sizes.meet({"no topic", "", "x" * 300})
    assert all("no topic" not in topics for topics in broker.asked)
