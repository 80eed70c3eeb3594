"""Rows/s of stashing by each adapter, and what tracing and serializers cost (`make bench-stash`).

Each case writes records of about 100 bytes in transactions of 100: one by one (`stash`) or at once (`stash_many`). The
client's CPU time for a record stands beside the rate, since it is what the code can change. With OTHER=/path/to/it
another version writes the same, in turn with this one, and the result is the median of the rounds' quotients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_TRANSACTION = 100
_TOPIC = "bench"
_OFF = ""
_ON = ("tracing", "orjson", "json")

Figures = dict[str, dict[str, tuple[float, float]]]
"""Of each version or feature, and of each case: rows/s, and microseconds of CPU for a row."""


def cases(dsn: str, options: dict[str, Any]) -> dict[str, Callable[[int], None]]:
    """Return the writers of so many transactions, by name."""
    return {**_bare(dsn, options), **_sqlalchemy(dsn, options), **_django(dsn, options)}


def _records() -> list[Any]:
    from outbox_core import OutboxRecord

    return [OutboxRecord(_TOPIC, number, {"total": number, "text": "x" * 80}) for number in range(_TRANSACTION)]


def _bare(dsn: str, options: dict[str, Any]) -> dict[str, Callable[[int], None]]:
    import psycopg

    from outbox_core import Stasher

    stasher = Stasher("outbox", **options)
    connection = psycopg.connect(dsn)

    def one_by_one(transactions: int) -> None:
        for _ in range(transactions):
            with connection.transaction():
                for record in _records():
                    stasher.stash(connection, record)

    def at_once(transactions: int) -> None:
        for _ in range(transactions):
            with connection.transaction():
                stasher.stash_many(connection, _records())

    return {"psycopg stash": one_by_one, "psycopg stash_many": at_once}


def _sqlalchemy(dsn: str, options: dict[str, Any]) -> dict[str, Callable[[int], None]]:
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    import outbox_sqlalchemy

    outbox = outbox_sqlalchemy.Outbox(**options)
    url = outbox_sqlalchemy.sqlalchemy_url(dsn)
    engine = create_engine(url)

    def one_by_one(transactions: int) -> None:
        for _ in range(transactions):
            with Session(engine) as session, session.begin():
                for record in _records():
                    outbox.stash(session, record)

    def at_once(transactions: int) -> None:
        for _ in range(transactions):
            with Session(engine) as session, session.begin():
                outbox.stash_many(session, _records())

    async def asynchronous(transactions: int, *, many: bool) -> None:
        async_engine = create_async_engine(url)
        for _ in range(transactions):
            async with AsyncSession(async_engine) as session, session.begin():
                if many:
                    await outbox.astash_many(session, _records())
                else:
                    for record in _records():
                        await outbox.astash(session, record)
        await async_engine.dispose()

    return {
        "SQLAlchemy stash": one_by_one,
        "SQLAlchemy stash_many": at_once,
        "SQLAlchemy astash": lambda transactions: asyncio.run(asynchronous(transactions, many=False)),
        "SQLAlchemy astash_many": lambda transactions: asyncio.run(asynchronous(transactions, many=True)),
    }


def _django(dsn: str, options: dict[str, Any]) -> dict[str, Callable[[int], None]]:
    import django
    from django.conf import settings
    from django.db import transaction
    from psycopg.conninfo import conninfo_to_dict

    server = conninfo_to_dict(dsn)
    names = {"NAME": "dbname", "HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password"}
    database = {"ENGINE": "django.db.backends.postgresql", **{key: server.get(name, "") for key, name in names.items()}}
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=["outbox_django"], USE_TZ=True)
    django.setup()
    from outbox_django import OutboxTable

    outbox = OutboxTable("outbox", **options)

    def one_by_one(transactions: int) -> None:
        for _ in range(transactions):
            with transaction.atomic():
                for record in _records():
                    outbox.stash(record)

    def at_once(transactions: int) -> None:
        for _ in range(transactions):
            with transaction.atomic():
                outbox.stash_many(_records())

    return {"Django stash": one_by_one, "Django stash_many": at_once}


def _work(dsn: str, rows: int, feature: str) -> None:
    """Measure all cases in this process, and print rate and microseconds of CPU for a row of each."""
    options: dict[str, Any] = {}
    if feature == "tracing":
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
    elif feature == "orjson":
        import orjson

        options["serializer"] = orjson.dumps
    elif feature == "json":
        options["serializer"] = json.dumps
    transactions = max(1, rows // _TRANSACTION)
    measured = {}
    for name, write in cases(dsn, options).items():
        write(max(1, transactions // 10))
        began, began_cpu = time.perf_counter(), time.process_time()
        write(transactions)
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        count = transactions * _TRANSACTION
        measured[name] = (count / seconds, cpu / count * 1e6)
    sys.stdout.write(json.dumps(measured))


def _measure(dsn: str, checkout: Path, rows: int, feature: str) -> dict[str, tuple[float, float]]:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE outbox")
    # -P: modules beside this one have names of the standard library.
    command = [sys.executable, "-P", __file__, "--worker", dsn, "--rows", str(rows), "--feature", feature]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    measured: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return measured


def _rounds(
    dsn: str, other: Path | None, rows: int, number: int
) -> Iterator[dict[str, dict[str, tuple[float, float]]]]:
    """Yield the figures of each round: this version's and the other's, and this one's with each feature."""
    here = Path(__file__).resolve().parent.parent
    for turn in range(number):
        found = {}
        places = [("this", here)] if other is None else [("this", here), ("other", other.resolve())]
        for name, checkout in places if turn % 2 else reversed(places):
            found[name] = _measure(dsn, checkout, rows, _OFF)
        for feature in _ON:
            found[feature] = _measure(dsn, here, rows, feature)
        yield found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--worker", metavar="DSN", help=argparse.SUPPRESS)
    parser.add_argument("--feature", default=_OFF, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker, options.rows, options.feature)
        return
    from rich.console import Console
    from rich.table import Table

    from benchmarks.stage import fill, machine
    from devstack.stack import DevStack

    console = Console(width=140)
    console.print(machine())
    with DevStack(embedded=True) as stack:
        dsn = stack.postgres.create_database("bench")
        fill(dsn, _TOPIC, rows=0, keys=1)
        rounds = list(_rounds(dsn, options.other, options.rows, options.rounds))
    table = Table(
        title=f"{options.rows:,} records of a case, medians of {options.rounds} rounds: rows/s (µs of CPU a row)"
    )
    names = [name for name in ("other", "this", *_ON) if name in rounds[0]]
    for column in ("case", *names, "rate of other", "CPU of other"):
        table.add_column(column, justify="right")
    for case in rounds[0]["this"]:
        cells = [_cell([found[name][case] for found in rounds]) for name in names]
        ratios = [_ratio(rounds, case, place) for place in (0, 1)] if options.other else ["", ""]
        table.add_row(case, *cells, *ratios)
    console.print(table)


def _cell(figures: list[tuple[float, float]]) -> str:
    rate, cpu = (statistics.median(column) for column in zip(*figures, strict=True))
    return f"{rate:,.0f} ({cpu:.0f})"


def _ratio(rounds: list[Figures], case: str, place: int) -> str:
    return f"{statistics.median(found['this'][case][place] / found['other'][case][place] for found in rounds):.0%}"


if __name__ == "__main__":
    main()
