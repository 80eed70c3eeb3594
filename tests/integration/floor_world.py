"""A small world around a settled floor: sessions that write in any interleaving, and a reader who scans from the floor.

The world checks one property after each action: a scan from the floor finds what a scan from the head finds. It says
`BehindTheFloor` where it does not. An action is a tuple of its name and its arguments; actions that make no sense just
now (committing what is not open) do nothing, so that any list of actions is a script.
"""

from typing import Any

import psycopg

from outbox_core.harvest.floor import SettledFloor
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_FLOOR
from outbox_core.stores.postgres import PostgresStore

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
    """A row is in the table that a scan from the floor does not find."""


class WatchedStore(PostgresStore):
    """A store between whose statements other sessions act: `after_drawn` and `after_writers` are called then."""

    after_drawn: Any = staticmethod(lambda: None)
    after_writers: Any = staticmethod(lambda: None)

    def _query(self, statement, parameters=()):
        rows = super()._query(statement, parameters)
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

    def __init__(self, database, *, store=WatchedStore, floor=SettledFloor):
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
        """A fresh start: no open transaction, an empty table, a sequence that was never drawn from."""
        for session in self._sessions:
            session.rollback()
        for (gid,) in self._admin.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            self._admin.execute(f"ROLLBACK PREPARED '{gid}'")
        self._admin.execute("TRUNCATE outbox RESTART IDENTITY")
        self.floor = self._floor_class(HarvestMetrics(), lambda: self.time)
        self.highest = NO_FLOOR.id
        self.held: set[int] = set()
        self.left_out: frozenset[tuple[str, str]] = frozenset()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.begin()
        for session in (self._admin, *self._sessions, self.store):
            session.close()

    def play(self, script):
        """Take the actions one by one."""
        for action in script:
            self.act(action)
            self.check()
            self.highest = max(self.highest, self.floor.floor.id)

    def act(self, action):
        """Take one action."""
        name, *arguments = action
        getattr(self, f"_{name}")(*arguments)

    def check(self):
        """Whoever looks from the floor must find what he who looks from the head finds."""
        lanes = self.left_out
        above = [record[0] for record in self.store.scan(1000, self.held, lanes, self.floor.floor)]
        everywhere = [record[0] for record in self.store.scan(1000, self.held, lanes, NO_FLOOR)]
        if above != everywhere:
            raise BehindTheFloor(f"floor {self.floor.floor.id}: {sorted(set(everywhere) - set(above))} unseen")

    # -- what writers do

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
        """An insert in a subtransaction of its own, kept or undone."""
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
        """Only while nobody is writing, who would block it."""
        open_prepared = self._admin.execute(
            "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchone()[0]
        if not open_prepared and not any(session.info.transaction_status for session in self._sessions):
            self._admin.execute("TRUNCATE outbox RESTART IDENTITY")
            self.held.clear()

    # -- what the reader does

    def _read(self, limit, after_drawn=(), after_writers=()):
        """A look, if one is due, and a scan; what others do in between is given as actions."""
        reading = self.floor.begin(self.left_out)
        self.store.after_drawn = lambda: [self.act(action) for action in after_drawn]
        self.store.after_writers = lambda: [self.act(action) for action in after_writers]
        look = reading.look(self.store)
        self.store.after_drawn = self.store.after_writers = lambda: None
        records = self.store.scan(limit, self.held, self.left_out, reading.floor)
        self.floor.ended(reading, look, records, 0.0)
        self.held.update(record[0] for record in records)

    def _catch_up(self, limit):
        """Two readings, each with a look of its own: S is read, and settled if nobody is in the way."""
        for _ in range(2):
            self._wait(1.5)
            self._read(limit)

    def _purge(self, count):
        purged = sorted(self.held)[:count]
        self._admin.execute("DELETE FROM outbox WHERE id = ANY (%s)", [purged])
        self.held.difference_update(purged)

    def _reset(self):
        """A failure, an abort, a new leader ID: what is in hand is given back."""
        self.held.clear()
        self.floor.reset("the script says so")

    def _leave_out(self, keys):
        """A change of what scans leave out, to be known to the floor by its next reading."""
        self.left_out = frozenset(("t", key) for key in keys)
        self.floor.begin(self.left_out)

    def _reconnect(self):
        self.store.close()

    def _wait(self, seconds):
        self.time += seconds
