"""Throughput with many held records at the head of the table, beside that with none.

    python -m benchmarks.holds [ROWS]

In each run the same records are drained. Before them, at the head of the table, are first none, then 10,000 records
that are held one by one (with their 10,000 keys), then a million of a paused topic; last, 10,000 records that Kafka
refuses and that the harvester has to find and hold by itself.
"""

from __future__ import annotations

import sys

import psycopg

from benchmarks.stage import Services, fresh_topic, harvest, machine, services
from outbox_core.schema import TableName, create_hold_sql, create_table_sql

_ROWS = 300_000
_MODES = ("at-least-once", "exactly-once")
_INSERT = (
    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_partition) "
    "SELECT %s, %s || n %% %s, convert_to(repeat('x', 100), 'UTF8'), %s FROM generate_series(1, %s) AS n"
)


def _prepare(dsn: str, scene: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS outbox, outbox_hold")
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(create_hold_sql(TableName("outbox")))
        if scene == "10,000 held records":
            connection.execute(_INSERT, ("held", "h", 10_000, None, 10_000))
            connection.execute(
                "INSERT INTO outbox_hold (outbox, kafka_topic, kafka_key, record_id, reason) "
                "SELECT 'public.outbox', kafka_topic, kafka_key, id, 'refused' FROM outbox"
            )
        elif scene == "1,000,000 of a paused topic":
            connection.execute(_INSERT, ("paused", "p", 10_000, None, 1_000_000))
            connection.execute("INSERT INTO outbox_hold (outbox, kafka_topic) VALUES ('public.outbox', 'paused')")
        topic = fresh_topic("bench")
        if scene == "10,000 records to be refused":
            connection.execute(_INSERT, (topic, "bad", 10_000, 999, 10_000))
        connection.execute(_INSERT, (topic, "k", 10_000, None, rows))
        connection.execute("VACUUM ANALYZE outbox")
        connection.execute("CHECKPOINT")


def _run(place: Services, mode: str, scene: str, rows: int) -> float:
    _prepare(place.dsn, scene, rows)
    rate: float = harvest(place, mode, rows=rows)["rate"]
    return rate


def main() -> None:
    """Measure and print a table."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else _ROWS
    scenes = ("nothing", "10,000 held records", "1,000,000 of a paused topic", "10,000 records to be refused")
    with services() as place:
        print(f"{rows:,} records; {machine()}\n")
        print("| Before them | " + " | ".join(_MODES) + " |\n|---|---|---|")
        for scene in scenes:
            rates = [_run(place, mode, scene, rows) for mode in _MODES]
            print(f"| {scene} | " + " | ".join(f"{rate:,.0f}/s" for rate in rates) + " |", flush=True)


if __name__ == "__main__":
    main()
