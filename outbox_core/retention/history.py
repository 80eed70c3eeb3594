"""The history of an outbox: what its harvesters did, and what people did to its holds; written by both.

Two small tables beside the outbox (`outbox_core.schema.create_history_sql`), both optional:

- **statistics**: a row each ten seconds from the leader, kept for a week;
- **events**: who led from when to when and why it ended, and every change of a hold; kept for 90 days.

    history = History()
    history.statistics(connection, timedelta(hours=3))
    history.events(connection, timedelta(days=1), kinds=[EventKind.SKIPPED])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from outbox_core.drivers import plain_cursor
from outbox_core.errors import OutboxTableError
from outbox_core.row_security import fetch_on, refuse_hidden
from outbox_core.schema import EventKind, TableName, events_beside, iso_time_sql, shown_key_sql, statistics_beside
from outbox_core.stasher import Connection

__all__ = ["EventKind", "History", "HistoryEvent", "IntervalStatistics", "Point"]

_IDENTIFY = """
SELECT n.nspname || '.' || c.relname, to_regclass(%s) IS NOT NULL
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""

# The latest ones, oldest first.
_STATISTICS = f"""
SELECT {iso_time_sql("create_time")}, instance, interval_seconds, published, failed, published_bytes, deliverable,
       deliverable_age, held, held_age, latency_p50, latency_p99
FROM (
    SELECT * FROM {{table}} WHERE outbox = %s AND create_time > now() - %s * interval '1 second'
    ORDER BY id DESC LIMIT %s
) AS latest
ORDER BY id
"""

# A bucket has the rates' mean, the medians' mean by records, and of everything else the largest: peaks must be seen.
_THINNED = """
SELECT extract(epoch FROM max(create_time))::float8, sum(published) / greatest(sum(interval_seconds), 0.001),
       sum(failed) / greatest(sum(interval_seconds), 0.001),
       (sum(published_bytes) / greatest(sum(interval_seconds), 0.001))::float8,
       max(deliverable), max(deliverable_age), max(held), max(held_age),
       sum(latency_p50 * published) / nullif(sum(published) FILTER (WHERE latency_p50 IS NOT NULL), 0),
       max(latency_p99)
FROM {table} WHERE outbox = %s AND create_time > now() - %s * interval '1 second'
GROUP BY floor(extract(epoch FROM create_time) / %s) ORDER BY 1
"""

_EVENTS = f"""
SELECT id, {iso_time_sql("create_time")}, kind, actor, reason, leader_id::text, term, kafka_topic,
       {shown_key_sql("kafka_key")}, record_id
FROM {{table}}
WHERE outbox = %s AND create_time > now() - %s * interval '1 second'
  AND (%s::text IS NULL OR kind = ANY (string_to_array(%s, ',')))
ORDER BY id DESC LIMIT %s
"""

_MOST_ROWS = 10_000


class IntervalStatistics(NamedTuple):
    """One row of statistics: an interval of one leader, up to `create_time`.

    `published` counts records, `failed` attempts, `published_bytes` bytes of values. The backlog is that at the end, as
    `outbox_core.stores.interface.Backlog` has it, and None if it was not counted; ages are in seconds. Latencies, in
    seconds, are the median and the 99th percentile from a record's create_time to Kafka; None if none was published.
    """

    create_time: datetime
    instance: str
    interval_seconds: float
    published: int
    failed: int
    published_bytes: int
    deliverable: int | None
    deliverable_age: float | None
    held: int | None
    held_age: float | None
    latency_p50: float | None
    latency_p99: float | None


class Point(NamedTuple):
    """Statistics of some while up to `time`, which is in seconds since 1970.

    Rates are means, as is `latency_p50`; backlogs, ages and `latency_p99` the largest values; None is not known.
    """

    time: float
    published_per_second: float
    failed_per_second: float
    bytes_per_second: float
    deliverable: int | None
    deliverable_age: float | None
    held: int | None
    held_age: float | None
    latency_p50: float | None
    latency_p99: float | None


class HistoryEvent(NamedTuple):
    """One event: `kind` is one of `EventKind`; `leader_id` and `term` are of leaders, the last three fields of holds.

    `actor` is a harvester's name, or of an operator "who as role"; `term` is the number of a leadership, as in the log.
    """

    id: int
    create_time: datetime
    kind: str
    actor: str
    reason: str
    leader_id: UUID | None
    term: int | None
    topic: str | None
    key: str | None
    record_id: int | None


class History:
    """The history of one outbox, to read. Immutable; drivers and transactions are as for `outbox_core.Holds`.

    Args:
        outbox: name of the outbox table, `outbox` or `billing.outbox`.

    Raises:
        InvalidConfig: if the name is none.
        OutboxTableError: by every method, if there is no outbox or no such table of its history.
        RowsHidden: by every method, if row level security hides rows of that table from the connection's role.
    """

    __slots__ = ("outbox",)

    def __init__(self, outbox: str | TableName = "outbox") -> None:
        self.outbox = TableName.parse(outbox) if isinstance(outbox, str) else outbox

    def statistics(
        self, connection: Connection, since: timedelta, *, limit: int = _MOST_ROWS
    ) -> list[IntervalStatistics]:
        """Return the rows of the last while, oldest first; of more than `limit` the latest."""
        rows = self._ask(connection, statistics_beside(self.outbox), _STATISTICS, [since.total_seconds(), limit])
        return [IntervalStatistics(datetime.fromisoformat(row[0]), *row[1:]) for row in rows]

    def points(self, connection: Connection, since: timedelta, *, most: int = 500) -> list[Point]:
        """Return the statistics of the last while for a chart, oldest first, thinned to at most so many points."""
        seconds = since.total_seconds()
        # One less: neither the first nor the last bucket need be a whole one.
        parameters = [seconds, max(1.0, seconds / (most - 1))]
        rows = self._ask(connection, statistics_beside(self.outbox), _THINNED, parameters)
        return [Point._make(float(value) if isinstance(value, Decimal) else value for value in row) for row in rows]

    def events(
        self,
        connection: Connection,
        since: timedelta,
        *,
        kinds: Iterable[EventKind] | None = None,
        limit: int = _MOST_ROWS,
    ) -> list[HistoryEvent]:
        """Return the events of the last while, newest first, at most `limit`; all, or only those of some kinds."""
        wanted = None if kinds is None else ",".join(EventKind(kind) for kind in kinds)
        parameters = [since.total_seconds(), wanted, wanted, limit]
        rows = self._ask(connection, events_beside(self.outbox), _EVENTS, parameters)
        return [
            HistoryEvent(number, datetime.fromisoformat(at), kind, actor, reason, leader and UUID(leader), *rest)
            for number, at, kind, actor, reason, leader, *rest in rows
        ]

    def _ask(
        self, connection: Connection, table: TableName, statement: str, parameters: Sequence[Any]
    ) -> list[tuple[Any, ...]]:
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(_IDENTIFY, [table.quoted, self.outbox.quoted])
            found = cursor.fetchall()
            if not found:
                raise OutboxTableError(f"outbox table {self.outbox} does not exist in this database")
            outbox, has_table = found[0]
            if not has_table:
                raise OutboxTableError(
                    f"there is no table {table}, so there is no history; make it with "
                    f"`outbox schema --only history --table {self.outbox}`, with Alembic or with `manage.py migrate`"
                )
            refuse_hidden(fetch_on(connection), [table])
            sql = statement.format(table=table.quoted.replace("%", "%%"))
            cursor.execute(sql, [outbox, *parameters])
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows
