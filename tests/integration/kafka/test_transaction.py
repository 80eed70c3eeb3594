"""The transactional producer on a real broker: its ends, its leaks, and how soon it reports failures."""

import time
import weakref
from contextlib import suppress

import pytest
from confluent_kafka import KafkaError, KafkaException

from devstack.frame_proxy import Api, Match
from outbox_core.errors import InvalidConfig
from outbox_core.harvest.exactly_once import term
from outbox_core.harvest.exactly_once import terms as exactly_once
from outbox_core.harvest.failures import failed_transactions
from outbox_core.kafka import identity
from outbox_core.kafka.clients import TopicPartition, make_consumer
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.transactions import Aborted, Committed, Ended, TransactionalProducer
from tests.harvesting import Scene, wait_until
from tests.kafka_reader import read_topic
from tests.resources import held, reference_counts_only

pytestmark = pytest.mark.real_broker

_TERMS = 30


@pytest.fixture
def make(kafka_bootstrap, topic_name):
    """A factory of initialised producers, discarded afterwards."""
    made = []

    def make(*, bootstrap=kafka_bootstrap, name=None, timeout_seconds=20.0, **settings):
        settings = {"bootstrap.servers": bootstrap, "transactional.id": name or topic_name("tx"), **settings}
        producer = TransactionalProducer(
            {"transaction.timeout.ms": 15_000, **settings}, timeout_seconds=timeout_seconds
        )
        made.append(producer)
        assert producer.init() is None
        return producer

    yield make
    for producer in made:
        producer.discard()


def _values(bootstrap, topic):
    return [message.value for message in read_topic(bootstrap, topic)]


def test_transactions_follow_each_other(make, make_topic, kafka_bootstrap):
    """Committed records can be read, aborted ones cannot, and the producer serves several transactions."""
    topic, producer = make_topic(1), make()
    for number in range(4):
        assert producer.begin() is None
        assert producer.produce(topic, b"%d" % number, b"k", headers=[("h", b"v")])
        assert producer.all_arrive(10)
        outcome = producer.commit() if number % 2 else producer.abort()
        assert isinstance(outcome, Committed if number % 2 else Aborted)
    assert _values(kafka_bootstrap, topic) == [b"1", b"3"]


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
def test_an_end_that_may_have_been_sent_twice_bumps_the_epoch(kafka, make, make_topic, topic_name, commits):
    """After an end that was repeated the producer bumps its epoch, so the late copy is refused; a fast end does not."""
    topic, name = make_topic(1), topic_name("tx")
    with kafka.frame_proxied(2) as frames:
        quick = {"retry.backoff.ms": 1, "retry.backoff.max.ms": 2}
        producer = make(bootstrap=frames.bootstrap, name=name, **quick)
        trap = frames.hold(Match(Api.END_TXN, commits=commits, transactional_id=name))
        producer.begin()
        producer.produce(topic, b"1")
        assert producer.all_arrive(10)
        assert isinstance(producer.commit() if commits else producer.abort(), (Committed, Aborted))
        assert trap.wait_until_held(0)
        assert producer.must_replace
        assert producer.begin() is None
        assert not producer.must_replace
        producer.produce(topic, b"2")
        assert producer.all_arrive(10)
        trap.deliver()
        assert trap.wait_until_answered(10)
        assert trap.error_code != 0
        assert isinstance(producer.commit(), Committed)
        assert _values(kafka.bootstrap, topic) == ([b"1", b"2"] if commits else [b"2"])
        inits = frames.seen(Api.INIT_PRODUCER_ID)
        producer.begin()
        producer.produce(topic, b"3")
        producer.commit()
        producer.begin()
        assert frames.seen(Api.INIT_PRODUCER_ID) == inits


def test_offsets_that_may_have_been_sent_twice_bump_the_epoch(kafka, make, make_topic, topic_name):
    """After a slow TxnOffsetCommit, which may be repeated, the producer bumps its epoch."""
    slow = Match(_TXN_OFFSET_COMMIT)
    topic, group = make_topic(1), topic_name("group")
    with kafka.frame_proxied(2) as frames:
        producer = make(bootstrap=frames.bootstrap)
        consumer = make_consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
        metadata = consumer.consumer_group_metadata()
        for offset in (10, 20):
            producer.begin()
            producer.produce(topic, b"x")
            if offset == 10:
                frames.delay(slow, 0.6, times=1)
            began = time.monotonic()
            producer.send_offsets([TopicPartition(topic, 0, offset)], metadata, 10)
            if offset == 10:
                assert producer.must_replace
            elif time.monotonic() - began < 0.4:  # a busy machine may need longer for that, too
                assert not producer.must_replace
            assert isinstance(producer.commit(), Committed)
        assert consumer.committed([TopicPartition(topic, 0)], timeout=10)[0].offset == 20
        consumer.close()


_TXN_OFFSET_COMMIT = 28


@pytest.mark.parametrize("arrives", ["before the abort", "in the next transaction"])
def test_a_produce_whose_answer_was_lost_is_not_taken_for_a_later_one(kafka, make, make_topic, topic_name, arrives):
    """An aborted record that lost its connection is never read, and a later record does not get its sequence number."""
    topic, name = make_topic(1), topic_name("tx")
    with kafka.frame_proxied(2) as frames:
        # As in a cluster with another broker: the lost connection is not that of the coordinator.
        producer = make(bootstrap=frames.bootstrap, name=name, **{"metadata.recovery.strategy": "none"})
        first = frames.hold(Match(Api.PRODUCE, transactional_id=name))
        producer.begin()
        producer.produce(topic, b"aborted")
        assert first.wait_until_held(10)
        if arrives == "before the abort":
            first.deliver()
            assert first.wait_until_answered(10)
        assert isinstance(producer.abort(), Aborted)
        second = frames.hold(Match(Api.PRODUCE, transactional_id=name), reset=False)
        assert producer.begin() is None
        producer.produce(topic, b"later")
        assert second.wait_until_held(10)
        first.deliver()
        assert first.wait_until_answered(10)
        second.deliver()
        assert producer.all_arrive(10)
        assert isinstance(producer.commit(), Committed)
    assert _values(kafka.bootstrap, topic) == [b"later"]


@pytest.mark.parametrize("name", ["retries", "message.send.max.retries"])
def test_a_record_is_repeated_whatever_the_limit_of_repeats(kafka, make, make_topic, topic_name, name):
    """A record that has lost more connections than repeats are set is sent again: none is given up unreported."""
    topic, owner = make_topic(1), topic_name("tx")
    with kafka.frame_proxied(2) as frames:
        producer = make(bootstrap=frames.bootstrap, name=owner, **{name: 1})
        lost = [frames.hold(Match(Api.PRODUCE, transactional_id=owner)) for _ in range(2)]
        producer.begin()
        producer.produce(topic, b"1")
        assert producer.all_arrive(10)
        assert [trap.wait_until_held(0) for trap in lost] == [True, True]
        assert isinstance(producer.commit(), Committed)
    assert _values(kafka.bootstrap, topic) == [b"1"]


def test_a_transaction_that_has_failed_is_known_at_once(make, make_topic):
    """A batch that the broker refuses is reported at once, not at the delivery timeout."""
    topic, other, producer = make_topic(1, config={"max.message.bytes": "10000"}), make_topic(4), make()
    producer.begin()
    producer.produce(topic, b"x" * 50_000)
    with suppress(KafkaException):  # the refusal may be known before the last of them
        for number in range(200):
            producer.produce(other, b"%d" % number)
    began = time.monotonic()
    assert not producer.all_arrive(15)
    assert producer.failure.code() == KafkaError.MSG_SIZE_TOO_LARGE
    aborted = producer.abort(producer.failure)
    assert time.monotonic() - began < 3
    assert isinstance(aborted, Aborted)
    assert aborted.record_at_fault
    assert producer.begin() is None


def test_a_transaction_ended_by_others_ends_the_producer(make, make_topic, kafka, topic_name):
    """If the broker reports that the transaction is not open, its outcome is unknown, not 'aborted'."""
    topic, name = make_topic(1), topic_name("tx")
    with kafka.frame_proxied(2) as frames:
        producer = make(bootstrap=frames.bootstrap, name=name)
        copy = frames.duplicate(Match(Api.END_TXN, commits=True, transactional_id=name))
        producer.begin()
        producer.produce(topic, b"1")
        producer.commit()
        producer.begin()
        producer.produce(topic, b"2")
        assert producer.all_arrive(10)
        copy.deliver()
        assert copy.wait_until_answered(10)
        wait_until(lambda: len(_values(kafka.bootstrap, topic)) == 2, "the copy has committed it")
        producer.produce(topic, b"3")
        assert not producer.all_arrive(10)
        assert producer.failure.code() == KafkaError.INVALID_TXN_STATE
        assert isinstance(producer.abort(producer.failure), Ended)
        assert _values(kafka.bootstrap, topic) == [b"1", b"2"]


def test_batches_can_be_limited(make, make_topic, kafka_bootstrap):
    """A limit on batches applies from the next transaction on, so that a topic with a small limit takes them."""
    topic, producer = make_topic(1, config={"max.message.bytes": "20000"}), make(**{"linger.ms": 50})

    def publish():
        producer.begin()
        for _ in range(100):
            producer.produce(topic, b"x" * 1_000)
        return producer.commit() if producer.all_arrive(10) else producer.abort(producer.failure)

    assert isinstance(publish(), Aborted)
    producer.limit_batches(15_000)
    assert producer.must_replace
    assert isinstance(publish(), Committed)
    producer.limit_batches(15_000)
    assert not producer.must_replace
    assert len(_values(kafka_bootstrap, topic)) == 100


def test_a_commit_without_an_answer_ends(make, make_topic, kafka, topic_name):
    """A commit without an answer ends with an unknown outcome when the producer's time is over, and is not repeated."""
    topic, name = make_topic(1), topic_name("tx")
    with kafka.frame_proxied(2) as frames:
        producer = make(bootstrap=frames.bootstrap, name=name, timeout_seconds=1.0)
        frames.hold(Match(Api.END_TXN, transactional_id=name), reset=False)
        producer.begin()
        producer.produce(topic, b"1")
        outcome = producer.commit()
        assert isinstance(outcome, Ended)
        assert "outcome is unknown" in outcome.reason


def test_refusals_of_the_client_are_raised(make, make_topic):
    """A record that the client refuses raises an error, and the transaction can still commit."""
    topic, producer = make_topic(1), make()
    producer.begin()
    with pytest.raises(KafkaException, match="too large"):
        producer.produce(topic, b"x" * 2_000_000)
    producer.produce(topic, b"1")
    assert isinstance(producer.commit(), Committed)


def test_a_backoff_that_is_no_number_is_named():
    """A retry backoff that is not a number is an error that names it, before a producer is made."""
    settings = {"transactional.id": "t", "retry.backoff.ms": "soon"}
    with pytest.raises(InvalidConfig, match=r"retry\.backoff\.ms is 'soon'"):
        TransactionalProducer(settings, timeout_seconds=1.0)


# -- leaks


class NeverCommits(RecordProducer):
    """A producer whose commits all have an unknown outcome."""

    def commit(self, give_up):
        del give_up
        self.abort()
        return Ended("injected")


def test_ended_terms_leave_nothing_behind(database, kafka_bootstrap, make_topic, monkeypatch):
    """Terms that end one after the other leak no threads, descriptors or terms, without the garbage collector."""
    scene, terms = Scene(database, kafka_bootstrap), []
    scene.fill(make_topic(1), 5)

    class Counted(term.Term):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            terms.append(weakref.ref(self))

    monkeypatch.setattr(identity, "RecordProducer", NeverCommits)
    monkeypatch.setattr(exactly_once, "Term", Counted)
    monkeypatch.setattr(exactly_once, "_FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(exactly_once, "_LONGEST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(failed_transactions, "MOST_ENDS", 10**6)  # or the topic is tried again ever more rarely
    with reference_counts_only(), scene.running(config={"delivery": "exactly-once"}):
        wait_until(lambda: len(terms) > 5, "some terms")
        before = held()
        wait_until(lambda: len(terms) > 5 + _TERMS, "many terms", 120)
        after = held()
        alive = sum(reference() is not None for reference in terms)
    scene.close()
    assert alive <= 2
    assert after.threads <= before.threads + 12
    assert after.descriptors <= before.descriptors + 12
