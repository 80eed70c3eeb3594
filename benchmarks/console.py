"""The time of each answer of the console while 10 million records are pending.

    python -m benchmarks.console [--rows 10000000] [--rounds 20] [--dsn DSN --bootstrap HOST:PORT]

With `--dsn` the outbox that is there is asked, and nothing is written; else one is made, with 5,000 held records and a
week of statistics.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psycopg

from benchmarks.stage import Services, machine, services
from outbox_core.config import HarvestConfig
from outbox_core.console import Console, User
from outbox_core.console.messages import Request
from outbox_core.doctor.session import DatabaseSession
from outbox_core.schema import TableName, create_history_sql, create_hold_sql, create_table_sql

_ROWS = 10_000_000
_ROUTES = (
    "status",
    "statistics?hours=3",
    "statistics?hours=168",
    "events",
    "timeline",
    "topics",
    "keys?topic=topic-7",
    "records",
    "records/{last}",
    "records?topic=topic-7&key=key-77",
    "records?topic=nowhere",
    "records?header=trace&header_value=nothing",
    "holds",
    "holds/list?limit=1000",
    "findings",
    "writers",
)
_FILL = (
    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
    "SELECT 'topic-' || n %% 20, 'key-' || n %% 100000, convert_to(repeat('x', 100), 'UTF8'), ARRAY['trace'], "
    "ARRAY[convert_to('t' || n, 'UTF8')] FROM generate_series(1, %s) AS n"
)
_HOLD = (
    "INSERT INTO outbox_hold (outbox, kafka_topic, kafka_key, record_id, reason, error) "
    "SELECT 'public.outbox', kafka_topic, kafka_key, id, 'refused', 'too large: ' || id FROM outbox "
    "WHERE id <= 20000 AND id % 4 = 0"
)
_STATISTICS = (
    "INSERT INTO outbox_statistics (create_time, outbox, instance, interval_seconds, published, failed, "
    "published_bytes, deliverable) SELECT now() - n * interval '10 seconds', 'public.outbox', 'h', 10, 60, 0, 1, n "
    "FROM generate_series(60480, 1, -1) AS n"
)


def _prepare(dsn: str, rows: int) -> None:
    name = TableName("outbox")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for made in (create_table_sql(name), create_hold_sql(name), create_history_sql(name)):
            connection.execute(made)
        connection.execute(_FILL, (rows,))
        connection.execute(_HOLD)
        connection.execute(_STATISTICS)
        connection.execute("ANALYZE")


@contextmanager
def _outbox(options: argparse.Namespace) -> Iterator[Services]:
    if options.dsn:
        yield Services(options.dsn, options.bootstrap)
        return
    with services() as place:
        _prepare(place.dsn, options.rows)
        yield place


class _Answers(NamedTuple):
    """The milliseconds of each answer, and the CPU time of console and database together for one, in milliseconds."""

    times: list[float]
    cpu: float


def _count_cpu(spent: list[float]) -> None:
    """Add the milliseconds of CPU of each session's server process to a list when the session ends."""
    close = DatabaseSession.close

    def counted(session: DatabaseSession) -> None:
        with suppress(OSError):
            told = Path(f"/proc/{session.connection.info.backend_pid}/schedstat").read_text()
            spent.append(int(told.split()[0]) / 1e6)
        close(session)

    DatabaseSession.close = counted  # type: ignore[method-assign]


def _measure(console: Console, route: str, rounds: int, spent: list[float]) -> _Answers:
    path, _, query = route.partition("?")
    request = Request(method="GET", path=f"/api/outboxes/bench/{path}", query=query, user=User("bench"))
    times: list[float] = []
    spent.clear()
    begun_cpu = time.process_time()
    for _ in range(rounds):
        begun = time.perf_counter()
        answer = console.handle(request)
        times.append((time.perf_counter() - begun) * 1000)
        if answer.status != 200:
            raise SystemExit(f"{route}: {answer.body.decode()}")
        time.sleep(0.05)
    return _Answers(times, (sum(spent) + (time.process_time() - begun_cpu) * 1000) / rounds)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=_ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dsn")
    parser.add_argument("--bootstrap", default="127.0.0.1:9092")
    options = parser.parse_args()
    with _outbox(options) as place:
        config = HarvestConfig(data_source=place.dsn, base_kafka_config={"bootstrap.servers": place.bootstrap})
        with psycopg.connect(place.dsn) as connection:
            (last, pending), *_ = connection.execute(
                "SELECT (SELECT max(id) FROM outbox), (SELECT reltuples::bigint FROM pg_class WHERE relname = 'outbox')"
            )
        console = Console({"bench": config})
        print(f"about {pending:,} records pending; {options.rounds} rounds; {machine()}\n")
        print("| Route | median | slowest | CPU |\n|---|---|---|---|")
        spent: list[float] = []
        _count_cpu(spent)
        for route in _ROUTES:
            times, cpu = _measure(console, route.format(last=last), options.rounds, spent)
            shown = route.replace("{last}", "<the newest>")
            print(f"| `{shown}` | {statistics.median(times):.0f} ms | {max(times):.0f} ms | {cpu:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
