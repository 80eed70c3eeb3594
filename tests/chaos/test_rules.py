"""Tests of the tests: each rule of exactly-once delivery, when it is broken, makes the checker find something.

Every scene is played twice: by the product, without any finding, and by a version with one rule broken
(`tests.chaos.breaches`), with the very finding that the rule prevents. Hooks hold the harvester, its rival or the
database at the moment that matters, so that luck plays no part.
"""

import threading

import pytest

from outbox_core.harvest import recovery
from outbox_core.harvest.exactly_once import term
from outbox_core.harvest.exactly_once import terms as exactly_once
from outbox_core.kafka import identity, tracking
from outbox_core.kafka.clients import make_producer
from outbox_core.kafka.identity import Failpoint
from outbox_core.stores.postgres.store import PostgresStore
from tests.chaos import breaches
from tests.chaos.checker import Arrival, Checker
from tests.harvesting import GENEROUS_SECONDS, Scene, identity_of, wait_until
from tests.kafka_reader import read_topic

pytestmark = pytest.mark.real_broker

_EXACTLY_ONCE = {"delivery": "exactly-once"}
_BATCH = 20
_LIMITS = {"transaction_timeout": "2s", "mark_query_records": _BATCH, "io_error_backoff": "20ms"}
_KEYS = 4
REPEATED = {"repeated (adjacent)", "repeated (distant)"}


class Crash(BaseException):
    """An error that ends the harvest thread where it stands."""


class Stage(Scene):
    """A scene with one topic, whose records are numbered by key as the checker wants it."""

    def __init__(self, database, bootstrap, topic):
        super().__init__(database, bootstrap)
        self.topic = topic
        self.committed = {}

    def write(self, rounds, *, keys="k"):
        """Commit `rounds` records of each of four keys."""
        for key in range(_KEYS):
            self.committed[self.topic, f"{keys}{key}"] = range(1, rounds + 1)
        self.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
            "SELECT %s, %s || lane, round::text::bytea "
            "FROM generate_series(1, %s) AS rounds (round), generate_series(0, %s) AS lanes (lane) "
            "ORDER BY rounds.round, lanes.lane",
            [self.topic, keys, rounds, _KEYS - 1],
        )

    def crash(self, **options):
        """Run a harvester until its hook crashes it."""
        harvester = self.harvester(config=_EXACTLY_ONCE, limits=_LIMITS, **options)
        harvester.start()
        with pytest.raises(Crash):
            harvester.join(GENEROUS_SECONDS)

    def publish_rest(self, **options):
        """Run a harvester until the table is empty."""
        self.drain(config=_EXACTLY_ONCE, limits=_LIMITS, **options)

    def findings(self):
        """Return the kinds of violations that a reader meets."""
        checker = Checker()
        for message in self.read(self.topic):
            key = message.key.decode()
            place = message.partition, message.offset
            checker.see(Arrival(self.topic, key, int(message.value), identity_of(message), *place, 0.0))
        checker.finish(self.committed)
        return {violation.kind for violation in checker.violations}


@pytest.fixture
def stage(database, kafka_bootstrap, make_topic):
    """Yield an outbox with its topic, for the harvesters of a test."""
    stage = Stage(database, kafka_bootstrap, make_topic())
    yield stage
    stage.close()


def crash_at(step, times=1):
    """Return a hook that crashes its harvester when it reaches a step for the n-th time."""
    left = {step: times}

    def reached(at):
        left[at] = left.get(at, 0) - 1
        if left[at] == 0:
            raise Crash(at.value)

    return reached


@pytest.mark.parametrize(
    ("version", "found"),
    [
        (breaches.ForcedOverlap, set()),
        (breaches.ScansWhatIsInFlight, REPEATED),
        (breaches.ExcludesAfterTheScan, REPEATED),
    ],
)
def test_exclusion_is_copied_before_the_scan(stage, monkeypatch, version, found):
    """A scan that excludes other ids than those in flight when it was sent publishes rows again."""
    monkeypatch.setattr(exactly_once, "Term", version)
    stage.write(30)
    with stage.running(config=_EXACTLY_ONCE, limits=_LIMITS):
        wait_until(lambda: stage.count() == 0, "everything is published")
    assert bool(stage.findings() & REPEATED) == bool(found)
    assert not stage.findings() - REPEATED


@pytest.mark.parametrize(("version", "found"), [(term.Term, set()), (breaches.KeepsScannedRows, {"reordered"})])
def test_abort_throws_scanned_rows_away(stage, monkeypatch, version, found):
    """Rows scanned behind an aborted batch must not be published before it."""
    monkeypatch.setattr(exactly_once, "Term", version)
    monkeypatch.setattr(identity, "RecordProducer", breaches.FailsOnce)
    monkeypatch.setattr(breaches.FailsOnce, "failed", False)
    stage.write(15)
    stage.publish_rest()
    assert breaches.FailsOnce.failed
    assert stage.findings() == found


@pytest.mark.parametrize(("store", "found"), [(PostgresStore, set()), (breaches.MatchesIdsAlone, {"lost"})])
def test_manifest_matches_create_times(stage, store, found):
    """Rows whose ids came back after TRUNCATE ... RESTART IDENTITY are not deleted unpublished."""
    stage.write(5)
    stage.crash(reached=crash_at(Failpoint.BEFORE_PURGE))
    stage.execute("TRUNCATE outbox RESTART IDENTITY")
    stage.write(5, keys="new")
    stage.publish_rest(store_factory=lambda: store(stage.database, "outbox"))
    assert stage.findings() == found


@pytest.mark.parametrize(("version", "found"), [(recovery.Recovery, set()), (breaches.ReadsManifestFirst, REPEATED)])
def test_manifest_is_read_behind_the_fence(stage, monkeypatch, version, found):
    """A manifest read before `init_transactions()` misses rows that the predecessor can still commit."""
    stage.write(5)
    commits, goes_on = breaches.Gate(), breaches.Gate()

    def held(step):
        """Hold the predecessor before its manifest; let it die after its commit, or when its next term begins."""
        if step is Failpoint.AFTER_PRODUCE:
            commits.open()
            goes_on.wait()
        elif step is Failpoint.COMMITTED or (step is Failpoint.AFTER_INIT and goes_on.is_open):
            raise Crash(step.value)

    predecessor = stage.harvester(config=_EXACTLY_ONCE, limits=_LIMITS, reached=held)
    predecessor.start()
    commits.wait()
    read = identity.read_ledger

    def read_and_let_go(*arguments, **more):
        ledger = read(*arguments, **more)
        goes_on.open()
        with pytest.raises(Crash):
            predecessor.join(GENEROUS_SECONDS)
        return ledger

    monkeypatch.setattr(identity, "read_ledger", read_and_let_go)
    monkeypatch.setattr(term, "Recovery", version)
    stage.publish_rest()
    assert bool(stage.findings()) == bool(found)
    assert stage.findings() <= REPEATED


@pytest.mark.parametrize(("version", "found"), [(term.Term, set()), (breaches.CommitsBeforePurge, REPEATED)])
def test_purge_is_committed_before_the_next_commit(stage, monkeypatch, version, found):
    """Until the first batch is deleted the second is not committed, as its manifest would hide the first."""
    monkeypatch.setattr(exactly_once, "Term", version)
    stage.write(15)
    second, abort = crash_at(Failpoint.COMMITTED, 2), identity.RecordProducer.abort

    def crash(producer, *arguments, **more):
        if stage.read(stage.topic):  # else it is the barrier's
            raise Crash("the second batch is given up")
        return abort(producer, *arguments, **more)

    monkeypatch.setattr(identity.RecordProducer, "abort", crash)
    stage.crash(reached=second, store_factory=lambda: breaches.NeverPurges(stage.database, "outbox"))
    monkeypatch.setattr(identity.RecordProducer, "abort", abort)
    monkeypatch.setattr(exactly_once, "Term", term.Term)
    stage.publish_rest()
    assert bool(stage.findings()) == bool(found)
    assert stage.findings() <= REPEATED


@pytest.mark.parametrize("version", [tracking.LedgerReader, breaches.ReadsToStableOffset])
def test_open_transaction_in_the_tracking_topic_is_waited_for(stage, monkeypatch, topic_name, caplog, version):
    """An open transaction in the tracking topic hides the manifest: its end must be awaited, not taken for the topic's.

    A reader that does not wait takes the batch for torn. The rows that it reads back are then not repeated.
    """
    names = {"tracking_topic": topic_name("tracking")}
    config = _EXACTLY_ONCE | names
    stranger = make_producer({"bootstrap.servers": stage.bootstrap, "transactional.id": topic_name("stranger")})
    stranger.init_transactions(30)

    def intrude(step):
        """Open the stranger's transaction just before the manifest, and die once that is committed."""
        if step is Failpoint.AFTER_PRODUCE:
            # The barrier and the opening come first, else the stranger would hide the opening too.
            read_topic(stage.bootstrap, names["tracking_topic"], count=2, isolation="read_uncommitted")
            stranger.begin_transaction()
            stranger.produce(names["tracking_topic"], b"not a manifest", "stranger", 0)
            stranger.flush(30)
        elif step is Failpoint.COMMITTED:
            raise Crash(step.value)

    stage.write(5)
    crashed = stage.harvester(config=config, limits=_LIMITS, reached=intrude)
    crashed.start()
    with pytest.raises(Crash):
        crashed.join(GENEROUS_SECONDS)
    monkeypatch.setattr(tracking, "LedgerReader", version)
    is_misled = version is breaches.ReadsToStableOffset
    if is_misled:
        stage.drain(config=config, limits=_LIMITS)
        stranger.abort_transaction(30)
    else:  # it waits for the stranger
        leaving = threading.Timer(1.5, stranger.abort_transaction)
        leaving.start()
        stage.drain(config=config, limits=_LIMITS)
        leaving.join()
    assert ("was committed in part" in caplog.text) == is_misled
    assert not stage.findings()


@pytest.mark.parametrize(
    ("version", "arrives", "found"),
    [
        (breaches.TimesOutOnce, True, set()),
        (breaches.TimesOutOnce, False, set()),
        (breaches.TrustsTimeout, True, REPEATED),
        (breaches.TrustsCommit, False, {"lost"}),
    ],
)
def test_commit_that_timed_out_is_settled_by_the_next_term(stage, monkeypatch, version, arrives, found):
    """A commit that timed out counts as neither arrived nor failed: either assumption repeats or loses the batch."""
    breaches.TimesOutOnce.again(arrives=arrives)
    monkeypatch.setattr(identity, "RecordProducer", version)
    stage.write(5)
    stage.publish_rest()
    stage.publish_rest()  # ends any open transaction
    assert breaches.TimesOutOnce.timed_out
    assert bool(stage.findings()) == bool(found)
    assert stage.findings() <= found
