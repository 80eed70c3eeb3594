"""The history of an outbox: what harvesters and operators write into it, and what is read from it."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from uuid import uuid4

import psycopg
import pytest

from outbox_core.cli import main
from outbox_core.doctor.session import DatabaseSession
from outbox_core.doctor.status import read_status
from outbox_core.errors import OutboxError, OutboxTableError, StoreSilent, StoreUnavailable
from outbox_core.events import LeaderFenced
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.metrics import HarvestMetrics
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import Archive, archive_statements
from outbox_core.retention.dead_letters import AlreadyRestashed, DeadLetterRestash, LetterPlace
from outbox_core.retention.history import History
from outbox_core.schema import EventKind, TableName, create_history_sql, grants_sql
from outbox_core.stores.interface import Backlog, NewEvent, NewHold, NewStatistics, RowQuery, WaitingRows
from outbox_core.stores.postgres.store import PostgresStore
from outbox_core.upkeep import history as history_module
from tests.harvesting import AlwaysLeader, Scene, wait_until
from tests.services import as_role

HOUR = timedelta(hours=1)
NAME = TableName("outbox")
ROW = NewStatistics("h1", 10.0, 500, 2, 64_000, Backlog(WaitingRows(7, 1.5), WaitingRows(3, 90.0)), 0.01, 0.2)
FENCED = NewEvent(EventKind.LEADER_FENCED, "h1", 30.0, "no heartbeat for 5 s", None, 17)


@pytest.fixture
def scene(database, request):
    """Return an outbox with its history."""
    bootstrap = request.getfixturevalue("kafka_bootstrap") if "make_topic" in request.fixturenames else ""
    scene = Scene(database, bootstrap)
    scene.execute(create_history_sql(NAME))
    yield scene
    scene.close()


@pytest.fixture
def store(scene):
    """Return a store on it, as a harvester named h1 makes it."""
    store = PostgresStore(scene.database, application_name="kafka-outbox h1")
    yield store
    store.close()


def events(scene, **which):
    """Return the events of the last hour, oldest first."""
    with scene.connect() as connection:
        return History().events(connection, HOUR, **which)[::-1]


def told(scene):
    """Return kind, record and reason of the events on holds."""
    found = [(event.kind, event.record_id, event.reason) for event in events(scene) if event.topic is not None]
    # Events of one statement come in any order.
    return [event for _, group in groupby(found, itemgetter(0)) for event in sorted(group)]


def test_statistics_are_read_as_they_were_written(scene, store):
    """A row has the instance, the interval's counts, the backlog at its end and latencies; a backlog may be unknown."""
    store.history.add_statistics(ROW)
    store.history.add_statistics(ROW._replace(backlog=None, latency_p50=None, latency_p99=None))
    with scene.connect() as connection:
        first, second = History().statistics(connection, HOUR)
        assert History().statistics(connection, HOUR, limit=1) == [second]
    assert first[1:] == ("h1", 10.0, 500, 2, 64_000, 7, 1.5, 3, 90.0, 0.01, 0.2)
    assert second[6:] == (None, None, None, None, None, None)


def test_events_happened_when_they_happened(scene, store):
    """An event that was written late has the time at which it happened, with its reason and term."""
    store.history.add_events([FENCED])
    (event,) = events(scene)
    assert (event.kind, event.actor, event.reason, event.term) == ("leader_fenced", "h1", "no heartbeat for 5 s", 17)
    age = scene.execute("SELECT extract(epoch FROM now() - create_time)::float8 AS age FROM outbox_event")[0].age
    assert 29.5 < age < 60


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres"])
def test_times_are_read_whatever_the_date_style(scene, store, style):
    """History, holds and restashes are read where the session writes dates in another way than ISO."""
    for statement in archive_statements(NAME):
        scene.execute(statement)
    scene.execute(
        "INSERT INTO outbox_archive (id, create_time, kafka_topic, kafka_header_keys, kafka_header_values)"
        " VALUES (1, now(), 't', '{}', '{}')"
    )
    store.history.add_statistics(ROW)
    scene.hold("add", "t")
    place, record = LetterPlace(0, 7), OutboxRecord("t", "k", "v")
    with scene.connect() as connection:
        connection.execute(f"SET datestyle = {style}")
        (hold,), (cause,) = scene.holds.list(connection), scene.holds.causes(connection)
        (event,), (row,) = History().events(connection, HOUR), History().statistics(connection, HOUR)
        found = Archive().select(connection, "t")
        DeadLetterRestash(NAME).restash(connection, "letters", place, record)
        with pytest.raises(AlreadyRestashed) as raised:
            DeadLetterRestash(NAME).restash(connection, "letters", place, record)
    times = [hold.create_time, cause.first, cause.last, event.create_time, row.create_time, found.first, found.last]
    assert all(abs(datetime.now(UTC) - time) < HOUR for time in [*times, raised.value.before.at])


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_restash_in_a_snapshot_is_refused(scene, level):
    """A transaction that cannot see a restash that came after its snapshot stashes nothing, unless it is to do so."""
    place, record = LetterPlace(0, 7), OutboxRecord("t", "k", "v")
    restash = DeadLetterRestash(NAME).restash
    with scene.connect() as connection, scene.connect() as other:
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        connection.execute("SELECT count(*) FROM outbox_event")
        restash(other, "letters", place, record)
        other.commit()
        for call in (restash, DeadLetterRestash(NAME).check):
            with pytest.raises(OutboxError, match=f"isolation level {level.lower()}"):
                call(connection, "letters", place, record)
        assert scene.count() == 1
        restash(connection, "letters", place, record, again=True)
    assert scene.count() == 2


def test_sessions_of_the_console_see_what_others_commit(scene):
    """A console's transaction that restashes is of the level that it needs, whatever the role's default is."""
    source = psycopg.conninfo.make_conninfo(
        scene.database, options=r"-c default_transaction_isolation=repeatable\ read"
    )
    place, record = LetterPlace(0, 7), OutboxRecord("t", "k", "v")
    session = DatabaseSession(source, "outbox", application_name="console", writes=True)
    with session, session.connection.transaction():
        DeadLetterRestash(session.table).restash(session.connection, "letters", place, record)
    assert scene.count() == 1


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("outbox_event", lambda history: history.add_events([FENCED._replace(term=18)])),
        ("outbox_statistics", lambda history: history.add_statistics(ROW)),
        ("outbox_event", lambda history: history.prune()),
        ("outbox_statistics", lambda history: history.prune()),
    ],
)
def test_history_waits_for_no_standby(scene, store, table, change):
    """A commit of the history alone does not wait for a synchronous standby; the session's next one does again."""
    store.history.add_events([FENCED])
    store.history.add_statistics(ROW)
    scene.execute(f"UPDATE {table} SET create_time = now() - interval '100 days'")
    scene.execute("CREATE TABLE committed AS SELECT ''::text AS how WHERE false")
    scene.execute(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO public.committed VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$"
    )
    scene.execute(
        f"CREATE CONSTRAINT TRIGGER notes AFTER INSERT OR DELETE ON {table} DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION note()"
    )
    change(store.history)
    assert [row.how for row in scene.execute("SELECT how FROM committed")] == ["local"]
    assert store.table.query("SHOW synchronous_commit") == [("on",)]


def test_event_that_was_written_though_we_gave_up_is_not_written_twice(scene, store):
    """An event is written once, however often that is tried; one of another leadership is another event."""
    mine = FENCED._replace(leader_id=uuid4())
    for event in (mine, mine._replace(age_seconds=31.0), mine, mine._replace(leader_id=uuid4())):
        store.history.add_events([event])
    assert len(events(scene)) == 2


def test_history_is_left_alone_for_a_while_after_a_silence(scene, store):
    """A write that was not answered may still be under way: each try at once would leave another backend to wait."""
    now, tries, is_silent = [0.0], [], [True]

    class Silent:
        def add_events(self, events):
            tries.append(now[0])
            if is_silent[0]:
                raise StoreSilent("no answer")
            store.history.add_events(events)

    writer = history_module.HistoryWriter("h1", HarvestMetrics(), lambda: now[0])
    writer.note(LeaderFenced(uuid4(), "cut off", 17))
    for now[0] in (0.0, 5.0, 10.0, 50.0, 70.0, 75.0):
        writer.write(Silent(), None, leads=False)
    assert tries == [0.0, 70.0]
    now[0], is_silent[0] = 200.0, False
    writer.write(Silent(), None, leads=False)
    assert len(events(scene)) == 1


def test_pruning_keeps_statistics_for_a_week_and_events_for_ninety_days(scene, store):
    """Older rows are deleted, those of another outbox are not."""
    store.history.add_statistics(ROW)
    store.history.add_events([FENCED])
    for table, days in (("outbox_statistics", 8), ("outbox_event", 91)):
        scene.execute(f"CREATE TEMPORARY TABLE old AS SELECT * FROM {table}")
        scene.execute(f"UPDATE old SET id = id + 100, create_time = now() - interval '{days} days'")
        scene.execute(f"INSERT INTO {table} SELECT * FROM old")
        scene.execute("UPDATE old SET id = id + 100, outbox = 'public.another'")
        scene.execute(f"INSERT INTO {table} SELECT * FROM old; DROP TABLE old")
    assert store.history.prune() == 2
    assert store.history.prune() == 0
    assert scene.execute("SELECT count(*) FROM outbox_statistics")[0].count == 2
    assert scene.execute("SELECT count(*) FROM outbox_event")[0].count == 2


def test_holds_of_the_harvester_leave_events(scene, store):
    """Each hold that a harvester sets, ends or dead-letters is one event by its name, with the reason."""
    scene.fill("orders", 3)
    store.holds.add([NewHold("orders", f"k{n}", n, "refused", "too large", dead_letter=True) for n in (1, 2)])
    store.holds.add([NewHold("orders", "k1", 1, "refused", "too large")])  # there already: no event
    records = store.scan(RowQuery(1))
    store.holds.refuse_dead_letters([2], "no rights")
    assert store.holds.delete_dead_lettered([1], [records[0].create_time]) == 1
    scene.execute("DELETE FROM outbox WHERE id = 2")
    assert store.holds.release_gone() == 1
    assert told(scene) == [
        ("held", 1, "refused: too large"),
        ("held", 2, "refused: too large"),
        ("dead_letter_refused", 2, "no rights"),
        ("dead_lettered", 1, ""),
        ("released", 2, "its record is gone"),
    ]
    assert {event.actor for event in events(scene)} == {"h1"}


def test_holds_of_people_leave_events(scene, monkeypatch, capsys):
    """Each change by a command is one event for each hold: what was done, to what, by whom, and why."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", scene.database)
    monkeypatch.setattr("outbox_core.cli.hold.operator", lambda: "alice@desk")
    scene.fill("orders", 5, keys=None)
    for number in ("1", "2", "3"):
        assert main(["hold", "add", "--record", number, "--reason", "looks odd"]) == 0
    for command in (
        ["skip", "1", "--reason", "ticket 7"],
        ["dead-letter", "2"],
        ["release", "--all", "--reason", "mended"],
        ["add", "--topic", "orders", "--key", "k"],
        ["release", "--topic", "mails"],  # is not held: no event
    ):
        assert main(["hold", *command]) == 0
    assert "released 0 holds" in capsys.readouterr().out
    assert told(scene) == [
        *(("held", number, "looks odd") for number in (1, 2, 3)),
        ("skipped", 1, "ticket 7"),
        ("dead_letter_asked", 2, ""),
        ("released", 2, "mended"),
        ("released", 3, "mended"),
        ("held", None, ""),
    ]
    role = scene.execute("SELECT session_user AS name")[0].name
    assert {event.actor for event in events(scene)} == {f"alice@desk as {role}"}
    assert [event.key for event in events(scene, kinds=[EventKind.SKIPPED])] == [None]
    assert events(scene)[-1].key == "k"


def test_history_whose_ids_are_taken_stops_no_change(scene, store):
    """After logical replication, which copies rows and no sequences, holds are set and released without an event."""
    copied = "SELECT n, 'o', 'held', 'h0' FROM generate_series(1, 4) AS n"
    scene.execute(f"INSERT INTO outbox_event (id, outbox, kind, actor) {copied}")
    scene.fill("orders", 2, keys=None)
    store.holds.add([NewHold("orders", None, 1, "refused", "too large")])
    assert scene.hold("release", records=[1]) == 1
    store.holds.add([NewHold("orders", None, 1, "refused", "too large")])
    scene.execute("DELETE FROM outbox WHERE id = 1")
    assert store.holds.release_gone() == 1
    assert told(scene) == []
    store.holds.add([NewHold("orders", None, 2, "refused", "too large")])
    assert told(scene) == [("held", 2, "refused: too large")], "the sequence has caught up"


def test_history_that_is_missing_is_no_error(scene, store, caplog):
    """Without the tables, harvester and operators work as before, and no line says so; reading names the remedy."""
    scene.execute("DROP TABLE outbox_statistics, outbox_event")
    scene.fill("orders", 1, keys=None)
    store.history.add_statistics(ROW)
    store.history.add_events([FENCED])
    assert store.history.prune() == 0
    store.holds.add([NewHold("orders", None, 1, "refused", "")])
    assert scene.hold("release", records=[1]) == 1
    assert not caplog.records
    with scene.connect() as connection, pytest.raises(OutboxTableError, match="outbox schema --only history"):
        History().events(connection, HOUR)
    scene.execute(create_history_sql(NAME))
    store.history.add_events([FENCED])
    assert len(events(scene)) == 1, "it was made while the store was in use"


def test_printed_grants_suffice_and_allow_no_changes(scene, topic_name, caplog):
    """With the printed grants a harvester writes and prunes the history, and cannot alter it; without it warns once."""
    role = topic_name("harvester")
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    store = PostgresStore(as_role(scene.database, role))
    try:
        scene.execute(grants_sql(NAME, role, role))
        scene.execute(f'REVOKE ALL ON outbox_event, outbox_statistics FROM "{role}"')
        for _ in range(2):
            store.history.add_events([FENCED])
        assert caplog.text.count("GRANT SELECT, INSERT, DELETE ON") == 1
        scene.execute(grants_sql(NAME, role, role))
        store.history.add_statistics(ROW)
        store.history.add_events([FENCED])
        assert store.history.prune() == 0
        store.holds.add([NewHold("orders", None, None, "no rights", "")])
        assert [event.kind for event in events(scene)] == ["leader_fenced", "held"]
        with (
            psycopg.connect(as_role(scene.database, role)) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            connection.execute("UPDATE outbox_event SET actor = 'somebody else'")
    finally:
        store.close()
        scene.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


class _Fenced(AlwaysLeader):
    """An elector that a test fences, and lets lead again."""

    def fence(self, reason):
        """Lose the lease."""
        leader_id, self.leadership = self.leadership.leader_id, None
        self._on_event(LeaderFenced(leader_id, reason, 7))


def test_harvester_writes_its_leaderships_and_statistics(scene, make_topic, monkeypatch):
    """Leadership taken, fenced with a reason, taken again, handed over; and rows that add up to what was published."""
    monkeypatch.setattr(history_module, "STATISTICS_EVERY_SECONDS", 0.05)
    topic, metrics = make_topic(), HarvestMetrics()
    limits = {"min_metrics_interval": "20ms"}
    with scene.running(name="h1", elector_factory=_Fenced, metrics=metrics, limits=limits) as harvester:
        wait_until(lambda: scene.execute("SELECT id FROM outbox_statistics"), "the first interval has ended")
        scene.fill(topic, 50)
        published = "SELECT coalesce(sum(published), 0) AS number, sum(published_bytes) AS bytes FROM outbox_statistics"
        wait_until(lambda: scene.execute(published)[0].number == 50, "all are in some interval")
        harvester.elector.fence("a test")
        wait_until(lambda: len(events(scene)) == 2, "the fence is told")
        harvester.elector.acquire()
    assert [(event.kind, event.actor, event.reason) for event in events(scene)] == [
        ("leader_acquired", "h1", ""),
        ("leader_fenced", "h1", "a test"),
        ("leader_acquired", "h1", ""),
        ("leader_handed_over", "h1", ""),
    ]
    first, second, third, fourth = events(scene)
    assert first.leader_id == second.leader_id != third.leader_id == fourth.leader_id
    assert (first.term, second.term) == (0, 7)
    last = read_status(scene.config(), connect_seconds=60.0).database.leadership
    assert (last.kind, last.harvester) == ("leader_handed_over", "h1")
    assert scene.execute(published)[0].bytes == sum(len(str(number)) for number in range(1, 51))
    with scene.connect() as connection:
        rows = History().statistics(connection, HOUR)
    assert all(row.instance == "h1" and row.deliverable is not None for row in rows)
    assert any(row.latency_p99 for row in rows)


def test_events_wait_for_the_database(scene, store):
    """Events that cannot be written now are written later, with the age that they have by then."""
    scene.fill("orders", 1)
    time = [1000.0]
    writer = history_module.HistoryWriter("h1", HarvestMetrics(), lambda: time[-1])
    writer.note(LeaderFenced(None, "cut off"))
    nowhere = PostgresStore("host=/nowhere dbname=x")
    writer.write(nowhere.history, None, leads=False)
    time.append(1600.0)
    for _ in range(2):  # what is written once is not written again
        writer.write(store.history, None, leads=False)
    assert [event.reason for event in events(scene)] == ["cut off"]
    assert scene.execute("SELECT now() - create_time >= interval '10 min' AS is_late FROM outbox_event")[0].is_late


def test_reason_with_odd_characters_is_kept(scene, store):
    """A reason that cites a name from the leader topic is written, whatever that name is, and so is the next event."""
    writer = history_module.HistoryWriter("h1", HarvestMetrics())
    for reason in ("a\0b made a higher claim, 7", "\ud800 made a higher claim, 8", "cut off"):
        writer.note(LeaderFenced(uuid4(), reason))
    writer.write(store.history, None, leads=False)
    assert [event.reason for event in events(scene)] == [
        "a\\x00b made a higher claim, 7",
        "\\ud800 made a higher claim, 8",
        "cut off",
    ]


def test_other_outboxes_are_not_shown(scene, store):
    """An outbox whose history is shared or copied shows its own rows alone."""
    scene.stash(OutboxRecord("orders"))
    store.history.add_events([FENCED])
    scene.execute("UPDATE outbox_event SET outbox = 'public.another'")
    assert events(scene) == []


@pytest.mark.parametrize("what", ["refused", "dead letter"])
def test_history_that_refuses_an_event_stops_no_change(scene, store, caplog, what):
    """A constraint or a trigger of somebody's on the table of events is no reason for a record not to be held."""
    scene.fill("orders", 2, keys=None)
    scene.execute("ALTER TABLE outbox_event ADD CHECK (kind = 'led')")
    store.holds.add([NewHold("orders", None, 1, "refused", "too large", dead_letter=True)])
    if what == "dead letter":
        assert store.holds.delete_dead_lettered([1], [store.find([1])[0].create_time]) == 1
        assert scene.held() == []
    else:
        assert [hold.record_id for hold in scene.held()] == [1]
    assert "is not noted in the history: " in caplog.text
    assert events(scene) == []


# -- a history that somebody has locked


@pytest.fixture
def locked(scene):
    """Lock the table of events as CREATE INDEX does, with two held records; the store waits three seconds at most."""
    scene.fill("orders", 2, keys=None)
    store = PostgresStore(scene.database, statement_timeout=3.0)
    with closing(store), psycopg.connect(scene.database) as blocking:
        store.holds.add([NewHold("orders", None, record, "refused", "too large") for record in (1, 2)])
        blocking.execute("LOCK TABLE outbox_event IN SHARE MODE")
        yield store


def test_nothing_to_tidy_waits_for_no_history(locked):
    """That no record of a hold is gone is found without the table of events."""
    assert locked.holds.release_gone() == 0


def test_no_change_of_holds_waits_for_the_history(scene, locked, caplog):
    """While the table of events is locked holds are changed without an event, and a log line says so."""
    records = locked.scan(RowQuery(2))
    scene.fill("orders", 1, keys=None)
    locked.holds.add([NewHold("orders", None, 3, "refused", "too large", dead_letter=True)])
    assert "is not noted in the history: public.outbox_event is locked" in caplog.text
    assert locked.holds.refuse_dead_letters([3], "no rights") == 1
    assert locked.holds.delete_dead_lettered([1], [records[0].create_time]) == 1
    scene.execute("DELETE FROM outbox WHERE id = 2")
    assert locked.holds.release_gone() == 1
    assert locked.holds.read().ids == {3}


def test_tidying_waits_for_nobody(scene, store):
    """A hold whose record is gone stays while somebody locks the table of holds; the holds are known all the same."""
    scene.fill("orders", 2, keys=None)
    store.holds.add([NewHold("orders", None, record, "refused", "too large") for record in (1, 2)])
    scene.execute("DELETE FROM outbox WHERE id = 1")
    cache = HoldCache(HarvestMetrics())
    with psycopg.connect(scene.database) as blocking:
        blocking.execute("LOCK TABLE outbox_hold IN SHARE MODE")
        assert cache.read(store).ids == {1, 2}
        assert cache.is_known
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            store.holds.release_gone()
    assert store.holds.release_gone() == 1
