"""The load of all outboxes of a chaos run, in a process of its own: `python -m tests.chaos.load SETTINGS`.

Each outbox gets the load of the fault tests (`tests.acceptance.load`: concurrent transactions, of which some roll back,
a hot key, records without a key, late commits), and now and then a burst in one transaction, so that harvesters meet
full batches. Each outbox's ledger has its committed records.

It makes the tables, says `ready`, begins when stdin says so and ends with stdin; then it prints the number of records
that were rolled back. While the database is away it waits.
"""

import json
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self

import psycopg

from tests.acceptance.load import Load
from tests.chaos.process import CHECKOUT

_SMALL_SHARE = 0.2
_BURST_EVERY_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The load of one outbox.

    Attributes:
        dsn: the database.
        table: the outbox table.
        topics: the topics of its records.
        keys: number of keys on each topic.
        records_per_second: wanted on average.
    """

    dsn: str
    table: str
    topics: list[str]
    keys: int
    records_per_second: float


class LoadProcess:
    """The process, in the hands of the test. Its constructor makes the tables."""

    def __init__(self, settings: list[LoadSettings]) -> None:
        text = json.dumps([asdict(one) for one in settings])
        self.rolled_back = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.load", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=CHECKOUT,
            text=True,
        )
        assert self._line() == "ready", "the load does not start"

    def start(self) -> None:
        """Begin."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End it, once the database answers."""
        if self._process.poll() is None:
            self._process.stdin.close()
            self.rolled_back = int(self._line() or 0)
            self._process.wait(30)

    def discard(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def _line(self) -> str:
        return self._process.stdout.readline().strip()


_BURST = """
WITH chosen AS (
    SELECT topic, key, floor(random() * 8)::int + 1 AS more FROM {table}_counters ORDER BY random() LIMIT {lanes}
), drawn AS (
    UPDATE {table}_counters AS counter SET n = n + more FROM chosen
    WHERE (counter.topic, counter.key) = (chosen.topic, chosen.key)
    RETURNING counter.topic, counter.key, n, more
), numbered AS (
    SELECT topic, key, generate_series(n - more + 1, n) AS n FROM drawn
), noted AS (
    INSERT INTO {table}_ledger SELECT topic, key, n FROM numbered
)
INSERT INTO {table} (kafka_topic, kafka_key, kafka_value)
SELECT topic, key, convert_to(n || ' ' || repeat('.', 80), 'UTF8') FROM numbered ORDER BY n, topic, key
"""
_LANES_AT_ONCE = 40


class _Bursts:
    """Occasional transactions of many records, written by the server itself, as the load has one core at most."""

    def __init__(self, settings: LoadSettings, records_per_second: float) -> None:
        self._dsn = settings.dsn
        self._counters = f"{settings.table}_counters"
        self._burst_sql = _BURST.format(table=settings.table, lanes=_LANES_AT_ONCE)
        self._mean = records_per_second * _BURST_EVERY_SECONDS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        generator = random.Random()
        owed, paid_at = 0.0, time.monotonic()
        while not self._stopping.wait(generator.uniform(0.2, 1.8) * _BURST_EVERY_SECONDS):
            owed += (time.monotonic() - paid_at) * self._mean / _BURST_EVERY_SECONDS
            paid_at = time.monotonic()
            if owed <= 0:  # the last one was larger than what was owed
                continue
            try:
                owed -= self._burst(min(owed, 8 * self._mean))
            except psycopg.Error:  # the server is away; the commit may have happened or not
                continue

    def _burst(self, least: float) -> int:
        """Write at least so many records, and return how many they are."""
        written = 0
        with psycopg.connect(self._dsn) as connection:
            connection.execute(f"LOCK TABLE {self._counters} IN EXCLUSIVE MODE")  # or row locks would make deadlocks
            while written < least:
                written += connection.execute(self._burst_sql).rowcount
        return written


def main() -> None:
    """Make the tables and write until stdin ends."""
    settings = [LoadSettings(**one) for one in json.loads(sys.argv[1])]
    loads = [
        Load(
            one.dsn,
            one.topics,
            table=one.table,
            threads=2,
            keys=one.keys,
            records_per_second=one.records_per_second * _SMALL_SHARE,
        )
        for one in settings
    ]
    bursts = [_Bursts(one, one.records_per_second * (1 - _SMALL_SHARE)) for one in settings]
    print("ready", flush=True)  # noqa: T201
    if sys.stdin.readline():
        for part in (*loads, *bursts):
            part.start()
        sys.stdin.read()
    for part in (*bursts, *loads):
        part.stop()
    with suppress(BrokenPipeError):  # our test is gone
        print(sum(load.rolled_back for load in loads), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
