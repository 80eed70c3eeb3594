"""Terms of exactly-once delivery: the end of a drain, and the steady flow of ordinary records."""

import re
import threading
import time
from itertools import pairwise

import pytest

from outbox_core.election import now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.exactly_once import terms as exactly_once
from outbox_core.harvest.failures import backoffs
from outbox_core.harvest.failures import holds as holding
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.messages import Failure, dead_letter
from outbox_core.kafka.record_producer import Reports
from outbox_core.kafka.transactions import Aborted
from outbox_core.stores.interface import NO_HOLDS, HoldSet, NewHold, row_id
from tests.harvesting import GENEROUS_SECONDS, wait_until
from tests.unit.harvest.term_world import LETTERS, LONG_SECONDS, POISON, TRACKING, Producer, World


def paused(topic, key=None):
    """Return a hold of a topic, or of a key."""
    return NewHold(topic, key, None, "paused", "")


@pytest.fixture
def world(monkeypatch):
    """Return a leadership."""
    return World(monkeypatch)


@pytest.fixture
def hasty(world, monkeypatch):
    """Return a leadership that begins terms in quick succession."""
    for name in ("_FIRST_BACKOFF_SECONDS", "_LONGEST_BACKOFF_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(exactly_once, name, 0.001)
    return world


# -- drained


def test_drain_outlasts_a_scan_that_failed(world):
    """A drain goes on after a failed scan, which says nothing about the rows left, also while records are held."""
    held = world.table.add("paused")
    world.table.held.append(paused("paused"))
    world.table.add("t", 25)
    world.table.failing_scans = 2
    world.run()
    assert world.delivery.drained
    assert world.table.left() == [held]


def test_ids_that_come_back(world):
    """A row with the id of one whose purge is under way is not left out of the scans, so none overtakes it."""
    table, scan, delete, restarted = world.table, world.table.scan, world.table.delete_published, threading.Event()
    table.add("t", 2)

    def scan_after_restart(query):
        if query.without_rows and not restarted.is_set():
            table.restart()
            table.add("u", 3, key="k")
            restarted.set()
        return scan(query)

    def delete_after_restart(ids, create_times):
        assert restarted.wait(GENEROUS_SECONDS)
        return delete(ids, create_times)

    table.scan, table.delete_published = scan_after_restart, delete_after_restart
    world.run()
    assert world.cluster.published == {"t": [1, 2], "u": [1, 2, 3]}


def test_rows_that_were_gone_before_their_purge(world, caplog):
    """Published rows that are not there to be purged are told of once in a term, and nothing stops."""
    table, delete, batches = world.table, world.table.delete_published, []
    table.add("t", 2)

    def delete_after_somebody(ids, create_times):
        batches.append(ids)
        table.rows.pop(ids[0], None)
        if len(batches) < 3:
            table.add("t", 2)
        return delete(ids, create_times)

    table.delete_published = delete_after_somebody
    world.run()
    assert batches[:2] == [[1, 2], [3, 4]]
    assert not table.left()
    assert "1 of 2 published rows of d.s.t (ids 1 to 2) were not there to be deleted" in caplog.text
    assert "(ids 3 to 4)" not in caplog.text


def test_purge_whose_answer_was_lost(world, caplog):
    """Rows that a purge has deleted are not missing when it is tried again for its answer was lost."""
    table, delete, tries = world.table, world.table.delete_published, []
    table.add("t", 2)

    def delete_without_an_answer(ids, create_times):
        tries.append(delete(ids, create_times))
        if len(tries) == 1:
            raise StoreUnavailable("the connection was cut", in_doubt=True)
        return tries[-1]

    table.delete_published = delete_without_an_answer
    world.run()
    assert tries == [2, 0]
    assert "were not there to be deleted" not in caplog.text


def test_drain_outlasts_a_batch_that_is_all_held(world, monkeypatch):
    """A drain goes on after a scan whose rows were all paused meanwhile: there may be more behind them."""
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
    """A drain goes on after a batch that is all of a key held meanwhile: others wait behind it."""
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
    """A drain publishes a record that was released while its last scan excluded it."""
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
    """A leadership that ends during a scan has not drained, as it could not ask whether all rows are held."""
    world.table.add("paused")
    world.table.held.append(paused("paused"))
    world.table.during_scan = world.delivery.stop
    world.run()
    assert not world.delivery.drained


# -- dead letters


def test_dead_letters_that_may_not_be_written_stay_held(world):
    """Dead letters that may not be written stay held with the reason, and delay neither other records nor a drain."""
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


def test_dead_letters_that_end_every_term_keep_nobody_waiting(hasty):
    """Dead letters that end every term, without a reason, back off, and ordinary records are published."""
    hasty.table.request(hasty.table.add("bad"))
    hasty.table.add("t", 25)
    hasty.cluster.forbidden, hasty.cluster.tells = {LETTERS}, False
    with hasty.running():
        wait_until(lambda: len(hasty.cluster.published.get("t", ())) == 25, "ordinary records are published")
    assert not hasty.table.kept
    assert all(hold.topic != LETTERS for hold in hasty.table.held)


def test_dead_letters_are_published_with_ordinary_records(world):
    """Dead letters are published in the transactions of ordinary records, and their rows and holds are deleted."""
    for _ in range(60):
        world.table.request(world.table.add("bad"))
    world.table.add("t", 100)
    world.run()
    assert world.cluster.published[LETTERS] == list(range(1, 61))
    assert len(world.cluster.published["t"]) == 100
    assert world.cluster.transactions[1] == {LETTERS, "t"}
    assert not world.table.left()
    assert not world.table.held


def test_dead_letter_topic_that_is_deleted_is_made_anew(world):
    """A dead-letter topic that was deleted is made again before the next try."""
    with world.running():
        world.table.add("t", value=POISON)
        wait_until(lambda: world.cluster.published.get(LETTERS) == [1], "the first is buried")
        world.cluster.missing = {LETTERS}
        world.table.add("t", value=POISON)
        wait_until(lambda: world.cluster.published.get(LETTERS) == [1, 2], "the second, too")
    assert world.ensured == 2


def test_dead_letter_that_is_asked_for_again(world):
    """A refused dead letter stays held, and is tried once more when it is requested once more."""
    subject, row = world.delivery.failures, world.table.rows[world.table.add("bad")]
    world.table.request(1)
    subject.read_holds()
    assert subject.letters_to_read(()) == [1]
    letter = dead_letter(row, LETTERS, "boo")
    subject.refused([Failure(letter, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), alone=True)])
    assert set(world.table.kept) == {1}
    assert subject.letters_to_read(()) == []
    world.table.held.clear()
    world.table.request(1)
    subject.read_holds()
    assert subject.letters_to_read(()) == [1]
    world.close()


# -- rights


def test_tracking_topic_that_may_not_be_written_to_is_named(world):
    """A tracking topic that may not be written to is named, and no right is assumed missing on the records' topic.

    A right that is revoked ends nothing: with the right all goes on.
    """
    world.table.add("t", 10)
    world.cluster.forbidden = {TRACKING}
    with world.running():
        wait_until(lambda: world.ctx.kafka.is_ongoing, "it is told")
        assert re.search(r"tracking topic .tracking.*grant WRITE", world.ctx.kafka.describe())
        world.cluster.forbidden = set()
        wait_until(lambda: len(world.cluster.published.get("t", ())) == 10, "all is published")
    assert world.table.held == []


def test_only_the_topic_without_rights_is_held(world):
    """Only the topic without the right is held: Kafka does not say which one of a batch it is, but can be asked."""
    world.table.add("t", 5)
    world.table.add("forbidden", 5)
    world.cluster.forbidden = {"forbidden"}
    world.run()
    assert [(hold.topic, hold.key, hold.record_id) for hold in world.table.held] == [("forbidden", None, None)]
    assert len(world.cluster.published["t"]) == 5


# -- destinations that are tried again


def test_probes_take_turns_with_ordinary_records(world):
    """Each try of a topic that does not answer is followed by an ordinary transaction, however many there are."""
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


def test_many_missing_topics_do_not_stop_the_others(world, monkeypatch):
    """Many missing topics, each costing a batch its timeout, do not stop the others."""
    commit = Producer.commit

    def slow(producer, give_up):
        outcome = commit(producer, give_up)
        if isinstance(outcome, Aborted):
            time.sleep(world.ctx.limits.io_error_backoff * 10)  # half of the longest backoff
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


def test_slow_destination_is_waited_for_longer_if_nobody_else_waits(world):
    """A destination that takes longer than a try waits is published all the same."""
    world.table.add("slow")
    world.cluster.silent = {"slow"}
    with world.running():
        wait_until(lambda: len(world.cluster.transactions) > 3, "it is tried again")
        world.cluster.slow, world.cluster.silent = {"slow": 3.5}, set()
        wait_until(lambda: "slow" in world.cluster.published, "it is published")


def test_tries_are_short_while_others_are_published(world, monkeypatch):
    """A destination that is away keeps others waiting for a second at most, however often it is tried."""
    waits, all_arrive = [], Producer.all_arrive

    def watched(producer, timeout_seconds, give_up):
        if producer._in({"silent"}) and timeout_seconds < LONG_SECONDS:
            waits.append(timeout_seconds)
            world.table.add("t")  # while it is tried
        return all_arrive(producer, timeout_seconds, give_up)

    monkeypatch.setattr(Producer, "all_arrive", watched)
    world.table.add("silent")
    world.cluster.silent = {"silent"}
    with world.running():
        wait_until(lambda: len(waits) > 5, "it is tried")
    assert waits.count(1.0) > 3, waits


# -- the search for records that the broker refuses


def refused_scene(world, bad, count):
    """Stash records of which the broker refuses every `bad`-th."""
    world.cluster.refused = {b"refused"}
    for number in range(1, count + 1):
        world.table.add("t", value=b"refused" if number % bad == 0 else b"v")


def test_refused_records_are_found_by_their_own_reports(monkeypatch):
    """The broker's refusals cost two failed transactions each at most, and only refused records are held."""
    world = World(monkeypatch, batch=64, on_poison=False)
    refused_scene(world, bad=20, count=400)
    aborted = []
    abort = Producer.commit

    def commit(producer, give_up):
        outcome = abort(producer, give_up)
        if isinstance(outcome, Aborted):
            aborted.append(outcome)
        return outcome

    monkeypatch.setattr(Producer, "commit", commit)
    world.run()
    assert world.delivery.drained
    assert sorted(hold.record_id for hold in world.table.held) == list(range(20, 401, 20))
    assert len(world.cluster.published["t"]) == 380
    assert len(aborted) <= 40


def test_records_before_a_refused_one_of_its_key_are_published_first(monkeypatch):
    """Earlier records of a refused one's key are published, and not kept back by its hold; later ones wait."""
    world = World(monkeypatch, batch=64, on_poison=False)
    world.cluster.refused = {b"refused"}
    world.table.add("t", key="k")
    world.table.add("t", 2)
    world.table.add("t", key="k", value=b"refused")
    world.table.add("t", 20)
    world.table.add("t", key="k")
    world.run()
    assert [hold.record_id for hold in world.table.held] == [4]
    assert world.table.left() == [4, 25]


def test_destination_is_tried_by_the_first_of_a_key(world):
    """If an earlier record of a key arrived before its transaction failed, the key is tried by that one, in order."""
    subject = world.delivery.failures
    rows = [world.table.rows[world.table.add("t", key=key)] for key in "bkk"]
    reports, error = Reports(), KafkaError(KafkaError._MSG_TIMED_OUT)
    reports.failures.append(Failure(rows[2], error, partition=0))
    subject.aborted(Aborted(error, record_at_fault=True), rows, reports, 1.0)
    assert subject.exclusion().lanes == {("t", "k")}
    wait_until(lambda: subject.rows_to_try() == [row_id(rows[1])], "it is tried by its first row")
    world.close()


@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT])
def test_transaction_that_takes_too_long_is_followed_by_a_smaller_one(world, code):
    """A transaction that Kafka has no time for, by a quota for example, is not repeated in its size for ever."""
    subject = world.delivery.failures
    rows, reports, error = [world.table.rows[world.table.add("t")] for _ in range(8)], Reports(), KafkaError(code)
    subject.aborted(Aborted(error, record_at_fault=False), rows, reports, 1.0)
    assert subject.batch.limit == 4
    reports.failures.append(Failure(rows[2], error, partition=0))
    reports.reached.add(("t", 0))
    subject.aborted(Aborted(error, record_at_fault=False), rows[:4], reports, 1.0)
    assert subject.batch.limit == 2
    world.close()


def test_records_of_a_destination_that_is_away_do_not_make_transactions_ever_smaller(monkeypatch):
    """Each time-out tells as many of its keys as fit into a transaction: in small ones the others wait for hours."""
    monkeypatch.setattr(backoffs, "_MOST_KEYS", 90)
    monkeypatch.setattr(backoffs, "_QUIET_SECONDS", -1.0)
    world = World(monkeypatch, batch=64)
    world.cluster.silent = {"away"}
    world.table.add("away", 500)
    world.table.add("t", 20)
    with world.running():
        wait_until(lambda: len(world.cluster.published.get("t", ())) == 20, "the others arrive")
    slow = [topics for topics in world.cluster.transactions if "away" in topics]
    assert len(slow) <= 20


def test_topic_whose_refusal_is_not_confirmed_is_tried_ever_more_rarely(world):
    """A topic that says that we may not write to it, which the cluster denies, is backed off, longer each time."""
    subject, row = world.delivery.failures, world.table.rows[world.table.add("t")]
    aborted = Aborted(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), record_at_fault=True)
    for _ in range(20):
        began = now()
        subject.aborted(aborted, [row], Reports(), 0.0, is_retry=True)
    assert subject.backoffs.next_due() >= began + 20 * world.ctx.limits.io_error_backoff
    assert not world.table.held
    world.close()


def test_retry_that_is_refused_without_a_report_goes_on_with_fewer_rows(world):
    """A refused transaction of rows that are tried again, without a report that names one, is halved."""
    subject, usual = world.delivery.failures, world.delivery.failures.batch.limit
    rows = [world.table.rows[world.table.add(topic)] for topic in "tu"]
    aborted, reports = Aborted(KafkaError(KafkaError.INVALID_RECORD), record_at_fault=True), Reports()
    reports.arrived += rows
    subject.aborted(aborted, rows, reports, 0.0, is_retry=True)
    assert subject.batch.limit == usual, "all of them arrived: none is to blame"
    subject.aborted(aborted, rows, Reports(), 0.0, is_retry=True)
    assert subject.batch.limit == 1
    subject.aborted(aborted, rows[:1], Reports(), 0.0, is_retry=True)
    assert [hold.record_id for hold in world.table.held] == [rows[0].id]
    world.close()


def test_search_does_not_keep_other_topics_waiting(monkeypatch):
    """While a topic full of refused records is searched, records of another topic are published."""
    world = World(monkeypatch, batch=10, on_poison=False)
    refused_scene(world, bad=1, count=300)
    with world.running():
        wait_until(lambda: world.table.held, "the search has begun")
        world.table.add("u", 20)
        wait_until(lambda: len(world.cluster.published.get("u", ())) == 20, "others are published")
        assert len(world.table.held) < 300


def test_rests_end_when_nothing_else_waits(world):
    """A topic that rests after a refusal is scanned again at once if no other rows wait."""
    subject, row = world.delivery.failures, world.table.rows[world.table.add("t")]
    error = KafkaError(KafkaError.INVALID_RECORD)
    subject.aborted(Aborted(error, record_at_fault=True), [row], Reports(), 1.0)
    assert subject.exclusion().topics == {"t"}
    subject.found_none()
    assert not subject.exclusion().topics
    world.close()


# -- terms


def test_marks_are_looked_for_once_in_a_leadership(world):
    """Marks are searched for once in a leadership, not in every term."""
    world.table.add("t", 25)
    world.cluster.breaks = 2
    world.run()
    assert world.delivery.drained
    assert world.looks_for_marks == 1


def test_holds_that_a_scan_learned_count_from_then_on(world):
    """Rows that are held by now are not published, the floor falls for them, and the next scan leaves them out."""
    failures, paused_topic = world.delivery.failures, HoldSet(topics=frozenset({"t"}))
    world.table.add("t")
    world.table.add("u")
    records = list(world.table.rows.values())
    went_back = []
    world.ctx.watermark.went_back = went_back.extend
    assert failures.admissible(records, NO_HOLDS) == records
    assert went_back == []
    assert failures.admissible(records, paused_topic) == records[1:]
    assert failures.holds is paused_topic
    assert went_back == records[:1]


def test_stale_holds_are_read_again_and_a_release_wakes_the_scans(world):
    """While nothing new is found stale holds are read again; after a release the next scan comes at once."""
    failures = world.delivery.failures
    world.table.held = [paused("t")]
    failures.read_holds()
    world.table.held = []
    failures.read_holds_if_stale()
    assert failures.holds.topics == {"t"}, "they have just been read"
    failures.hold_cache.invalidate()
    failures.read_holds_if_stale()
    assert not failures.holds
    assert world.ctx.commits
    world.close()


# -- terms that end again and again


def test_topic_that_ends_every_term_is_held(hasty):
    """A topic that ends every term, without a reason from Kafka, is held, and stops no other."""
    for number in range(12):
        hasty.table.add(f"t{number % 3}", 2)
        hasty.table.add("poisoned")
    hasty.cluster.breaking = {"poisoned"}
    hasty.run()
    assert hasty.delivery.drained
    assert [(hold.topic, hold.key, hold.record_id) for hold in hasty.table.held] == [("poisoned", None, None)]
    assert sum(len(hasty.cluster.published[f"t{number}"]) for number in range(3)) == 24


def test_outage_makes_no_topic_guilty(hasty):
    """After an outage that ended many terms no record is held."""
    hasty.table.add("one", 15)
    hasty.table.add("other", 15)
    hasty.cluster.breaks = 25
    hasty.run()
    assert hasty.delivery.drained
    assert hasty.table.held == []
    assert hasty.delivery.failures.batch.limit > 1


def test_commits_that_fail_are_an_outage_until_one_succeeds(hasty):
    """Failing commits are an outage until one succeeds: a term that only begins well does not end it."""
    told = []
    hasty.ctx.kafka.recovered = lambda: told.append("recovered")
    hasty.ctx.kafka.succeeded = lambda **_: told.append("succeeded")
    hasty.table.add("t", 5)
    hasty.cluster.breaks = 5
    hasty.run()
    assert told == ["recovered", "succeeded"] * (len(told) // 2), "five terms began well, and told nothing"


# -- nothing waits for ever


def test_probe_whose_transaction_fails_for_the_cluster_is_tried_again(world):
    """A probe whose coordinator hesitates is tried again, as that says nothing about its destination."""
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
    """A hold of the topic ends its probe: once released, its records flow."""
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


def test_too_large_record_is_held_once_it_is_the_first_of_its_key(monkeypatch):
    """A record that is too large is held only as the first of its key, as its hold would keep back earlier ones."""
    world = World(monkeypatch, on_poison=False)
    batches = world.ctx.batches
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


def test_what_scans_do_not_leave_out_is_not_tried(world):
    """A row that waited as a dead letter, and was released, or that has another topic by now, is left to the scans."""
    world.table.add("bad", key="k")
    failures, record = world.delivery.failures, world.table.rows[1]
    failures.backoffs.failed(dead_letter(record, LETTERS, "boo"), (LETTERS, None))
    assert failures.read_again([row_id(record)]) == []
    assert not failures.backoffs
    failures.backoffs.failed(record._replace(topic="elsewhere"), ("elsewhere", None))
    assert failures.read_again([row_id(record)]) == []
    assert not failures.backoffs
    world.close()


def test_a_suspect_keeps_nobody_waiting_after_a_term_has_ended(hasty, monkeypatch):
    """After a term that ended with its producer others are published before the suspect is tried again."""
    hasty.table.add("poisoned")
    hasty.cluster.breaking = {"poisoned"}
    terms = []
    hasty.settle = terms.append
    failures = hasty.delivery.failures
    monkeypatch.setattr(failures.backoffs, "_first", 0.0)  # it is due whenever a term begins
    monkeypatch.setattr(failures.backoffs, "longest", 0.0)
    with hasty.running():
        wait_until(lambda: failures.backoffs, "it is a suspect")
        hasty.table.add("t", 50)
        before = len(terms)
        wait_until(lambda: hasty.cluster.published.get("t"), "others are published")
        assert len(terms) - before < 10


def test_dead_letters_that_may_not_be_written_are_refused_together(monkeypatch):
    """One refusal for a missing right is that of all dead letters: others would each end a term."""
    for name in ("_FIRST_BACKOFF_SECONDS", "_LONGEST_BACKOFF_SECONDS", "_TICK_SECONDS"):
        monkeypatch.setattr(exactly_once, name, 0.001)
    world = World(monkeypatch, batch=10, on_poison=True)
    for _ in range(500):
        world.table.request(world.table.add("bad"))
    world.table.add("t", 10)
    world.cluster.forbidden = {LETTERS}
    with world.running():
        wait_until(lambda: world.cluster.published.get("t"), "ordinary records are published")
        assert len(world.cluster.transactions) < 10
        wait_until(lambda: len(world.table.kept) == 500, "all stay held")


def test_one_refused_by_the_client_does_not_hold_those_before_it(monkeypatch):
    """Records before one that the client refuses are published, though their transaction is aborted for another."""
    world = World(monkeypatch, batch=10, on_poison=False)
    world.table.add("t", 2, key="k")
    refused = world.table.add("t", value=POISON, key="k")
    world.table.add("silent")
    world.table.add("t", 5)
    world.cluster.silent = {"silent"}
    with world.running():
        wait_until(lambda: len(world.cluster.published.get("t", ())) == 7, "those before it, and the others")
        wait_until(lambda: [hold.record_id for hold in world.table.held] == [refused], "it is held by itself")
