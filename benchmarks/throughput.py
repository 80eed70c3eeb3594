"""Throughput of the harvester beside the raw limits of the same machine in the same run (`make bench`).

Limits, each taken right before the harvest it stands beside:

- *database*: the store's own statements in a loop on one connection, nothing published: mark and purge for at least
  once, scan and delete for exactly once;
- *produce*: the same records through a bare producer, nothing read or deleted: with a callback for each record, or in
  transactions of the same size;
- *lockstep*: at least once with few keys, the order of each key allows one record of it per round trip, so the limit
  is a bare loop that produces one record for each key, waits for all acknowledgements and deletes the rows.

A harvest does all of it for every record, with the broker and the database on the same cores. Doing one after the
other would reach 1 / (1/a + 1/b) records/s; the table shows ours against that, or against the lockstep loop.
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
from outbox_core.kafka.batch_sizes import LARGEST_BATCH_BYTES
from outbox_core.kafka.clients import make_producer
from outbox_core.stores.interface import RowQuery
from outbox_core.stores.postgres.store import PostgresStore

_BATCH = 5_000
_FEW_KEYS = 100
_WARM_UP = 200_000
_COLUMNS = ("delivery", "keys", "records", "database", "produce", "limit", "harvester", "of limit", "RSS MiB")
_QUEUE_RECORDS = 200_000
_PRODUCER = {"enable.idempotence": True, "linger.ms": 5, "queue.buffering.max.messages": _QUEUE_RECORDS}


def mark_and_delete(dsn: str, rows: int) -> float:
    """Return the records/s of the store's mark and purge alone."""
    store, leader_id, done = PostgresStore(dsn), uuid4(), 0
    store.check()
    began = time.perf_counter()
    while done < rows:
        records = store.mark(leader_id, RowQuery(_BATCH)).records
        store.purge(leader_id, [record[0] for record in records], [record[7] for record in records])
        done += len(records)
    store.close()
    return rows / (time.perf_counter() - began)


def scan_and_delete(dsn: str, rows: int) -> float:
    """Return the records/s of the store's scan and delete alone."""
    store, done = PostgresStore(dsn), 0
    store.check()
    began = time.perf_counter()
    while done < rows:
        records = store.scan(RowQuery(_BATCH))
        store.delete_published([record[0] for record in records], [record[7] for record in records])
        done += len(records)
    store.close()
    return rows / (time.perf_counter() - began)


def produce_in_transactions(
    bootstrap: str, topic: str, rows: int, keys: int, batch_bytes: int = LARGEST_BATCH_BYTES
) -> float:
    """Return the records/s of a bare transactional producer with id header."""
    settings = {**_PRODUCER, "transactional.id": topic, "batch.size": batch_bytes}
    producer = make_producer({"bootstrap.servers": bootstrap, **settings})
    value = b"x" * VALUE_BYTES
    producer.list_topics(topic)
    producer.init_transactions(30)
    began = time.perf_counter()
    for start in range(0, rows, _BATCH):
        producer.begin_transaction()
        for number in range(start, min(rows, start + _BATCH)):
            headers = [("outbox-id", b"bench.public.outbox:%d" % number)]
            producer.produce(topic, value, f"key-{number % keys}", headers=headers)
        producer.commit_transaction(30)
    return rows / (time.perf_counter() - began)


def produce(bootstrap: str, topic: str, rows: int, keys: int) -> float:
    """Return the records/s of a bare producer with callback and id header."""
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
        while len(producer) >= _QUEUE_RECORDS:
            producer.poll(0.01)
        producer.produce(topic, value, f"key-{number % keys}", on_delivery=on_delivery, headers=headers)
        if number % 500 == 0:
            producer.poll(0)
    producer.flush()
    seconds = time.perf_counter() - began
    if acknowledged != rows:
        raise SystemExit(f"the bare producer lost {rows - acknowledged} of {rows} records")
    return rows / seconds


def lockstep(services: Services, topic: str, rows: int, keys: int) -> float:
    """Return the records/s of: produce one record for each key, wait for all of them, delete their rows, again."""
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


def one_round(services: Services, delivery: str, rows: int, keys: int) -> dict[str, float]:
    """Measure the raw limits, then a harvest of the same size."""
    topic = fresh_topic("bench")
    fill(services.dsn, topic, rows=rows, keys=keys)
    if delivery == "at-least-once" and keys <= _FEW_KEYS:
        measured = {"limit": lockstep(services, fresh_topic("raw"), rows, keys)}
    else:
        database, broker = (
            (mark_and_delete, produce) if delivery == "at-least-once" else (scan_and_delete, produce_in_transactions)
        )
        measured = {
            "database": database(services.dsn, rows),
            "produce": broker(services.bootstrap, fresh_topic("raw"), rows, keys),
        }
        measured["limit"] = 1 / (1 / measured["database"] + 1 / measured["produce"])
    fill(services.dsn, topic, rows=rows, keys=keys)
    harvested = harvest(services, delivery, rows=rows)
    return measured | {
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
    console = Console(width=120)
    console.print(machine())
    table = Table(title=f"{VALUE_BYTES}-byte values, median of {options.rounds} rounds, records/s")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    with services() as running:
        for delivery in ("at-least-once", "exactly-once"):
            one_round(running, delivery, _WARM_UP, 10_000)  # until then the broker interprets more than it runs
            few = options.rows if delivery == "exactly-once" else 2_000
            for keys, rows in ((10_000, options.rows), (_FEW_KEYS, options.rows // 4), (1, few)):
                rounds = [one_round(running, delivery, rows, keys) for _ in range(options.rounds)]
                table.add_row(delivery, f"{keys:,}", f"{rows:,}", *_summary(rounds))
    console.print(table)
    console.print("limit: one after the other, or the lockstep loop where database and produce are empty")


def _summary(rounds: list[dict[str, float]]) -> list[str]:
    """Return the medians, as cells of the table."""
    middle = {name: statistics.median(result[name] for result in rounds) for name in rounds[0]}
    ratio = statistics.median(result["harvester"] / result["limit"] for result in rounds)
    rates = [f"{middle[name]:,.0f}" if name in middle else "" for name in ("database", "produce", "limit", "harvester")]
    return [*rates, f"{ratio:.0%}", f"{middle['rss']:.0f} ({middle['growth']:+.0f} in 2nd half)"]


if __name__ == "__main__":
    main()
