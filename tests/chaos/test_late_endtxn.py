"""A request that ends a transaction arrives late, while a later one is open: no record is lost or repeated.

A proxy takes an EndTxn off its connection and resets the client, which repeats it on another and goes on. The first
copy is delivered in the middle of the next transaction. Each scene is played by the product, by versions with one of
the two rules broken that defend against it, and by one without both, which must fail: so it was in 592f1f3. With
one rule broken no record is lost, and in these scenes none is repeated either; where the late copy comes before the
opening is written the opening rule alone would repeat (docs/explanation-exactly-once.md).
"""

import pytest
from confluent_kafka import KafkaError

from devstack.frame_proxy import Api, Match
from outbox_core.kafka.identity import Failpoint
from outbox_core.kafka.record_producer import RecordProducer
from tests.chaos import breaches
from tests.chaos.worker import BREACHES
from tests.harvesting import GENEROUS_SECONDS, Scene, identity_of

pytestmark = pytest.mark.real_broker

_BATCH = 10
_LIMITS = {"mark_query_records": _BATCH, "io_error_backoff": "20ms", "transaction_timeout": "10s"}
_WAIT_SECONDS = 15

VERSIONS = {
    "product": [],
    "without-epoch-rule": BREACHES["rule-7"],
    "without-opening-rule": BREACHES["rule-8"],
    "without-both": BREACHES["rules-7-and-8"],
}


class Crash(BaseException):
    """An error that ends the harvest thread where it stands."""


class Stage(Scene):
    """An outbox whose harvesters reach Kafka through a proxy, with a late request during its second transaction.

    Attributes:
        trap: holds the first copy of the first transaction's EndTxn.
        crashes: whether the harvester dies once the late one has arrived.
    """

    def __init__(self, database, bootstrap, frames, topic):
        super().__init__(database, bootstrap)
        self.frames = frames
        self.topic = topic
        self.trap = None
        self.crashes = False

    def options(self, **more):
        settings = {"delivery": "exactly-once", "base_kafka_config": {"bootstrap.servers": self.frames.bootstrap}}
        return {"config": settings, "limits": _LIMITS, **more}

    def hold_end(self, *, commits):
        """Take the next EndTxn of this kind off its connection."""
        name = self.harvesters[0]._transactions.transactional_id
        self.trap = self.frames.hold(Match(Api.END_TXN, commits=commits, transactional_id=name))

    def arrives_late(self, count):
        """Let the first copy arrive once the topic has so many records, those of open transactions included."""
        self.read(self.topic, count=count, isolation="read_uncommitted", timeout=_WAIT_SECONDS)
        assert self.trap.wait_until_held(_WAIT_SECONDS), "no EndTxn was held"
        self.trap.deliver()
        assert self.trap.wait_until_answered(_WAIT_SECONDS)
        if self.trap.request.commits and self.trap.error_code == 0:
            self.read(self.topic, count=count, timeout=_WAIT_SECONDS)  # until its marker is written
        if self.crashes:
            raise Crash

    def outcome(self):
        """Return the rows that readers miss, and those that they see twice."""
        ids = [identity_of(message) for message in self.read(self.topic)]
        return {
            "lost": set(range(1, 2 * _BATCH + 1)) - set(ids),
            "repeated": {one for one in ids if ids.count(one) > 1},
        }


@pytest.fixture
def stage(database, kafka, make_topic):
    """Yield an outbox with twenty rows for a topic of one partition: two transactions."""
    with kafka.frame_proxied(2) as frames:
        stage = Stage(database, kafka.bootstrap, frames, make_topic(1))
        stage.fill(stage.topic, 2 * _BATCH, keys=3)
        yield stage
        stage.close()


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    """Put the product, or one of its broken versions, in place."""
    for module, attribute, replacement in VERSIONS[request.param]:
        monkeypatch.setattr(f"{module}.{attribute}", getattr(breaches, replacement))
    return request.param


def _assert_once(stage, version):
    outcome = stage.outcome()
    if version == "without-both":
        assert any(outcome.values()), "the late EndTxn did no harm: this test cannot fail"
    else:
        assert not any(outcome.values()), outcome
        assert stage.count() == 0
    refused = stage.trap.error_code != 0
    assert refused is (version in ("product", "without-opening-rule")), "an old epoch is refused, and ours is not"


def test_late_abort_in_the_middle_of_the_next_transaction(stage, version, monkeypatch):
    """A late abort that ends the second transaction loses none of its records: its manifest does not stand alone."""
    commit = RecordProducer.commit
    calls = []

    def fails_once(producer, *arguments):
        calls.append(producer)
        if len(calls) == 1:
            stage.read(stage.topic, count=_BATCH, isolation="read_uncommitted")  # an abort purges unsent records
            stage.hold_end(commits=False)
            return producer.abort(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS, "injected"))
        return commit(producer, *arguments)

    monkeypatch.setattr(RecordProducer, "commit", fails_once)

    def reached(step):
        if step is Failpoint.AFTER_PRODUCE and stage.trap is not None and not stage.trap.answer:
            stage.arrives_late(2 * _BATCH)

    stage.drain(reached=reached, **stage.options())
    _assert_once(stage, version)


def test_late_commit_in_the_middle_of_the_next_transaction(stage, version, monkeypatch):
    """A late commit of half of the second transaction, whose other half is refused, repeats and loses no record."""
    produce = RecordProducer._produce

    def hold_first(step):
        if step is Failpoint.AFTER_PRODUCE and stage.trap is None:
            stage.hold_end(commits=True)

    def stops_halfway(producer, record, *arguments):
        if record[0] == _BATCH + _BATCH // 2 and not stage.trap.answer:
            stage.arrives_late(_BATCH + _BATCH // 2 - 1)
        return produce(producer, record, *arguments)

    monkeypatch.setattr(RecordProducer, "_produce", stops_halfway)
    stage.drain(reached=hold_first, **stage.options())
    _assert_once(stage, version)


def test_late_commit_and_a_crash(stage, version):
    """A late commit of the second transaction before its manifest, and a crash, repeat and lose no record."""
    stage.crashes = True

    def reached(step):
        if step is Failpoint.AFTER_PRODUCE:
            if stage.trap is None:
                stage.hold_end(commits=True)
            elif not stage.trap.answer:
                stage.arrives_late(2 * _BATCH)

    harvester = stage.harvester(reached=reached, **stage.options())
    harvester.start()
    with pytest.raises(Crash):
        harvester.join(GENEROUS_SECONDS)
    stage.drain(**stage.options())
    _assert_once(stage, version)
