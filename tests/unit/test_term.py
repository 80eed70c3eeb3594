"""Terms of exactly-once delivery: when a drain is over, and that nothing keeps ordinary records waiting."""

import logging
import time
from functools import partial
from itertools import pairwise

import pytest

from outbox_core.errors import TrackingTopicError
from outbox_core.harvest import culprits, exactly_once, holding, letters
from outbox_core.harvest.culprits import Culprits
from outbox_core.harvest.parking import Parking
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.rights import Rights
from outbox_core.harvest.transaction import Aborted, Committed, Ended
from outbox_core.harvest.waiting import Waiting
from outbox_core.kafka import KafkaError
from outbox_core.ports import NewHold
from tests.harvesting import wait_until
from tests.unit.term_world import LETTERS, POISON, TRACKING, Producer, World


def paused(topic, key=None):
    """A hold of a topic, or of a key."""
    return NewHold(topic, key, None, "paused", "")


@pytest.fixture
def world(monkeypatch):
    """A leadership whose dead letters do not rest for long."""
    monkeypatch.setattr(letters, "RETRY_SECONDS", 0.05)
    return World(monkeypatch)


# -- drained


def test_drain_outlasts_a_scan_that_failed(world):
    """A scan that failed says nothing about what is left, also while something is held."""
    held = world.table.add("paused")
    world.table.held.append(paused("paused"))
    world.table.add("t", 25)
    world.table.failing_scans = 2
    world.run()
    assert world.delivery.drained
    assert world.table.left() == [held]


def test_drain_outlasts_a_batch_that_is_all_held(world, monkeypatch):
    """A scan under way when its topic was paused brings nothing that may be published; there may be more behind it."""
    monkeypatch.setattr(holding, "READ_EVERY_SECONDS", 0.0)
    held = world.table.add("other")
    world.table.held.append(paused("other"))
    world.table.add("paused", 10)
    world.table.add("t", 10)

    def pause():
        if len(world.table.held) == 1:
            world.table.held.append(paused("paused"))

    world.table.during_scan = pause
    world.run()
    assert world.delivery.drained
    assert len(world.cluster.published["t"]) == 10
    assert world.table.left() == list(range(held, held + 11))


def test_drain_outlasts_a_hot_key_whose_record_is_refused(monkeypatch):
    """The batch that was read meanwhile is all of the key that is held now; the rest of the table is not."""
    world = World(monkeypatch, on_poison=False)
    world.table.held.append(paused("elsewhere"))
    world.table.add("t", 9)
    world.table.add("t", key="hot", value=POISON)
    world.table.add("t", 10, key="hot")
    world.table.add("t", 10)
    world.run()
    assert world.delivery.drained
    assert world.table.left() == list(range(10, 21))
    assert len(world.cluster.published["t"]) == 19


def test_drain_outlasts_a_release_during_its_last_scan(world, monkeypatch):
    """What is let go of while a scan leaves it out is left: the next scan brings it."""
    monkeypatch.setattr(holding, "READ_EVERY_SECONDS", 0.0)
    held = world.table.add("t", key="a")
    world.table.add("t", key="b")
    world.table.held += [paused("t", "a"), paused("t", "b")]

    def release():
        world.table.held = [paused("t", "a")]

    world.table.during_scan = release
    world.run()
    assert world.delivery.drained
    assert world.table.left() == [held]


def test_leadership_that_ends_has_drained_nothing(world):
    """Whether all is held could not be asked any more: whoever leads next finds out."""
    world.table.add("paused")
    world.table.held.append(paused("paused"))
    world.table.during_scan = world.delivery.stop
    world.run()
    assert not world.delivery.drained


# -- dead letters


def test_dead_letters_that_may_not_be_written_stay_held(world):
    """They keep nobody waiting, say why they are held, and do not keep a drain from ending."""
    for _ in range(3):
        world.table.request(world.table.add("bad"))
    world.table.add("t", 25)
    world.cluster.forbidden = {LETTERS}
    world.run()
    assert world.delivery.drained
    assert len(world.cluster.published["t"]) == 25
    assert world.table.left() == [1, 2, 3]
    assert set(world.table.kept) == {1, 2, 3}
    assert all("dead-letter topic refused it" in error for error in world.table.kept.values())
    assert all(error.endswith("; grant WRITE on it to User:relay") for error in world.table.kept.values())


def test_dead_letters_that_end_every_term_keep_nobody_waiting(world, monkeypatch):
    """However their transactions end, they rest longer than the terms: ordinary records come first then."""
    monkeypatch.setattr(letters, "RETRY_SECONDS", 60.0)
    world.table.request(world.table.add("bad"))
    world.table.add("t", 25)
    world.cluster.forbidden, world.cluster.tells = {LETTERS}, False
    with world.running():
        wait_until(lambda: len(world.cluster.published.get("t", ())) == 25, "ordinary records are published")
    assert world.cluster.transactions.count({LETTERS}) == 1
    assert not world.table.kept


def test_dead_letters_take_turns_with_ordinary_records(world):
    """Thousands of them are not buried in a row while there is other work."""
    world.delivery.letters._at_once = 1
    for _ in range(150):
        world.table.request(world.table.add("bad"))
    world.table.add("t", 100)
    world.run()
    assert len(world.cluster.published[LETTERS]) == 150
    assert world.cluster.transactions[:6] == [{LETTERS}, {"t"}] * 3


def test_dead_letter_topic_that_is_deleted_is_made_anew(world):
    """A topic that was there, and is not any more, is made again before the next try."""
    with world.running():
        world.table.add("t", value=POISON)
        wait_until(lambda: world.cluster.published.get(LETTERS) == [1], "the first is buried")
        world.cluster.missing = {LETTERS}
        world.table.add("t", value=POISON)
        wait_until(lambda: world.cluster.published.get(LETTERS) == [1, 2], "the second, too")
    assert world.ensured == 2


def test_dead_letters_that_do_not_arrive_are_tried_ever_more_rarely(world, monkeypatch):
    """Each rest is twice as long as the last, whatever ends the transactions; after a success all is forgotten."""
    time = 1000.0
    monkeypatch.setattr(letters, "now", lambda: time)
    subject, letter = world.delivery.letters, world.table.rows[world.table.add("bad")]
    assert subject.patience is None
    for rest in (0.05, 0.1, 0.2, 0.4):
        subject.concluded([letter], [], Ended("broken"))
        assert subject.due_in({1: "boo"}) == pytest.approx(rest)
    for _ in range(20):
        subject.concluded([letter], [], Aborted(KafkaError(KafkaError._MSG_TIMED_OUT), record_at_fault=True))
    assert subject.due_in({1: "boo"}) == pytest.approx(10)
    assert subject.patience == pytest.approx(1)
    subject.concluded([letter], [], Committed())
    assert subject.patience is None
    world.close()


def test_dead_letters_that_wait_are_told_of_once_and_then_now_and_then(world, caplog):
    """When it begins, again every minute, and when it ends: one arrives, or none is asked for any more."""
    caplog.set_level(logging.INFO)
    world.close()
    subject, letter = world.delivery.letters, world.table.rows[world.table.add("bad")]
    for _ in range(5):
        subject.concluded([letter], [], Ended("broken"))
    subject._trouble._told_at -= 60
    for _ in range(5):
        subject.concluded([letter], [], Ended("still broken"))
    subject.concluded([letter], [], Committed())
    subject.concluded([letter], [], Ended("broken"))
    subject.next({})
    told = [record.getMessage() for record in caplog.records if LETTERS in record.getMessage()]
    name = f"dead letters for topic {LETTERS}"
    assert told[0] == told[3] == f"{name}: broken; retrying"
    assert told[1].startswith(f"{name}: still broken; retrying for")
    assert told[2].startswith(f"{name}: back after")
    assert told[4] == f"{name}: not known to fail any more"
    assert len(told) == 5


def test_dead_letter_that_is_asked_for_again(world):
    """One that was refused and is asked for once more is tried once more."""
    subject, letter = world.delivery.letters, world.table.rows[world.table.add("bad")]
    world.table.request(1)
    error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    subject.concluded([letter], [Failure(letter, error, alone=True)], Aborted(error, record_at_fault=True))
    assert set(world.table.kept) == {1}
    assert subject.next({1: "boo"}) == ()
    assert subject.next({}) == ()
    assert [row[0] for row in subject.next({1: "boo"})] == [1]
    world.close()


def test_dead_letter_that_the_client_may_not_send_stays_held(world):
    """The client may know by itself that a right is missing: then nothing is in the transaction."""
    subject, letter = world.delivery.letters, world.table.rows[world.table.add("bad")]
    world.cluster.forbidden = {LETTERS}
    failure = Failure(letter, KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), alone=True)
    subject.concluded([], [failure], Aborted(None, record_at_fault=False))
    assert set(world.table.kept) == {1}
    world.close()


# -- rights


def test_tracking_topic_that_may_not_be_written_to_is_named(world):
    """Nothing can be published; that no right is missing on the records' own topic is asked, not guessed."""
    world.table.add("t", 10)
    world.cluster.forbidden = {TRACKING}
    with pytest.raises(TrackingTopicError, match=r"tracking topic .tracking.*grant WRITE"):
        world.run()
    assert world.table.held == []


def test_only_the_topic_without_rights_is_held(world):
    """Kafka does not say for which of a batch's topics a right is missing; it is asked."""
    world.table.add("t", 5)
    world.table.add("forbidden", 5)
    world.cluster.forbidden = {"forbidden"}
    world.run()
    assert [(hold.topic, hold.key, hold.record_id) for hold in world.table.held] == [("forbidden", None, None)]
    assert len(world.cluster.published["t"]) == 5


# -- trials


def test_probes_take_turns_with_ordinary_records(world):
    """However many topics do not answer, each try of one of them is followed by an ordinary transaction."""
    silent = [f"silent{n}" for n in range(10)]
    for topic in silent:
        world.table.add(topic)
    world.cluster.silent = set(silent)
    with world.running():
        wait_until(lambda: len(world.cluster.transactions) > 30, "all of them are parked")
        before = len(world.cluster.transactions)
        world.table.add("t", 200)
        wait_until(lambda: len(world.cluster.published.get("t", ())) == 200, "ordinary records are published")
    seen = [topics == {"t"} for topics in world.cluster.transactions[before:]]
    during = seen[seen.index(True) : len(seen) - seen[::-1].index(True)]
    assert all(first or second for first, second in pairwise(during)), during


def test_destinations_without_a_probe_do_not_stop_the_others(world, monkeypatch):
    """Whoever may INSERT can name many topics that are not there. Each batch with one of them costs its time-out."""
    monkeypatch.setattr(culprits, "Parking", partial(Parking, most_probes=2))
    commit = Producer.commit

    def slow(producer, give_up):
        outcome = commit(producer, give_up)
        if isinstance(outcome, Aborted):
            time.sleep(world.timing.io_error_backoff * 10)  # half of the longest rest
        return outcome

    monkeypatch.setattr(Producer, "commit", slow)
    world.cluster.missing = {f"missing{number}" for number in range(100)}
    for topic in sorted(world.cluster.missing):
        world.table.add(topic)
    with world.running():
        for topic in ("first", "second"):
            world.table.add(topic, 5)
            wait_until(lambda topic=topic: len(world.cluster.published.get(topic, ())) == 5, "others are published")
        missing, world.cluster.missing = world.cluster.missing, set()
        wait_until(lambda: missing <= world.cluster.published.keys(), "what is there again gets its own")


def test_probes_and_groups_take_only_the_time_that_is_left(world):
    """While there is ordinary work they wait until it has earned them; with none, or with too much set aside, not."""
    subject = culprits_of(world)
    row, other = world.table.rows[world.table.add("silent")], world.table.rows[world.table.add("t")]
    subject.judge(Aborted(KafkaError(KafkaError._MSG_TIMED_OUT), record_at_fault=True), [row], [])
    wait_until(lambda: subject.call_probes() or subject.is_trial_due, "the probe is due")
    subject.set_aside([other])
    subject.tried(1.0)
    assert not subject.is_trial_due
    assert not subject.is_trial_urgent
    subject.is_idle = True
    assert subject.is_trial_due
    subject.is_idle = False
    subject.published(4.1)
    assert subject.is_trial_due
    assert subject.next_group()[0] == [row]
    subject.set_aside([other._replace(id=3, value=b"x" * world.timing.mark_query_bytes)])
    assert subject.is_trial_urgent
    world.close()


def test_probes_and_groups_take_turns(world):
    """Neither waits until there are none of the other, but for groups that fill the memory: they go first."""
    subject = culprits_of(world)
    rows = [world.table.rows[world.table.add(f"silent{n}")] for n in range(3)]
    for row in rows:
        subject.judge(Aborted(KafkaError(KafkaError._MSG_TIMED_OUT), record_at_fault=True), [row], [])
    wait_until(lambda: subject.call_probes() or len(subject._probes) == 3, "all probes are due")
    others = [[world.table.rows[world.table.add("t")]] for _ in range(2)]
    for group in others:
        subject.set_aside(group)
    tried = [subject.next_group()[0] for _ in range(5)]
    assert tried == [[rows[0]], others[0], [rows[1]], others[1], [rows[2]]]
    world.close()


# -- terms


def test_marks_are_looked_for_once_in_a_leadership(world):
    """A term that ends does not have the whole table read again."""
    world.table.add("t", 25)
    world.cluster.breaks = 2
    world.run()
    assert world.delivery.drained
    assert world.looks_for_marks == 1


# -- terms that end again and again


@pytest.fixture
def hasty(world, monkeypatch):
    """A leadership that begins terms in quick succession."""
    for name in ("_FIRST_REST_SECONDS", "_LONGEST_REST_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(exactly_once, name, 0.001)
    return world


def test_topic_that_ends_every_term_is_held(hasty):
    """A topic of which Kafka does not say what is wrong with it stops nobody else."""
    for number in range(12):
        hasty.table.add(f"t{number % 3}", 2)
        hasty.table.add("poisoned")
    hasty.cluster.breaking = {"poisoned"}
    hasty.run()
    assert hasty.delivery.drained
    assert [(hold.topic, hold.key, hold.record_id) for hold in hasty.table.held] == [("poisoned", None, None)]
    assert sum(len(hasty.cluster.published[f"t{number}"]) for number in range(3)) == 24


def test_outage_makes_no_topic_guilty(hasty):
    """However many terms end, nothing is held when Kafka takes everything again."""
    hasty.table.add("one", 15)
    hasty.table.add("other", 15)
    hasty.cluster.breaks = 25
    hasty.run()
    assert hasty.delivery.drained
    assert hasty.table.held == []
    assert hasty.delivery.suspicion.limit > 1


def test_commits_that_fail_are_an_outage_until_one_succeeds(hasty):
    """A term that begins well says nothing about commits: health must not be green between failures."""
    told = []
    hasty.surroundings.kafka.ended = lambda: told.append("ended")
    hasty.surroundings.kafka.worked = lambda **_: told.append("worked")
    hasty.table.add("t", 5)
    hasty.cluster.breaks = 5
    hasty.run()
    assert told == ["ended", "worked"], "five terms began well, and one commit succeeded"


def culprits_of(world):
    """Suspects without a term."""
    waiting = Waiting(world.delivery.over, world.timing, world.surroundings)
    rights = Rights(world.dead_letters, TRACKING, world.surroundings.grant_write)
    return Culprits(world.timing, world.surroundings, waiting, rights, dead_letter=False)


# -- nothing waits for ever


def test_probe_whose_transaction_fails_for_the_cluster_is_tried_again(world):
    """A coordinator that hesitates says nothing about the record: its destination is not forgotten for that."""
    world.cluster.silent = {"quiet"}
    world.table.add("quiet", 3, key="k")
    with world.running():
        wait_until(lambda: len(world.cluster.transactions) >= 3, "the probe is tried")
        world.cluster.hesitates = 1
        world.cluster.silent = set()
        wait_until(lambda: not world.table.left(), "everything flows", timeout=10)
    assert not world.cluster.hesitates
    assert world.cluster.published["quiet"] == [1, 2, 3]


def test_probe_whose_topic_is_held_is_not_waited_for(world):
    """A hold of the topic ends the probe: once released, its records flow."""
    world.cluster.silent = {"quiet"}
    world.table.add("quiet", 3, key="k")
    with world.running():
        wait_until(lambda: len(world.cluster.transactions) >= 3, "the probe is tried")
        subject = world.cluster
        subject.refusing, subject.silent = {"quiet"}, set()
        wait_until(lambda: world.table.held, "the topic is held")
        subject.refusing = set()
        world.table.held.clear()
        wait_until(lambda: not world.table.left(), "everything flows", timeout=10)
    assert world.cluster.published["quiet"] == [1, 2, 3]


def test_long_trials_are_not_paid_back_for_ever(world):
    """Minutes of trials while nothing could be delivered do not cost the trials after that minutes of their time."""
    subject = culprits_of(world)
    subject.set_aside([world.table.rows[world.table.add("t")]])
    for _ in range(12):
        subject.tried(10.0)
    subject.published(10.0)
    assert subject.is_trial_due
    world.close()


def test_too_large_record_is_held_once_it_is_the_first_of_its_key(monkeypatch):
    """Its hold would keep back those before it, if their transaction is aborted."""
    world = World(monkeypatch, on_poison=False)
    batches = world.surroundings.batches
    batches.too_large = lambda records: [record for record in records if record[3] == b"huge"]
    batches.ask_anew = lambda _: None
    for value in (b"v", b"huge", b"v"):
        world.table.add("t", key="k", value=value)
    world.table.add("t", 30)
    world.cluster.hesitates = 1
    world.run()
    assert [hold.record_id for hold in world.table.held] == [2]
    assert world.table.left() == [2, 3]
    assert 1 in world.cluster.published["t"]
