"""The simulation in `make test`: some seeds of both deliveries, and rules that it must find broken."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

import outbox_core
import outbox_queue
from outbox_core.errors import StoreUnavailable, must
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.stores.interface import RowQuery, StoredRecord
from tests.simulation import queue_simulation, simulation
from tests.simulation.__main__ import main, shrink
from tests.simulation.broken_queue_rules import QUEUE_RULES, queue_broken
from tests.simulation.broken_rules import RULES, broken, plan_of, shows
from tests.simulation.brokers import PLAIN, Entry, Sent
from tests.simulation.illnesses import ILLNESSES
from tests.simulation.network import Network
from tests.simulation.postgres import Database, Store
from tests.simulation.scheduling import Process, Scheduler
from tests.simulation.simulation import MODES, TORN, Plan, Simulation, run
from tests.simulation.threads import Event

_LIMIT_SECONDS = 280
QUICKLY_FOUND = (
    "the transactions of 592f1f3",
    "what is in flight is copied before the scan",
    "the floor waits for open writers",
    "holds are read earlier than the rows",
    "a lease counts from the sending",
)


def _simulate(*arguments):
    """Run the command, and return its result; the order of sets of texts is the same in each."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)


@pytest.mark.parametrize("mode", MODES)
def test_promises_hold(mode):
    """In some virtual minutes of faults nothing is lost, invented or reordered, and in the end nothing waits."""
    done = _simulate("--hours", "0.02", "--mode", mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leader acquired" in done.stdout


def test_a_broken_invariant_is_a_broken_promise(monkeypatch):
    """A run notices that the product has found an invariant broken, although the harvester is started again."""
    monkeypatch.setattr(Publisher, "_check_counts", lambda _: must(condition=False, message="it must hold"))
    assert "an invariant is broken, and this stops: it must hold" in run(Plan.of(1, "at-least-once")).problem


@pytest.mark.parametrize("part", [*simulation.SENTINELS_IN_LOG.values(), *queue_simulation.SENTINELS_IN_LOG.values()])
def test_states_are_recognised_in_the_log(part):
    """The product still writes what a run looks for: otherwise a state would be reached and not counted."""
    modules = (path for package in (outbox_core, outbox_queue) for path in Path(package.__path__[0]).rglob("*.py"))
    assert any(part in path.read_text() for path in modules)


@pytest.mark.complete
@pytest.mark.parametrize("mode", MODES)
def test_promises_hold_for_hours(mode):
    """The same for two virtual hours."""
    done = _simulate("--hours", "2", "--mode", mode, "--first", "1000")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rule", "a leese ends"], "there is no rule 'a leese ends'; meant may be 'a lease ends'"),
        (["--rule", "a lease ends", "--mode", "queue"], "counts in exactly-once and at-least-once, not in queue"),
        (["--rule", "a redelivery is one transaction", "--mode", "exactly-once"], "counts in queue, not in"),
    ],
)
def test_wrong_arguments_are_told(monkeypatch, capsys, arguments, told):
    """A mistyped rule, or a mode in which it does not count, is told in one line."""
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert told in capsys.readouterr().err


def _is_found(rule, most_seeds, first=0):
    with broken(rule):
        outcomes = (run(plan_of(seed, "", rule)) for seed in range(first, first + most_seeds))
        return any(shows(rule, outcome.problem) for outcome in outcomes)


def test_doubles_fit_the_product():
    """Each broken rule names attributes that there are: what a double replaces may have moved."""
    for rule in RULES:
        with broken(rule):
            pass
    for rule in QUEUE_RULES:
        with queue_broken(rule):
            pass


@pytest.mark.parametrize("rule", QUICKLY_FOUND)
def test_broken_rules_are_found(rule):
    """A run notices that a rule of the product is broken."""
    assert _is_found(rule, 60)


@pytest.mark.complete
@pytest.mark.parametrize("rule", sorted(RULES.keys() - set(QUICKLY_FOUND)))
def test_all_broken_rules_are_found(rule):
    """The same for the rules that take longer."""
    assert _is_found(rule, 600)


@pytest.mark.complete
def test_torn_transactions_are_read_back():
    """A late EndTxn that can end another transaction tears batches, and recovery loses none of their records."""
    rule = "no transaction in an epoch with a late EndTxn"
    with broken(rule):
        outcomes = [run(plan_of(seed, "", rule)) for seed in range(20)]
    assert not [outcome.problem for outcome in outcomes if "lost" in outcome.problem]
    assert sum(outcome.seen[TORN] for outcome in outcomes)


def test_failing_plan_is_shrunk():
    """Shrinking leaves a smaller plan that still fails."""
    plan = Plan(1, "exactly-once", ("break",), harvesters=2, writers=1, seconds=20.0)
    rule = "the floor waits for open writers"
    smaller = shrink(plan, rule)
    with broken(rule):
        assert run(smaller).problem
    assert (smaller.harvesters, smaller.writers, smaller.faults) == (1, 1, ()), "late commits suffice"


def test_seed_replays():
    """The same plan takes the same steps, to the last line of its trace."""
    plan = Plan.of(7, "exactly-once")
    first, second = run(plan, trace=10_000), run(plan, trace=10_000)
    assert first.trace == second.trace
    assert (first.steps, first.records) == (second.steps, second.records)
    assert first.records


@pytest.mark.parametrize(
    ("illness", "mode"), [("leader topic", "exactly-once"), ("database", "at-least-once"), ("hang", "exactly-once")]
)
def test_another_one_works(illness, mode):
    """While one of two harvesters is ill, the other one publishes in time."""
    plan = Plan(3, mode, (), harvesters=2, writers=1, seconds=90.0, pause=2.0, illnesses=(illness,), illness_pause=1e6)
    outcome = run(plan)
    assert not outcome.problem
    assert outcome.seen[f"ill: {illness}"]


@pytest.mark.complete
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("illness", ILLNESSES)
def test_another_one_works_whatever_the_illness(illness, mode):
    """The same for each illness, and more seeds."""
    for seed in range(10):
        plan = replace(Plan.of(seed, mode).lone(), harvesters=2, illnesses=(illness,))
        assert not run(plan).problem


def test_outage_for_all_passes_the_partition_on_once():
    """In minutes without a database two harvesters lead once each, the first one for a minute."""
    plan = plan_of(1, "at-least-once", "who left in an outage for all stays out")
    plan = replace(plan, harvesters=2, seconds=200.0)
    outcome = run(plan)
    assert plan.only_fault == "database"
    assert not outcome.problem
    assert outcome.seen["partition passed on in an outage for all"]


def test_a_lock_passes_nothing_on():
    """While a session of others keeps changes from the table, whoever leads goes on leading, and then publishes."""
    rule = "a statement that the database is at work on passes nothing on"
    for seed in range(2):
        plan = replace(plan_of(seed, "", rule), seconds=200.0)
        outcome = run(plan)
        assert plan.only_fault == "lock"
        assert not outcome.problem
        assert outcome.seen["table locked"]


def test_rows_put_back_with_their_mark_have_time():
    """A row that was deleted comes back with its mark, and has some minutes until it must be published again."""
    scheduler = Scheduler(1)
    database = Database(scheduler)
    record = StoredRecord(database.draw(), "orders", "a", b"w0a:1", None, None, -1, 7)
    database.commit([record])
    database.rows[record.id].leader = UUID(int=1)
    standby = database.standby()
    store = Store.__new__(Store)
    store._database = database
    assert store._delete([record.id], [7], lambda _: True) == 1
    assert database.put_back() == [record]
    assert (database.rows[record.id].leader, database.rows[record.id].waits_since) == (UUID(int=1), 150.0)
    assert database.put_back() == []
    del database.rows[record.id]
    assert database.promote(standby) == ([], [record])
    assert database.rows[record.id].waits_since == 150.0


def test_liveness_counts_from_what_ends_last():
    """A row waits from its commit, the release of its hold, or the end of a fault for all, whichever is the latest."""
    simulation = Simulation(Plan(1, "exactly-once", (), harvesters=2))
    simulation.database.commit([StoredRecord(1, "orders", "a", b"w0a:1", None, None, -1, 0)])
    for node in simulation.nodes:
        node.process = Process(simulation.scheduler, node.name)
    ends = {30: simulation.liveness.disturb, 50: lambda: simulation.liveness.fell_ill(simulation.nodes[0])}
    while not simulation.problem:
        simulation.scheduler.now += 1.0
        ends.get(simulation.scheduler.now, lambda: None)()
        simulation.liveness.watch()
    assert simulation.scheduler.now == 30.0 + 45.0 + 1.0, "one was ill at 50 s, the other one could work from 30 s on"
    assert "in which harvester-1 could work (harvester-0 could not)" in simulation.problem


def test_liveness_knows_newcomers_that_were_ill_already():
    """A harvester that was ill when it began to lead has the longer patience of a newcomer, as long as it leads."""
    simulation = Simulation(Plan(1, "exactly-once", (), harvesters=2))
    simulation.database.commit([StoredRecord(1, "orders", "a", b"w0a:1", None, None, -1, 0)])
    ill, well = simulation.nodes
    well.process = Process(simulation.scheduler, well.name)
    simulation.liveness.began_to_lead(ill)
    ends = {30: lambda: simulation.liveness.ended_to_lead(ill)}
    while not simulation.problem:
        simulation.scheduler.now += 1.0
        ends.get(simulation.scheduler.now, lambda: None)()
        simulation.liveness.watch()
    assert simulation.scheduler.now == 9.0 + 45.0 + 75.0 + 1.0, "the other one could not work up to 9 s"


@pytest.mark.parametrize("mode", MODES)
def test_partition_is_handed_over(mode):
    """A group that gives its partition to another member has its owner hand it over; nothing is lost by that."""
    outcome = run(Plan(1, mode, ("reassign",), harvesters=3, writers=1, seconds=20.0))
    assert not outcome.problem
    assert outcome.seen["partition handed over"]
    assert outcome.seen["leader acquired"] > 1


def _entries(*tokens, until=float("inf")):
    return [
        Entry(0, PLAIN, b"w0a", f"w0a:{token}".encode(), None, 5.0, 1, Sent(b"", b"", None, until=until))
        for token in tokens
    ]


@pytest.mark.parametrize("mode", MODES)
def test_order_is_excused_for_overdue_records_alone(mode):
    """At least once, a record that arrives after its delivery timeout may come after a later one, and no other may."""
    simulation = Simulation(Plan(1, mode, ()))
    simulation._check_order([*_entries(1, 1, 2), *_entries(1, until=4.0), *_entries(2, 3)])
    excused = mode == "at-least-once"
    assert simulation.problem == ("" if excused else "w0a:1 comes after 2 of its key")
    assert simulation.seen["late record of a replaced producer"] == excused
    simulation._check_order(_entries(1, 2, 1, until=6.0))
    assert "w0a:1 comes after 2 of its key" in simulation.problem


def test_late_mark_takes_effect():
    """A mark whose connection broke is in doubt, and marks all the same later; nobody has read what it returned."""
    scheduler, outcomes = Scheduler(1), []
    network = Network(scheduler)
    network.late = 1.0
    database = Database(scheduler, late_changes=1.0)
    record = StoredRecord(database.draw(), "orders", "a", b"w0a:1", None, None, -1, 0)
    database.commit([record])

    def work():
        with pytest.raises(StoreUnavailable) as raised:
            Store(database, network).mark(UUID(int=1), RowQuery(1, 1000))
        outcomes.append((raised.value.in_doubt, database.rows[record.id].leader))

    Process(scheduler, "harvester").spawn(work, "mark")
    scheduler.run(20.0)
    assert outcomes == [(True, None)]
    assert database.rows[record.id].leader == UUID(int=1)
    assert not database.read_at


def test_crashed_process_does_nothing_more():
    """A task's `finally` has no effect when its process crashes, and a suspended one goes on later."""
    scheduler, done = Scheduler(1), []
    killed, suspended = Process(scheduler, "killed"), Process(scheduler, "suspended")

    def work():
        try:
            Event().wait(5.0)
            done.append("worked")
        finally:
            Event().wait(1.0)
            done.append("cleaned up")

    killed.spawn(work, "work")
    suspended.spawn(work, "work")
    scheduler.run(1.0)
    killed.crash()
    before = suspended.boottime(), suspended.monotonic()
    suspended.suspend()
    scheduler.run(11.0)
    assert done == []
    suspended.resume()
    assert (round(suspended.boottime() - before[0]), round(suspended.monotonic() - before[1])) == (10, 0)
    scheduler.run(20.0)
    assert done == ["worked", "cleaned up"]
