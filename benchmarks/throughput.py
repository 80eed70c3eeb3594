"""Throughput of the harvester beside the raw limits of the same machine in the same run (`make bench`).

Limits, each taken right before the harvest it stands beside:

- *mark + delete*: the store's own statements in a loop on one connection, nothing published;
- *produce*: the same records through a bare producer with a delivery callback, nothing read or deleted;
- *lockstep*: with few keys the order of each key allows one record of it per round trip, so the limit is a bare loop
  that produces one record for each key, waits for all acknowledgements and deletes the rows.

A harvest does mark, delete and produce for every record, with the broker and the database on the same cores. Doing one
after the other would reach 1 / (1/a + 1/b) records/s; the table shows ours against that (`one after the other`) for
many keys, and against the lockstep loop for few.
"""

from __future__ import annotations

import argparse
import statistics
import time
from uuid import uuid4

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.stage import VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, services
from outbox_core.kafka import make_producer
from outbox_core.stores.postgres import PostgresStore

_BATCH = 5_000
_COLUMNS = ("keys", "records", "mark + delete /s", "produce /s", "limit /s", "harvester /s", "of limit", "RSS MiB")
_PRODUCER = {"enable.idempotence": True, "linger.ms": 5, "queue.buffering.max.messages": 200_000}


def mark_and_delete(dsn: str, rows: int) -> float:
    """Records/s of the store's mark and purge alone."""
    store, leader_id, done = PostgresStore(dsn), uuid4(), 0
    store.check()
    began = time.perf_counter()
    while done < rows:
        records = store.mark(leader_id, _BATCH).records
        store.purge(leader_id, [record[0] for record in records])
        done += len(records)
    store.close()
    return rows / (time.perf_counter() - began)


def produce(bootstrap: str, topic: str, rows: int, keys: int) -> float:
    """Records/s of a bare producer with callback and id header."""
    producer = make_producer({"bootstrap.servers": bootstrap, **_PRODUCER})
    acknowledged = 0

    def on_delivery(error: object, _message: object) -> None:
        nonlocal acknowledged
        acknowledged += error is None

    value = b"x" * VALUE_BYTES
    producer.list_topics(topic)
    began = time.perf_counter()
    for number in range(rows):
        headers = [("outbox-id", b"bench.public.outbox:%d" % number)]
        producer.produce(topic, value, f"key-{number % keys}", on_delivery=on_delivery, headers=headers)
        if number % 500 == 0:
            producer.poll(0)
    producer.flush()
    seconds = time.perf_counter() - began
    if acknowledged != rows:
        raise SystemExit(f"the bare producer lost {rows - acknowledged} of {rows} records")
    return rows / seconds


def lockstep(services: Services, topic: str, rows: int, keys: int) -> float:
    """Records/s of: produce one record for each key, wait for all of them, delete their rows, again."""
    producer = make_producer({"bootstrap.servers": services.bootstrap, **_PRODUCER, "linger.ms": 0})
    value = b"x" * VALUE_BYTES
    with psycopg.connect(services.dsn, autocommit=True) as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM outbox ORDER BY id LIMIT %s", (rows,))]
        producer.list_topics(topic)
        began = time.perf_counter()
        for start in range(0, rows, keys):
            for number in range(keys):
                producer.produce(topic, value, f"key-{number}")
            producer.flush()
            chunk = "{" + ",".join(map(str, ids[start : start + keys])) + "}"
            connection.execute("DELETE FROM outbox WHERE id = ANY (%s::bigint[])", (chunk,), prepare=True)
        return rows / (time.perf_counter() - began)


def one_round(services: Services, rows: int, keys: int) -> dict[str, float]:
    """Raw limits, then a harvest of the same size."""
    topic = fresh_topic("bench")
    measured: dict[str, float] = {}
    fill(services.dsn, topic, rows=rows, keys=keys)
    if keys > 1_000:
        measured["mark + delete"] = mark_and_delete(services.dsn, rows)
        measured["produce"] = produce(services.bootstrap, fresh_topic("raw"), rows, keys)
        measured["limit"] = 1 / (1 / measured["mark + delete"] + 1 / measured["produce"])
    else:
        measured["limit"] = lockstep(services, fresh_topic("raw"), rows, keys)
    fill(services.dsn, topic, rows=rows, keys=keys)
    harvested = harvest(services, rows=rows)
    return {
        **measured,
        "harvester": harvested["rate"],
        "rss": harvested["rss_mib"],
        "growth": harvested["rss_growth_mib"],
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400_000, help="records in the rounds with 10,000 keys")
    options = parser.parse_args()
    console = Console()
    console.print(machine())
    table = Table(title=f"at least once, {VALUE_BYTES}-byte values, median of {options.rounds} rounds")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    with services() as running:
        one_round(running, 20_000, 10_000)  # warms broker and database
        for keys, rows in ((10_000, options.rows), (100, options.rows // 4), (1, 2_000)):
            rounds = [one_round(running, rows, keys) for _ in range(options.rounds)]
            middle = {name: statistics.median(result[name] for result in rounds) for name in rounds[0]}
            ratio = statistics.median(result["harvester"] / result["limit"] for result in rounds)
            table.add_row(
                f"{keys:,}",
                f"{rows:,}",
                *(f"{middle[name]:,.0f}" if name in middle else "" for name in ("mark + delete", "produce")),
                f"{middle['limit']:,.0f}",
                f"{middle['harvester']:,.0f}",
                f"{ratio:.0%}",
                f"{middle['rss']:.0f} ({middle['growth']:+.0f} in 2nd half)",
            )
    console.print(table)
    console.print("limit: one after the other with 10,000 keys, the lockstep loop with 100 and 1")


if __name__ == "__main__":
    main()
