"""A small world around a settled floor: sessions that write in any interleaving, and a reader who scans from the floor.

The world checks one property after each action: a scan from the floor finds all rows that a scan from the head finds.
Otherwise it raises `BehindTheFloor`. An action is a tuple of its name and its arguments; an impossible one (such as the
commit of a session without a transaction) has no effect, so that any list of actions is a script.
"""

from typing import Any

import psycopg

from outbox_core.harvest.watermark import LowWatermark
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import NO_FLOOR, RowId, RowQuery, row_id
from outbox_core.stores.postgres.store import PostgresStore

SESSIONS = 3
KEYS = ("a", "b")
_COLUMNS = "(create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
_ROW = "now(), 't', %s, '{}', '{}'"
_NEW = f"INSERT INTO outbox {_COLUMNS}"
INSERTS = {
    "values": f"{_NEW} VALUES ({_ROW})",
    "select": f"{_NEW} SELECT {_ROW} FROM generate_series(1, 2)",
    "cte": f"WITH new AS ({_NEW} VALUES ({_ROW}) RETURNING id) SELECT count(*) FROM new",
    "conflict": f"{_NEW} VALUES ({_ROW}) ON CONFLICT DO NOTHING",
    "merge": f"MERGE INTO outbox USING (SELECT 1) AS one ON false WHEN NOT MATCHED THEN INSERT {_COLUMNS}"
    f" VALUES ({_ROW})",
    "function": "SELECT stash_by_function(%s)",
    "view": f"INSERT INTO outbox_view {_COLUMNS} VALUES ({_ROW})",
    "prepared": "EXECUTE stash_prepared (%s)",
    "copy": "",
}
_SET_UP = (
    f"""
    CREATE OR REPLACE FUNCTION stash_by_function(key text) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        BEGIN
            {_NEW} VALUES (now(), 't', key, '{{}}', '{{}}');
            RAISE EXCEPTION 'undone';
        EXCEPTION WHEN raise_exception THEN NULL;
        END;
        {_NEW} VALUES (now(), 't', key, '{{}}', '{{}}');
    END $$
    """,
    "CREATE OR REPLACE VIEW outbox_view AS SELECT * FROM outbox",
)


class BehindTheFloor(AssertionError):
    """The error raised when a scan from the floor misses a row of the table."""


class WatchedStore(PostgresStore):
    """A store with hooks for other sessions between its statements: `after_drawn` and `after_writers`."""

    after_drawn: Any = staticmethod(lambda: None)
    after_writers: Any = staticmethod(lambda: None)

    def __init__(self, database):
        super().__init__(database)
        self._query, self.table.query = self.table.query, self.query

    def rewritten(self, statement):
        """Return the statement to send instead."""
        return statement

    def query(self, statement, parameters=(), **parts):
        rows = self._query(self.rewritten(statement), parameters, **parts)
        if "is_called" in statement:
            self.after_drawn()
        elif "virtualtransaction FROM pg_locks" in statement:
            self.after_writers()
        return rows


class World:
    """Sessions, a store and a floor.

    Args:
        database: URL of a database with an outbox.
        store: class of the store.
        floor: class of the floor.
    """

    def __init__(self, database, *, store=WatchedStore, floor=LowWatermark):
        self.database = database
        self.time = 1000.0
        self.store = store(database)
        self.store.check()
        self._floor_class = floor
        self._admin = psycopg.connect(database, autocommit=True)
        for statement in _SET_UP:
            self._admin.execute(statement)
        self._sessions = [psycopg.connect(database, autocommit=True, prepare_threshold=None) for _ in range(SESSIONS)]
        for session in self._sessions:
            session.execute(f"PREPARE stash_prepared (text) AS {_NEW} VALUES (now(), 't', $1, '{{}}', '{{}}')")
        self._prepared = 0
        self.begin()

    def begin(self):
        """Begin anew: without open transactions or rows, and with a sequence that was never drawn from."""
        for session in self._sessions:
            session.rollback()
        for (gid,) in self._admin.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            self._admin.execute(f"ROLLBACK PREPARED '{gid}'")
        self._admin.execute("TRUNCATE outbox RESTART IDENTITY")
        self.floor = self._floor_class(HarvestMetrics(), lambda: self.time)
        self.highest = NO_FLOOR.id
        self.held: set[RowId] = set()
        self.left_out: frozenset[tuple[str, str]] = frozenset()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.begin()
        for session in (self._admin, *self._sessions, self.store):
            session.close()

    def play(self, script):
        """Take the actions one by one, and check the property after each."""
        for action in script:
            self.act(action)
            self.check()
            self.highest = max(self.highest, self.floor.floor.id)

    def act(self, action):
        """Take one action."""
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def check(self):
        """Raise BehindTheFloor unless a scan from the floor finds all rows that a scan from the head finds."""
        lanes = self.left_out
        above = [
            record[0]
            for record in self.store.scan(
                RowQuery(1000, without_rows=self.held, without_keys=lanes, after=self.floor.floor)
            )
        ]
        everywhere = [
            record[0]
            for record in self.store.scan(RowQuery(1000, without_rows=self.held, without_keys=lanes, after=NO_FLOOR))
        ]
        if above != everywhere:
            raise BehindTheFloor(f"floor {self.floor.floor.id}: {sorted(set(everywhere) - set(above))} unseen")

    # -- actions of writers

    def _insert(self, session, form, key):
        connection = self._sessions[session]
        if not connection.info.transaction_status:
            connection.execute("BEGIN")
        if form == "copy":
            with connection.cursor().copy(f"COPY outbox {_COLUMNS} FROM STDIN") as copy:
                copy.write(f"now\tt\t{key}\t{{}}\t{{}}\n")
        elif form == "prepared":
            connection.execute(psycopg.sql.SQL("EXECUTE stash_prepared ({})").format(key))
        else:
            connection.execute(INSERTS[form], [key])

    def _savepoint(self, session, end):
        """Insert a row in a subtransaction of its own, and keep or undo it."""
        connection = self._sessions[session]
        if not connection.info.transaction_status:
            connection.execute("BEGIN")
        connection.execute("SAVEPOINT here")
        self._insert(session, "values", "a")
        connection.execute(f"{end} SAVEPOINT here")

    def _end(self, session, how):
        connection = self._sessions[session]
        if not connection.info.transaction_status:
            return
        if how == "PREPARE":
            self._prepared += 1
            connection.execute(f"PREPARE TRANSACTION 'world-{self.database[-8:]}-{self._prepared}'")
        else:
            connection.execute(how)

    def _end_prepared(self, how):
        for (gid,) in self._admin.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared LIMIT 1"
        ).fetchall():
            self._admin.execute(f"{how} PREPARED '{gid}'")

    def _truncate(self):
        """Truncate the table, unless an open transaction would block that."""
        open_prepared = self._admin.execute(
            "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchone()[0]
        if not open_prepared and not any(session.info.transaction_status for session in self._sessions):
            self._admin.execute("TRUNCATE outbox RESTART IDENTITY")
            self.held.clear()

    # -- actions of the reader

    def _read(self, limit, after_drawn=(), after_writers=()):
        """Take a snapshot of the sequence, if one is due, and scan; play the given actions after its two statements."""
        plan = self.floor.plan(self.left_out)
        self.store.after_drawn = lambda: [self.act(action) for action in after_drawn]
        self.store.after_writers = lambda: [self.act(action) for action in after_writers]
        evidence = plan.gather(self.store)
        self.store.after_drawn = self.store.after_writers = lambda: None
        query = RowQuery(limit, without_rows=self.held, without_keys=self.left_out, after=plan.floor)
        records = self.store.scan(query)
        self.floor.scanned(plan, evidence, records, 0.0)
        self.held.update(map(row_id, records))

    def _catch_up(self, limit):
        """Read twice with a new snapshot each: the second settles the last id of the first if no writer is open."""
        for _ in range(2):
            self._wait(1.5)
            self._read(limit)

    def _purge(self, count):
        purged = sorted(self.held)[:count]
        self._admin.execute("DELETE FROM outbox WHERE id = ANY (%s)", [[row.id for row in purged]])
        self.held.difference_update(purged)

    def _reset(self):
        """Reset the floor as after a failure or with a new leader ID: the held rows can be scanned again."""
        self.held.clear()
        self.floor.reset("the script says so")

    def _leave_out(self, keys):
        """Change the keys that scans leave out, and make a plan, by which the floor learns of them."""
        self.left_out = frozenset(("t", key) for key in keys)
        self.floor.plan(self.left_out)

    def _reconnect(self):
        self.store.close()

    def _wait(self, seconds):
        self.time += seconds
