"""What a record costs, counted and not timed: the same on a slow machine, and on a busy one.

A harvester drains waves of records, each of which fills it: one statement marks or scans a wave, its records are sent,
all are acknowledged, one statement deletes their rows. Two drains of different length are compared, so that what a
harvester does once, when it starts and ends, does not count.
"""

import os
import warnings
from collections import Counter
from contextlib import closing

import psycopg
import pytest

from devstack.processes import wait_until
from outbox_core.kafka.clients import make_producer
from tests.costs.baseline import HOW_TO_ACCEPT, TOLERATED, Costs, read_baseline, what_grew, write_baseline
from tests.costs.counting import CallCounter, ServerCounters, counted_statements
from tests.harvesting import GENEROUS_SECONDS, Scene

_WAVE = 500
_SHORT, _LONG = 1, 5  # drains, in waves
_RECORDS = (_LONG - _SHORT) * _WAVE
_LIMITS = {
    "mark_query_records": _WAVE,
    "max_in_flight_records": _WAVE,
    # So long that nothing is repeated where a broker gets next to no CPU: what is done twice is counted twice.
    "heartbeat_timeout": "60s",
    "transaction_timeout": "60s",
}
_LEAST_OF_CALLS = 0.2  # of a function for a record; what has fewer is of waves, or of turns that wait for something
_ACCEPT = "OUTBOX_TEST_ACCEPT_COSTS"


class _PatientProducer:
    """A producer that has all records acknowledged before it returns to those that wait, so that each wave is one."""

    def __init__(self, settings):
        self._producer = make_producer(settings)

    def poll(self, _timeout=0.0):
        return self._producer.flush(GENEROUS_SECONDS)

    flush = poll

    def __len__(self):
        return len(self._producer)

    def __getattr__(self, name):
        return getattr(self._producer, name)


@pytest.fixture
def quiet_database(own_postgres, topic_name):
    """Return the URL of a database on a server that does nothing by itself, and writes no full pages into its WAL."""
    with psycopg.connect(own_postgres.dsn, autocommit=True) as connection:
        for setting in ("full_page_writes = off", "autovacuum = off", "checkpoint_timeout = '1d'"):
            connection.execute(f"ALTER SYSTEM SET {setting}")
        connection.execute("SELECT pg_reload_conf()")
    # Topics of the outbox are named after it, and outlive it on the broker.
    return own_postgres.create_database(topic_name("costs"))


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_a_record_costs_no_more_than_was_accepted(quiet_database, kafka_bootstrap, make_topic, monkeypatch, delivery):
    """Statements, rows read, WAL, dead tuples, produce calls and Python calls are those of the baseline."""
    short, long = (
        _drained(quiet_database, kafka_bootstrap, make_topic(), monkeypatch, delivery, waves=waves)
        for waves in (_SHORT, _LONG)
    )
    costs = _costs_of_a_record(short, long)
    accepted = read_baseline()
    if os.environ.get(_ACCEPT):
        write_baseline({**accepted, delivery: costs})
        return
    assert delivery in accepted, f"no costs of {delivery} were accepted yet: make costs-accept"
    grown = what_grew(delivery, accepted[delivery], costs)
    assert not grown, "\n".join([*grown, HOW_TO_ACCEPT])
    for kind, tolerated in TOLERATED.items():
        before, now = accepted[delivery].totals[kind], costs.totals[kind]
        if now < before * (1 - tolerated):
            warnings.warn(f"{delivery}: {kind} {before:.4f} -> {now:.4f}; keep it: make costs-accept", stacklevel=1)


def _drained(database, bootstrap, topic, monkeypatch, delivery, *, waves):
    """Drain so many waves from a table of their own; return all counts by kind, and by part within it."""
    table = f"outbox_{waves}"
    with (
        closing(Scene(database, bootstrap, table=table)) as scene,
        psycopg.connect(database, autocommit=True) as connection,
    ):
        connection.execute(
            f"INSERT INTO {table} (kafka_topic, kafka_key, kafka_value) SELECT %s, 'key-' || n,"
            " convert_to(repeat('x', 100), 'UTF8') FROM generate_series(1, %s) AS n",
            (topic, waves * _WAVE),
        )
        connection.execute(f"VACUUM ANALYZE {table}")
        server, calls = ServerCounters(connection, table), CallCounter()
        settings = scene.config(limits=_LIMITS, delivery=delivery).producer_settings()
        own = {"producer_factory": lambda: _PatientProducer(settings)} if delivery == "at-least-once" else {}
        with calls.counting(), counted_statements(monkeypatch, f'"{table}"') as statements:
            scene.drain(limits=_LIMITS, config={"delivery": delivery}, **own)
        _await_end_of_sessions(connection)  # which hand in their counts by then
        wal_bytes, rows = server.wal_bytes(), server.rows()
        assert scene.count() == 0
    return {
        "statements": Counter({text.replace(table, "outbox"): count for text, count in statements.items()}),
        "rows read": Counter({"": rows.read}),
        "WAL bytes": Counter({"": wal_bytes}),
        "dead tuples": Counter({"": rows.dead}),
        "produce calls": Counter({"": calls.produce_calls}),
        "Python calls": calls.by_function(),
    }


def _await_end_of_sessions(connection):
    query = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name LIKE 'kafka-outbox%')"
    assert wait_until(lambda: connection.execute(query).fetchone()[0], timeout=GENEROUS_SECONDS)


def _costs_of_a_record(short, long):
    """Return what the longer drain has more, for each of the records that it has more."""
    parts = {}
    for kind, counts in long.items():
        least = _LEAST_OF_CALLS if kind == "Python calls" else 0.0
        of_record = {name: (count - short[kind][name]) / _RECORDS for name, count in sorted(counts.items())}
        parts[kind] = {name: number for name, number in of_record.items() if number > least}
    totals = {kind: sum(parts[kind].values()) for kind in TOLERATED}
    return Costs(totals, {kind: parts[kind] for kind in ("statements", "Python calls")})
