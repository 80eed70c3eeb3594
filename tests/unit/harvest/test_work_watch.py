"""The watch over a leader's work: when it steps down, when it does not, and what it says."""

import logging
from contextlib import suppress
from types import SimpleNamespace

import pytest

from outbox_core.errors import (
    KafkaUnavailable,
    OutboxTableError,
    RightsMissing,
    RowsHidden,
    RowsRemain,
    StatementCancelled,
    StoreUnavailable,
)
from outbox_core.harvest.steps import (
    BEGIN,
    DELETE,
    PUBLISH,
    PURGE,
    REACH,
    READ,
    SCAN,
    STATEMENT,
    TELL,
    WHOLE_TABLE,
    WRITE,
)
from outbox_core.harvest.work_watch import WorkWatch
from outbox_core.kafka.duty import NEW_PATIENCE_SECONDS, PATIENCE_SECONDS
from outbox_core.kafka.transactions import ACKNOWLEDGEMENTS
from outbox_core.metrics import HarvestMetrics
from outbox_core.outage import Outage

BROKER = "broker 3 at kafka3:9092"
PLACE = ("orders", 2)


class _Questions:
    """The answers of Kafka and the database."""

    database = "database shop at db:5432 as role app"
    reads = True

    def __init__(self):
        self.count = 2
        self.silent = []
        self.led = None  # places whose leaders are silent; all if None
        self.work = ""  # of the database, on a statement of ours
        self.asked = []

    def members(self):
        self.asked.append("members")
        return self.count

    def silent_brokers(self, _max_age=0.0):
        self.asked.append("brokers")
        if self.silent is None:
            raise KafkaUnavailable("nobody")
        return self.silent

    def silent_leaders(self, places, _max_age=0.0):
        self.asked.append(set(places))
        if self.silent is None:
            raise KafkaUnavailable("nobody")
        return self.silent if self.led is None or self.led & set(places) else []

    def read_table(self):
        if not self.reads:
            raise StoreUnavailable("refused")

    def at_work(self):
        self.asked.append("database")
        self.read_table()
        return self.work


class World:
    """A leader that has published, with a clock of its own."""

    def __init__(self, monkeypatch):
        self.time = 1000.0
        monkeypatch.setattr("outbox_core.outage.time.monotonic", lambda: self.time)
        self.steps_down = []
        self.questions = _Questions()
        metrics = HarvestMetrics()
        self.activity = metrics.activity
        self.activity.now = lambda: self.time
        log = logging.getLogger("outbox_core.test")
        self.database = Outage("database", log)
        self.window = SimpleNamespace(waited_seconds=0.0)
        self.elector = SimpleNamespace(step_down=lambda *wish: self.steps_down.append(wish))
        self.unmade = ""
        self.watch = WorkWatch(
            SimpleNamespace(
                metrics=metrics,
                elector=self.elector,
                send_window=self.window,
                limits=SimpleNamespace(delivery_timeout=4.0),
                database=self.database,
                outages=(self.database,),
            ),
            self.questions,
            lambda: self.unmade,
        )
        self.lead()

    def lead(self):
        """Begin a leadership in which everything has worked."""
        self.activity.begin()
        for work in (READ, DELETE, PUBLISH, WRITE, BEGIN):
            self.activity.tries_to(work)
            self.activity.duty.succeeded(work)
        self.activity.finished()
        self.watch.look()

    def pass_(self, seconds, and_do=lambda: None):
        """Let the watch look at each second."""
        for _ in range(round(seconds)):
            self.time += 1.0
            and_do()
            self.watch.look()

    @property
    def reasons(self):
        return [reason for reason, _ in self.steps_down]


@pytest.fixture
def world(monkeypatch):
    """Return a leader that has published, with a peer that stands by."""
    return World(monkeypatch)


def test_each_leadership_is_watched_anew(world):
    """A leader that steps down, and leads again before the next look, steps down again if it cannot work again."""
    with world.activity.statement(*SCAN):
        world.pass_(PATIENCE_SECONDS)
    assert len(world.steps_down) == 1
    world.time += 0.4
    world.activity.end()
    world.activity.begin()
    with world.activity.statement(*SCAN):
        world.pass_(NEW_PATIENCE_SECONDS + 1)
    assert len(world.steps_down) == 2


def test_a_lease_that_flaps(world):
    """A leader whose lease ends by itself and begins again owes what it owed: it is no newcomer."""

    def fail():
        with suppress(StoreUnavailable), world.activity.statement(*SCAN):
            raise StoreUnavailable("refused")

    for _ in range(3):
        world.pass_(7, fail)
        world.activity.end(is_handed_over=False)
        world.pass_(3)
        world.activity.begin()
    assert len(world.steps_down) == 1


def newcomer(world):
    """Begin a leadership that has to settle what the last leader began."""
    world.activity.end()
    world.activity.begin()
    world.activity.tries_to(BEGIN)


def test_a_beginning_behind_a_lock(world):
    """A newcomer whose settlement waits for a lock, for which all others would wait, too, goes on."""
    newcomer(world)
    world.questions.work = "has it wait for a lock"
    with world.activity.statement(*STATEMENT):
        world.pass_(NEW_PATIENCE_SECONDS + PATIENCE_SECONDS)
    assert world.steps_down == []


def test_a_beginning_that_consists_of_many_parts(world):
    """Settling hundreds of shards takes minutes, and each that is done shows that the leader can."""
    newcomer(world)
    for _ in range(40):
        world.pass_(3)
        world.activity.goes_on(BEGIN)
    assert world.steps_down == []
    world.pass_(PATIENCE_SECONDS)
    assert len(world.steps_down) == 1


@pytest.mark.parametrize("error", [OutboxTableError("no such table"), RowsRemain("a trigger")])
def test_what_is_missing_for_all_is_not_owed(world, error):
    """A table that is away, a trigger that keeps rows: another member would fare the same."""

    def fail():
        with suppress(type(error)), world.activity.statement(*SCAN):
            raise error

    world.pass_(PATIENCE_SECONDS + NEW_PATIENCE_SECONDS, fail)
    assert world.steps_down == []


@pytest.mark.parametrize("error", [RightsMissing("no SELECT"), RowsHidden("hidden")])
def test_what_a_role_lacks_is_owed(world, error):
    """A right that is revoked, rows that a policy hides: another member may have another role."""

    def fail():
        with suppress(type(error)), world.activity.statement(*SCAN):
            raise error

    world.pass_(PATIENCE_SECONDS + 1, fail)
    assert len(world.steps_down) == 1


def test_a_statement_over_the_whole_table_takes_its_time(world):
    """Another leader would begin it anew, so nobody hands over because of it."""
    with world.activity.statement(*WHOLE_TABLE):
        world.pass_(300)
    assert world.steps_down == []


def test_a_transaction_that_waits_for_a_partition_without_a_leader(world):
    """While every broker answers, records that are not acknowledged would not be for another member either."""
    world.activity.tries_to(PUBLISH)
    with world.activity.step(ACKNOWLEDGEMENTS):
        world.pass_(PATIENCE_SECONDS + NEW_PATIENCE_SECONDS)
        assert world.steps_down == []
        world.questions.silent = [BROKER]
        world.activity.tries_to(PUBLISH)
        world.pass_(2 * PATIENCE_SECONDS)
    [reason] = world.reasons
    assert BROKER in reason


def test_a_call_that_hangs(world):
    """A scan that the database never answers: after 20 s the leader steps down, once, and names call and database."""
    world.questions.reads = False
    with world.activity.statement(*SCAN):
        world.pass_(PATIENCE_SECONDS - 1)
        assert world.steps_down == []
        world.pass_(60)
    [reason] = world.reasons
    assert reason.startswith("it could not read the outbox table for 20 s; it waits for a scan for 20 s;")
    assert "database shop at db:5432 as role app does not answer" in reason


@pytest.mark.parametrize("step", [SCAN, PURGE])
def test_a_statement_that_the_database_is_at_work_on(world, step):
    """A statement that runs, or waits for a lock, would do so for others: nobody hands over, and health says so."""
    world.questions.work = "has it wait for a lock"
    with world.activity.statement(*step):
        world.pass_(300)
        assert world.steps_down == []
        trouble = world.activity.trouble(30)
    assert trouble.startswith(f"it leads, and could not {step.work} for 300 s; it waits for {step.name} for 300 s; ")
    assert trouble.endswith("database shop at db:5432 as role app has it wait for a lock")
    assert 10 <= world.questions.asked.count("database") <= 30  # not every second
    world.pass_(1)
    assert world.activity.circumstances == ""


def test_a_connection_that_hangs_after_its_statement_was_at_work(world):
    """The database forgets the statement, and its answer does not come: the patience began when it was last there."""
    world.questions.work = "is at work on it"
    with world.activity.statement(*SCAN):
        world.pass_(100)
        world.questions.work = ""
        world.pass_(2 * PATIENCE_SECONDS + 15)
    [reason] = world.reasons
    assert reason.endswith("database shop at db:5432 as role app answers, but not on this connection")


def test_a_statement_that_is_cancelled_again_and_again(world):
    """The database answers, if only to say that the statement took too long: it would for others, too."""

    def turn():
        with pytest.raises(StatementCancelled), world.activity.statement(*SCAN):
            raise StatementCancelled("canceling statement due to statement timeout", in_doubt=True)

    world.pass_(300, turn)
    assert world.steps_down == []


def test_a_database_that_fails_is_not_asked(world):
    """Statements that end with errors are no question of what is under way."""

    def turn():
        with pytest.raises(StoreUnavailable), world.activity.statement(*SCAN):
            raise StoreUnavailable("refused")

    world.questions.work = "is at work on it"
    world.pass_(PATIENCE_SECONDS + 2, turn)
    assert len(world.reasons) == 1
    assert "database" not in world.questions.asked


def test_statements_that_fail_with_others_between(world):
    """A scan that fails each time is owed from the first on, whatever else the database answers."""
    world.database.failed("cannot connect to database shop at db:5432 as role app: refused")

    def turn():
        with pytest.raises(StoreUnavailable), world.activity.statement(*SCAN):
            raise StoreUnavailable("refused")
        with world.activity.statement("a purge", DELETE):
            pass

    world.pass_(PATIENCE_SECONDS + 2, turn)
    [reason] = world.reasons
    assert "could not read the outbox table" in reason
    assert "cannot connect to database shop at db:5432" in reason
    assert "does not answer" not in reason


def test_a_missing_right_is_no_reason(world):
    """Rows that remain for want of a right would remain for others, too."""

    def turn():
        with pytest.raises(RowsRemain), world.activity.statement("a purge", DELETE):
            raise RowsRemain("no right to delete")

    world.pass_(300, turn)
    assert world.steps_down == []


def test_who_waits_for_nothing_stays(world):
    """An idle leader owes nothing, and asks nobody."""
    world.pass_(300)
    assert (world.steps_down, world.questions.asked) == ([], [])


def test_the_only_member_tries_on(world, caplog):
    """Alone it says so once, and steps down as soon as there is another."""
    world.questions.count = 1
    world.activity.tries_to(PUBLISH)
    world.pass_(100)
    assert world.steps_down == []
    assert [record.getMessage() for record in caplog.records] == [
        "it could not end a transaction for 20 s; no other process is in the leader group, so this one tries on"
    ]
    world.questions.count = 2
    world.pass_(4)
    assert len(world.reasons) == 1


def test_kafka_that_does_not_say_who_is_there(world):
    """Without an answer it steps down: nobody may be there, but then it comes back."""
    world.questions.count = None
    world.activity.tries_to(PUBLISH)
    world.pass_(PATIENCE_SECONDS + 1)
    assert len(world.reasons) == 1


def test_a_newcomer_has_a_longer_patience(world):
    """A leader that has done nothing yet has a minute, so that an outage for all does not pass leadership round."""
    world.activity.begin()
    world.activity.tries_to(BEGIN)
    world.pass_(NEW_PATIENCE_SECONDS - 1)
    assert world.steps_down == []
    world.pass_(2)
    assert len(world.reasons) == 1
    world.activity.end()
    world.watch.look()
    world.lead()
    world.activity.tries_to(PUBLISH)
    world.pass_(PATIENCE_SECONDS + 1)
    assert len(world.reasons) == 2


def test_brokers_are_named_before_the_patience_is_over(world):
    """Health can name the broker that is waited for long before leadership is handed over; and forgets it then."""
    world.questions.silent = [BROKER]
    world.activity.tries_to(PUBLISH)
    with world.activity.step("the abort of a transaction"):
        world.pass_(10)
        waits, trouble = world.activity.circumstances, world.activity.trouble(5)
    assert waits == f"; it waits for the abort of a transaction for 10 s; {BROKER} does not answer"
    assert trouble == f"it leads, and could not end a transaction for 10 s{waits}"
    world.activity.duty.succeeded(PUBLISH)
    world.pass_(1)
    assert world.activity.circumstances == ""


def test_aborted_transactions_count_if_a_broker_is_silent(world):
    """Kafka has answered for each: with all brokers there, others would fare the same."""
    world.activity.tries_to(WRITE)
    world.pass_(300, lambda: world.activity.tries_to(WRITE))
    assert world.steps_down == []
    world.questions.silent = [BROKER]
    world.pass_(2 * PATIENCE_SECONDS, lambda: world.activity.tries_to(WRITE))
    [reason] = world.reasons
    assert BROKER in reason


def test_partitions_that_have_no_leader_for_anybody(world):
    """Partitions that fail count only if Kafka lists a leader that does not answer; the count begins with the send."""
    world.activity.cannot_reach({PLACE: 0.0})
    world.pass_(PATIENCE_SECONDS - 4.0 - 1)
    assert "members" not in world.questions.asked
    world.pass_(200)
    assert world.steps_down == []
    assert {PLACE} in world.questions.asked
    assert len([each for each in world.questions.asked if each == {PLACE}]) <= 25  # not every few seconds
    world.questions.silent = [BROKER]
    world.pass_(PATIENCE_SECONDS + 1)
    [reason] = world.reasons
    assert "write to partitions whose leader is there" in reason
    assert f"{BROKER} does not answer" in reason


def test_new_trouble_beside_a_partition_that_has_no_leader(world):
    """Another partition that fails has its own patience, however long the one without a leader has been so."""
    other = ("orders", 0)
    world.activity.cannot_reach({PLACE: 0.0})
    world.questions.led = {other}
    world.questions.silent = [BROKER]
    world.pass_(100)
    assert world.steps_down == []
    began = world.time
    world.activity.cannot_reach({PLACE: world.time - 1000.0, other: 0.0})
    while not world.steps_down:
        world.pass_(1)
    assert PATIENCE_SECONDS - 4.0 <= world.time - began <= PATIENCE_SECONDS  # it was sent 4 s before


def test_partitions_that_are_reached_again(world):
    """What arrives again is owed no more."""
    world.questions.silent = [BROKER]
    for _ in range(20):
        world.activity.cannot_reach({PLACE: 0.0})
        world.pass_(10)
        world.activity.cannot_reach({})
        world.pass_(1)
    assert world.steps_down == []


def test_no_broker_answers(world):
    """Silence of all is told as such, and is no answer that would excuse the leader."""
    world.questions.silent = None
    world.activity.tries_to(WRITE)
    world.pass_(PATIENCE_SECONDS + 1)
    [reason] = world.reasons
    assert "no broker of Kafka answers" in reason


def test_leases_without_room(world):
    """Heartbeats that come back so late that nothing may be sent are trouble of this process."""
    for second in range(30):
        world.window.waited_seconds = float(second)
        world.pass_(1)
    [reason] = world.reasons
    assert "send in the time of its lease" in reason
    [(_, is_able)] = world.steps_down
    assert is_able()
    world.questions.silent = [BROKER]
    assert not is_able()


def test_no_producer_can_be_made(world):
    """Without one nothing is tried that could fail: that is trouble of this process, until Kafka answers it again."""
    for _ in range(5):
        world.unmade = "ssl.ca.location: no such file"
        world.pass_(10)
        world.unmade = ""
        world.pass_(1)
    assert world.steps_down == []
    world.unmade, world.questions.silent = "ssl.ca.location: no such file", None
    world.pass_(PATIENCE_SECONDS + 1)
    [(reason, is_able)] = world.steps_down
    assert reason.startswith("it could not make a producer for 20 s; no broker of Kafka answers (nobody)")
    assert not is_able()
    world.questions.silent = []
    assert is_able()


def test_the_probe_is_of_what_failed(world):
    """The database is asked if that failed, Kafka if that failed; an error is a no."""
    world.activity.tries_to(READ)
    world.pass_(PATIENCE_SECONDS + 1)
    [(_, is_able)] = world.steps_down
    world.questions.silent = [BROKER]
    assert is_able()
    world.questions.reads = False
    assert not is_able()

    world.lead()
    world.activity.end()
    world.watch.look()
    world.lead()
    world.activity.tries_to(PUBLISH)
    world.pass_(PATIENCE_SECONDS + 1)
    (_, is_able) = world.steps_down[-1]
    assert not is_able()
    world.questions.silent = None
    assert not is_able()
    world.questions.silent = []
    assert is_able()


def test_who_still_hangs_is_not_able(world):
    """A call that has not ended keeps its thread: new connections help nobody."""
    with world.activity.statement(*SCAN):
        world.pass_(PATIENCE_SECONDS + 1)
        [(_, is_able)] = world.steps_down
        assert not is_able()
    assert is_able()


def test_an_elector_that_cannot_step_down(world):
    """An elector of the user's own keeps its leadership, and Kafka is not asked who is there."""
    del world.elector.step_down
    world.activity.tries_to(PUBLISH)
    world.pass_(200)
    assert "members" not in world.questions.asked


def test_secrets_stay_out_of_the_reason(world):
    """The reason goes to the log and to /healthz: passwords do not."""
    world.database.failed("cannot connect: password=hunter2\nhost=db")
    world.activity.tries_to(READ)
    world.pass_(PATIENCE_SECONDS + 1)
    [reason] = world.reasons
    assert "hunter2" not in reason
    assert "\n" not in reason


def test_a_watch_goes_on_after_an_error(world, caplog, monkeypatch):
    """An error of a question is logged, and the thread looks again."""
    monkeypatch.setattr("outbox_core.harvest.work_watch._INTERVAL_SECONDS", 0.01)
    looks = []

    def look():
        looks.append(0)
        if len(looks) == 3:
            world.watch.stop()
        raise ZeroDivisionError

    world.watch.look = look
    world.watch.start()
    world.watch._thread.join(10)
    assert len(looks) == 3
    assert REACH not in caplog.text
    assert caplog.text.count("the watch over the work failed") == 3


def test_an_event_handler_that_hangs(world):
    """A handler that does not return is named; this process is not able again before it does."""
    world.activity.duty.succeeded(TELL)
    world.activity.tries_to(TELL)
    with world.activity.step("the event handler"):
        world.pass_(PATIENCE_SECONDS + 1)
        [(reason, is_able)] = world.steps_down
        assert "it could not hand an event to the application for 20 s" in reason
        assert "it waits for the event handler for 20 s" in reason
        assert not is_able()
    assert is_able()
