"""The settled floor on a real PostgreSQL: in no interleaving of writers and readers is a committed row behind it."""

from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.watermark import LowWatermark
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import NO_FLOOR, Floor, RowQuery
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.store import PostgresStore, mark_parts, scan_parts
from tests.harvesting import Scene
from tests.integration.stores.floor_world import INSERTS, KEYS, SESSIONS, BehindTheFloor, WatchedStore, World

_sessions = st.integers(0, SESSIONS - 1)
_inserting = st.tuples(st.just("insert"), _sessions, st.sampled_from(list(INSERTS)), st.sampled_from(KEYS))
_ending = st.tuples(
    st.just("end"), _sessions, st.sampled_from(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK", "PREPARE", "PREPARE"])
)
_writing = st.one_of(
    _inserting,
    _ending,
    st.tuples(st.just("savepoint"), _sessions, st.sampled_from(["RELEASE", "ROLLBACK TO"])),
    st.tuples(st.just("end_prepared"), st.sampled_from(["COMMIT", "COMMIT", "ROLLBACK"])),
)
_meanwhile = st.lists(_writing, max_size=2)
_reading = st.one_of(
    st.tuples(st.just("read"), st.sampled_from([1, 2, 10]), _meanwhile, _meanwhile),
    st.tuples(st.just("wait"), st.sampled_from([1.5, 6.0])),
    st.tuples(st.just("purge"), st.integers(1, 3)),
    st.tuples(st.just("leave_out"), st.sampled_from(["", "a", "b", "ab"])),
    st.sampled_from([("reset",), ("truncate",), ("reconnect",)]),
)
_catching_up = st.tuples(st.just("catch_up"), st.sampled_from([2, 10, 10]))
_round = st.tuples(_inserting, _writing, _ending, _ending, _writing, _catching_up, _reading, _writing)
_scripts = st.tuples(st.lists(_catching_up, max_size=1), st.lists(_round, min_size=3, max_size=8)).map(
    lambda parts: [*parts[0], *(action for each in parts[1] for action in each)]
)


@pytest.fixture(params=["binary", "text"])
def outbox(request, database):
    """URL of a database with an outbox, whose ids are an identity or a bigserial."""
    Scene(database, "", layout=request.param)
    return database


@pytest.fixture
def scene(database):
    """A fresh outbox of the binary layout."""
    return Scene(database, "")


def test_no_committed_row_is_ever_behind_the_floor_unseen(outbox):
    """In any interleaving of sessions with the store's statements, no committed row is missed below the floor."""
    rose = []

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_scripts)
    def explore(script):
        world.begin()
        world.play(script)
        assert not world.floor.off
        rose.append(world.highest > 0)

    with World(outbox) as world:
        explore()
    assert sum(rose) > len(rose) / 10, "there hardly ever was a floor"


def _insert(session):
    return ("insert", session, "values", "a")


_LATE_COMMIT = [
    _insert(0),
    _insert(1),
    ("end", 1, "COMMIT"),
    ("read", 10),
    ("wait", 6),
    ("read", 10),
    ("end", 0, "COMMIT"),
]
_PREPARED = [_insert(0), ("end", 0, "PREPARE"), *_LATE_COMMIT[1:-1], ("end_prepared", "COMMIT")]
_PREPARED_LATER = [
    *(_insert(0), _insert(1), ("end", 1, "COMMIT"), ("read", 10), ("end", 0, "PREPARE")),
    *(("wait", 6), ("read", 10), ("wait", 6), ("read", 10), ("end_prepared", "COMMIT")),
]
_FRESH_SEQUENCE = [("read", 10), _insert(0), ("end", 0, "COMMIT")]
_BETWEEN_THE_STATEMENTS = [("read", 10, [_insert(0)], []), ("read", 10), ("end", 0, "COMMIT")]
_LIMITED = [*(_insert(0) for _ in range(4)), ("end", 0, "COMMIT"), ("read", 2), ("read", 1)]
_GIVEN_BACK = [_insert(0), ("end", 0, "COMMIT"), ("read", 10), ("reset",)]
_LEFT_OUT = [_insert(0), ("end", 0, "COMMIT"), ("leave_out", "a"), ("read", 10), ("leave_out", "")]
_TRUNCATED = [*_GIVEN_BACK[:-1], ("purge", 1), ("truncate",), *_LIMITED[:4], ("end", 0, "COMMIT")]


class _Pids(WatchedStore):
    """A store that knows writers by pid, which a prepared transaction does not have."""

    writers = sql.OPEN_WRITERS.replace("DISTINCT virtualtransaction", "DISTINCT pid::text").replace(
        "AND granted", "AND granted AND pid IS NOT NULL"
    )

    def rewritten(self, statement):
        return self.writers if statement == sql.OPEN_WRITERS else statement


class _WaitsForNobody(_Pids):
    writers = sql.OPEN_WRITERS.replace("AND granted", "AND false")


class _TakesAFreshSequenceAtItsWord(WatchedStore):
    def rewritten(self, statement):
        return statement.replace("WHEN is_called THEN", "WHEN is_called OR true THEN")


class _LooksAtWritersFirst(WatchedStore):
    def __init__(self, database):
        super().__init__(database)
        self._snapshot, self.sequence.snapshot = self.sequence.snapshot, self.snapshot

    def snapshot(self):
        after_drawn, self.after_drawn = self.after_drawn, lambda: None
        writers = self._snapshot().writers
        after_drawn()
        return self._snapshot()._replace(writers=writers)


class _AnyIncarnationWillDo(WatchedStore):
    def __init__(self, database):
        super().__init__(database)
        self._format, self.table.format = self.table.format, self.format

    def format(self, statement, **parts):
        statement = self._format(statement, **parts)
        valid = statement.find("SELECT CASE\n                WHEN pg_relation_filenode")
        if valid >= 0:
            end = statement.index("END)", valid)
            statement = (
                f"{statement[:valid]}SELECT coalesce(%(floor)s::bigint + 1, {NO_FLOOR.id}){statement[end + 3 :]}"
            )
        return statement


class _RisesBeyondTheLimit(LowWatermark):
    def _rise_to(self, reached):
        super()._rise_to(max(reached, self._settled))


class _IsNotReset(LowWatermark):
    def reset(self, reason):
        pass


class _IgnoresWhatIsLeftOut(LowWatermark):
    def plan(self, left_out):
        del left_out
        return super().plan(frozenset())


@pytest.mark.parametrize(
    ("broken", "script"),
    [
        ({"store": _WaitsForNobody}, _LATE_COMMIT),
        ({"store": _Pids}, _PREPARED),
        ({"store": _Pids}, _PREPARED_LATER),
        ({"store": _TakesAFreshSequenceAtItsWord}, _FRESH_SEQUENCE),
        ({"store": _LooksAtWritersFirst}, _BETWEEN_THE_STATEMENTS),
        ({"store": _AnyIncarnationWillDo}, _TRUNCATED),
        ({"floor": _RisesBeyondTheLimit}, _LIMITED),
        ({"floor": _IsNotReset}, _GIVEN_BACK),
        ({"floor": _IgnoresWhatIsLeftOut}, _LEFT_OUT),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_each_premise_is_needed(outbox, broken, script):
    """Each interleaving is harmless as it is, and hides a row once one premise of the proof is dropped."""
    with World(outbox) as world:
        world.play(script)
    with World(outbox, **broken) as world, pytest.raises(BehindTheFloor):
        world.play(script)


# -- cost of statements


def _buffers(store, statement, parameters):
    """Return the number of pages that a statement touches in a store's own session."""
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
    (plans,) = store.table.connected().execute(explain, parameters).fetchone()
    return plans[0]["Plan"]["Shared Hit Blocks"] + plans[0]["Plan"]["Shared Read Blocks"]


@pytest.mark.parametrize("mode", ["mark", "scan"])
def test_dead_rows_are_not_waded_through(scene, mode):
    """Under a held snapshot a mark or scan from the floor touches few pages, one from the head hundreds."""
    scene.fill("t", 20_000)
    store, floor, me = PostgresStore(scene.database), LowWatermark(HarvestMetrics(), lambda: 1000.0), uuid4()
    with scene.connect() as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT FROM outbox LIMIT 1")
        while True:
            plan = floor.plan(frozenset())
            evidence = plan.gather(store)
            if mode == "mark":
                records = store.mark(me, RowQuery(5_000, after=plan.floor)).records
                store.purge(me, [record[0] for record in records], [record[7] for record in records])
            else:
                records = store.scan(RowQuery(5_000, after=plan.floor))
                store.delete_published([record[0] for record in records], [record[7] for record in records])
            floor.scanned(plan, evidence, records, 0.0)
            if not records:
                break
        layout, query = store.table.layout(), RowQuery(5_000)
        parts = mark_parts(layout, store.table.quoted, query) if mode == "mark" else scan_parts(layout, query)
        statement = store.table.format(sql.MARK if mode == "mark" else sql.SCAN, **parts)
        parameters = {"leader_id": me, **store._parameters(query)}
        assert floor.floor.id == 20_000
        assert _buffers(store, statement, parameters | store.sequence.floor_parameters(floor.floor)) < 50
        assert _buffers(store, statement, parameters | store.sequence.floor_parameters(NO_FLOOR)) > 200
    store.close()


# -- tables without a floor


_NO_IDENTITY = "ALTER TABLE outbox ALTER id DROP IDENTITY; CREATE SEQUENCE own"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("ALTER TABLE outbox ALTER id SET CACHE 20", "CACHE 20"),
        ("ALTER TABLE outbox ALTER id SET CYCLE", "cycles"),
        ("CREATE TABLE child () INHERITS (outbox)", "inherited"),
        (_NO_IDENTITY, "not simply drawn"),
        (f"{_NO_IDENTITY}; ALTER TABLE outbox ALTER id SET DEFAULT nextval('own') * 2", "not simply drawn"),
    ],
)
@pytest.mark.parametrize("meanwhile", [True, False], ids=["meanwhile", "before"])
def test_tables_that_cannot_have_one(scene, change, reason, meanwhile):
    """A table whose ids cannot prove a floor is detected, also if it changes while a snapshot is taken."""
    store = WatchedStore(scene.database)
    if meanwhile and "IDENTITY" not in change:
        store.after_drawn = lambda: scene.execute(change)
    else:
        scene.execute(change)
    assert reason in store.sequence.snapshot().unusable
    store.close()


def test_a_table_that_is_away_says_nothing_of_its_ids(scene):
    """It is an outage, rather than a table without a floor for good."""
    store = WatchedStore(scene.database)
    store.table.layout()
    scene.execute("ALTER TABLE outbox RENAME TO elsewhere")
    with pytest.raises(StoreUnavailable):
        store.sequence.snapshot()
    scene.execute("ALTER TABLE elsewhere RENAME TO outbox")
    assert not store.sequence.snapshot().unusable
    store.close()


def test_sequence_that_is_not_the_default_one(scene):
    """Ids from a sequence of the user's own can prove a floor, and the snapshot reads that sequence."""
    scene.execute('ALTER TABLE outbox ALTER id DROP IDENTITY; CREATE SEQUENCE "My %seq" START 100')
    scene.execute("ALTER TABLE outbox ALTER id SET DEFAULT nextval('\"My %seq\"')")
    store = PostgresStore(scene.database)
    assert store.sequence.snapshot()[::3] == (99, "")
    scene.fill("t", 3)
    assert store.sequence.snapshot().last_id == 102
    store.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_table_that_is_made_anew(scene, is_kept):
    """The ids of a table made anew are those of its own sequence, on the connection that has read the old one, too."""
    scene.fill("t", 100)
    store = PostgresStore(scene.database)
    assert store.sequence.snapshot().last_id == 100
    scene.execute("ALTER TABLE outbox RENAME TO outbox_old")
    scene.execute("CREATE TABLE outbox (LIKE outbox_old INCLUDING ALL)")
    if not is_kept:
        scene.execute("DROP TABLE outbox_old")
        with pytest.raises(StoreUnavailable, match=r"outbox or its sequence was replaced.*outbox_id_seq"):
            store.sequence.snapshot()
    scene.fill("t", 2)
    sight = store.sequence.snapshot()
    assert (sight.last_id, sight.unusable) == (2, "")
    store.close()


def test_sequence_at_its_end(scene):
    """The last id that a sequence can draw is a floor, too: marks and scans find what is left below."""
    scene.execute("SELECT setval('outbox_id_seq', 9223372036854775804)")
    scene.fill("t", 2)
    with pytest.raises(psycopg.errors.CheckViolation):
        scene.fill("t", 1)
    store = PostgresStore(scene.database)
    sight = store.sequence.snapshot()
    assert sight.last_id == 2**63 - 1
    assert store.scan(RowQuery(10, after=Floor(sight.last_id, sight.place))) == []
    assert len(store.scan(RowQuery(10))) == 2
    store.close()


def test_role_that_may_not_read_the_sequence(scene, topic_name):
    """Without the right to read the sequence the snapshot names the missing grant, and scans still work."""
    role = topic_name("role")
    grants = f'GRANT SELECT, UPDATE, DELETE ON outbox TO "{role}"; GRANT SELECT ON outbox_hold TO "{role}"'
    scene.execute(f'CREATE ROLE "{role}" LOGIN; {grants}')
    scene.fill("t", 3)
    store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))
    assert store.sequence.snapshot().unusable.startswith("GRANT SELECT ON SEQUENCE public.outbox_id_seq")
    assert len(store.scan(RowQuery(10))) == 3
    store.close()
    scene.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')
