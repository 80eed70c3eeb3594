"""A load: threads that stash records in concurrent transactions, of which some roll back.

Each record carries the number of its key, drawn from a counter whose row stays locked until the transaction ends; so
the numbers of a key follow the order in which its transactions commit. A ledger is written in the same transactions:
the application's own data, with which the published records must agree, whether or not a commit without an answer
took effect.
"""

import random
import threading
import time
from typing import Any

import psycopg

from outbox_core import OutboxRecord, Stasher
from outbox_core.schema import TableName, create_hold_sql, create_table_sql, notify_sql
from tests.acceptance.verdict import Item

_ROLLED_BACK = 0.2
_KEYLESS = 0.1
_SLOW = 0.05
_NO_KEY = ""
_PADDING = b" " + b"." * 80


class Load:
    """A load of records for one outbox table, which it makes.

    Args:
        dsn: the database.
        topics: the topics of its records.
        table: name of the outbox table.
        threads: number of concurrent sessions.
        keys: number of keys on each topic. The first is in every fourth transaction.
        records_per_second: wanted on average, of all threads together.
    """

    def __init__(
        self,
        dsn: str,
        topics: list[str],
        *,
        table: str = "outbox",
        threads: int = 2,
        keys: int = 20,
        records_per_second: float = 300.0,
    ) -> None:
        self._dsn = dsn
        self._topics = topics
        self._table = table
        self._ledger, self._counters = f"{table}_ledger", f"{table}_counters"
        self._keys = [f"key-{number}" for number in range(keys)]
        self._pace = records_per_second / threads
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]
        self._keyless = [number * 1_000_000_000 for number in range(threads)]
        self.rolled_back = 0
        self._make_tables()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def burst(self, count: int) -> None:
        """Commit at least that many more records in one transaction, to make a backlog."""
        generator = random.Random()
        with psycopg.connect(self._dsn) as connection:
            connection.execute(f"LOCK TABLE {self._counters} IN EXCLUSIVE MODE")  # or row locks would make deadlocks
            while count > 0:
                count -= self._stash(connection, generator, lanes=30, each=3)

    def slow_down(self, statement: str, seconds: float) -> None:
        """Let every UPDATE (mark, reset) or DELETE (purge) on the outbox take longer, so that faults often meet one."""
        name = f"{self._table}_slow_{statement.lower()}"
        with psycopg.connect(self._dsn) as connection:
            connection.execute(
                f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
                f"'BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END'"
            )
            connection.execute(
                f"CREATE TRIGGER {name} BEFORE {statement} ON {self._table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
            )

    def committed(self) -> list[Item]:
        """Read all committed records from the ledger."""
        with psycopg.connect(self._dsn) as connection:
            rows = connection.execute(f"SELECT topic, NULLIF(key, ''), n FROM {self._ledger}").fetchall()
        return [Item(*row) for row in rows]

    def pending(self) -> int:
        """Count the rows in the outbox."""
        return self._count("true")

    def harvested(self) -> int:
        """Count the records that were committed and have left the outbox."""
        with psycopg.connect(self._dsn) as connection:
            query = f"SELECT (SELECT count(*) FROM {self._ledger}) - (SELECT count(*) FROM {self._table})"
            return connection.execute(query).fetchone()[0]

    def marked_by(self, leader_ids: list[str]) -> int:
        """Count the rows in the outbox that carry one of these marks."""
        return self._count("leader_id = ANY (%s::uuid[])", leader_ids)

    def marked(self) -> int:
        """Count the rows in the outbox that carry a mark."""
        return self._count("leader_id IS NOT NULL")

    def _count(self, condition: str, *parameters: Any) -> int:
        with psycopg.connect(self._dsn) as connection:
            query = f"SELECT count(*) FROM {self._table} WHERE {condition}"
            return connection.execute(query, parameters).fetchone()[0]

    def _make_tables(self) -> None:
        lanes = [(topic, key) for topic in self._topics for key in self._keys]
        with psycopg.connect(self._dsn) as connection:
            connection.execute(create_table_sql(TableName.parse(self._table)))
            connection.execute(create_hold_sql(TableName.parse(self._table)))
            connection.execute(notify_sql(TableName.parse(self._table)))  # harvesters with `notify` listen
            connection.execute(
                f"CREATE TABLE {self._ledger} (topic text, key text, n bigint, PRIMARY KEY (topic, key, n))"
            )
            connection.execute(f"CREATE TABLE {self._counters} (topic text, key text, n bigint, UNIQUE (topic, key))")
            with connection.cursor() as cursor:
                cursor.executemany(f"INSERT INTO {self._counters} VALUES (%s, %s, 0)", lanes)

    def _run(self, number: int) -> None:
        generator = random.Random()
        connection: psycopg.Connection[Any] | None = None
        while not self._stopping.is_set():
            try:
                connection = connection or psycopg.connect(self._dsn)
                count = self._transact(connection, generator, number)
            except psycopg.Error:  # the server is away; a commit under way may have happened or not
                if connection is not None:
                    connection.close()
                connection, count = None, 1
                self._stopping.wait(0.2)
            self._stopping.wait(generator.expovariate(self._pace / count))
        if connection is not None:
            connection.close()

    def _transact(self, connection: psycopg.Connection[Any], generator: random.Random, number: int) -> int:
        count = self._stash(connection, generator, lanes=generator.randint(1, 5), each=3)
        if generator.random() < _KEYLESS:
            self._keyless[number] += 1
            self._write(connection, [Item(generator.choice(self._topics), None, self._keyless[number])])
        if generator.random() < _SLOW:
            time.sleep(generator.uniform(0, 0.1))  # others with higher ids commit before
        if generator.random() < _ROLLED_BACK:
            connection.rollback()
            self.rolled_back += count
        else:
            connection.commit()
        return count

    def _stash(self, connection: psycopg.Connection[Any], generator: random.Random, *, lanes: int, each: int) -> int:
        chosen = {(generator.choice(self._topics), generator.choice(self._keys)) for _ in range(lanes)}
        if generator.random() < 0.25:
            chosen.add((self._topics[0], self._keys[0]))
        items = []
        for topic, key in sorted(chosen):  # rows are locked in one order, or there would be deadlocks
            more = generator.randint(1, each)
            draw = f"UPDATE {self._counters} SET n = n + %s WHERE topic = %s AND key = %s RETURNING n"
            last = connection.execute(draw, (more, topic, key)).fetchone()[0]
            items += [Item(topic, key, n) for n in range(last - more + 1, last + 1)]
        self._write(connection, items)
        return len(items)

    def _write(self, connection: psycopg.Connection[Any], items: list[Item]) -> None:
        rows = [(item.topic, item.key or _NO_KEY, item.n) for item in items]
        with connection.cursor() as cursor:
            cursor.executemany(f"INSERT INTO {self._ledger} VALUES (%s, %s, %s)", rows)
        Stasher(self._table).stash_many(
            connection,
            [OutboxRecord(topic=item.topic, key=item.key, value=b"%d" % item.n + _PADDING) for item in items],
        )
