"""Records with a header name that is not UTF-8, which any producer may write, on a real broker."""

import pytest

from outbox_core.consuming import Consumed, consume
from outbox_core.errors import InvalidMessageId
from outbox_core.kafka.messages import UnreadableHeaders, headers_of
from outbox_queue import QueueService
from outbox_queue.dead_letters.store import DeadLetters
from tests.integration.consuming.consuming_fixtures import place
from tests.kafka_reader import read_topic
from tests.queueing import queue_config
from tests.raw_records import NOT_UTF8, produce_raw

__all__ = ["place"]

pytestmark = pytest.mark.real_broker


def _record_effect(connection, message):
    connection.execute("INSERT INTO effect (value) VALUES (%s)", [message.value().decode()])


def test_headers_are_asked_for_as_often_as_one_likes(place):
    """`headers_of` reports such headers as unreadable, and leaves a record whose `headers()` does not crash.

    Also after many others: CPython specialises hot calls, and then does not see the exception.
    """
    place.send(*[("good", "o:1")] * 100)
    produce_raw(place.bootstrap, place.topic, b"bad", headers=[(b"outbox-id", b"o:1"), (NOT_UTF8, b"x")])
    consumer = place.consumer()
    messages = [consumer.poll(30) for _ in range(101)]
    headers = [headers_of(message) for message in messages]
    assert headers[:100] == [[("outbox-id", b"o:1")]] * 100
    bad = messages[-1]
    for _ in range(3):
        assert isinstance(headers_of(bad), UnreadableHeaders)
        assert not list(bad.headers())
    assert (bad.offset(), bad.value()) == (100, b"bad")


def test_consume_does_not_go_past_it(place):
    """Such a record ends `consume` with its place, and the next call too; without an id header it is handled."""
    place.send(("before", "o:1"))
    produce_raw(place.bootstrap, place.topic, b"bad", headers=[(b"outbox-id", b"o:2"), (NOT_UTF8, b"x")])
    place.send(("after", "o:3"))
    consumer = place.consumer()
    for _ in range(2):
        with pytest.raises(InvalidMessageId, match=rf"{place.topic}\[0\] at offset 1: .* not UTF-8"):
            consume(consumer, _record_effect, place.transaction, max_records=10)
        assert place.committed(consumer) == 1
    assert place.effects() == ["before"]
    assert consume(consumer, _record_effect, place.transaction, id_header="", max_records=1) == Consumed(1, 0)
    assert consume(consumer, _record_effect, place.transaction, max_records=1) == Consumed(1, 0)
    assert place.effects() == ["before", "bad", "after"]


@pytest.mark.parametrize("transactional", [False, True])
def test_a_queue_sets_it_aside(kafka_bootstrap, make_topic, transactional):
    """A queue makes such a record a dead letter with a reason, and goes on with the messages around it."""
    config = queue_config(kafka_bootstrap, make_topic, transactional=transactional)
    queue = QueueService(config).queue("jobs")
    for value, name in ((b"first", b"h"), (b"bad", NOT_UTF8), (b"last", b"h")):
        produce_raw(kafka_bootstrap, config.message_topic, value, key=b"jobs", headers=[(name, b"1")])
    with queue.consumer() as consumer:
        received = [consumer.receive(30) for _ in range(2)]
        assert [message.payload for message in received] == [b"first", b"last"]
        for message in received:
            message.ack()
    (letter,) = DeadLetters(config).all("jobs")
    assert (letter.payload, letter.id, letter.attempts, letter.headers) == (b"bad", "0-1", 0, ())
    assert "header name that is not UTF-8" in letter.reason


def test_commands_of_queues_show_it(kafka_bootstrap, make_topic):
    """Such a record in the dead letter topic is listed, and can be sent again."""
    config = queue_config(kafka_bootstrap, make_topic)
    topic = config.dead_letters
    produce_raw(kafka_bootstrap, topic, b"payload", key=b"jobs/0-7", headers=[(NOT_UTF8, b"x")])
    produce_raw(kafka_bootstrap, topic, b"no place", key=b"nonsense", headers=[(b"kmq-dead-at", b"9" * 5000)])
    letters = DeadLetters(config)
    by_payload = {letter.payload: letter for letter in letters.all()}
    assert "header name that is not UTF-8" in by_payload[b"payload"].reason
    assert by_payload[b"no place"].dead_at_ms is None
    assert len(letters.requeue(lambda letter: letter.payload == b"payload")) == 1
    assert len(letters.requeue(lambda _: True)) == 1
    assert letters.all() == []
    assert {record.value for record in read_topic(kafka_bootstrap, config.message_topic)} == {b"payload", b"no place"}
