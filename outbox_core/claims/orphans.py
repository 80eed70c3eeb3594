"""Payloads that no record names any more: neither in the table, nor in its archive, nor in the topics.

The order makes it safe: first the store is listed, then the table is read, then the archive into which its rows go, and
the topics last, up to ends that are asked for after that. A record that leaves the table meanwhile has been published
before, and stands in its topic.
Payloads of open transactions are in neither: their age keeps them, so it must exceed the longest transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any, NoReturn

from outbox_core.claims.claims import CLAIM_HEADER, ClaimStore, claim_of, written_before
from outbox_core.drivers import plain_cursor
from outbox_core.errors import KafkaUnavailable, RowsHidden
from outbox_core.kafka.clients import KafkaError, KafkaException, TopicPartition, make_consumer
from outbox_core.kafka.errors import CONSUMER_RECOVERS
from outbox_core.kafka.messages import headers_of
from outbox_core.kafka.reader import PartitionReader, partition_ends, reader_settings
from outbox_core.row_security import fetch_on, hides_sql, refuse_hidden
from outbox_core.schema import TableName, archive_beside
from outbox_core.stasher import Connection
from outbox_core.watched_calls import LONG_SECONDS

_ANSWER_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
_AT_ONCE = 500


def find_orphans(
    store: ClaimStore,
    connection: Connection,
    outboxes: Iterable[TableName],
    kafka: Mapping[str, Any],
    *,
    group: str,
    before: datetime,
    topics: Iterable[str] = (),
) -> list[str]:
    """Return the names of payloads that were written before a time, and that no record names.

    Args:
        store: the payloads.
        connection: of the outboxes' database.
        outboxes: all tables whose records may name payloads of this store.
        kafka: librdkafka settings of the cluster.
        group: the `group.id` of the reader, which commits nothing.
        before: payloads written later are left alone; longer ago than the longest transaction lasts.
        topics: topics to read besides those in the names: dead-letter topics, topics into which records are copied.

    Raises:
        KafkaUnavailable: if a topic cannot be read to its end: nothing is known then.
        RowsHidden: if row level security hides rows of a table or its archive from the connection's role.
    """
    candidates = dict(written_before(store, before))
    if not candidates:
        return []
    left = set(candidates)
    for outbox in outboxes:
        left -= _named_in_table(connection, outbox)
        archive = archive_beside(outbox)
        if _exists(connection, archive):
            left -= _named_in_table(connection, archive)
    wanted = {name.topic for name in candidates.values()} | set(topics)
    _read_topics(reader_settings(kafka, group), sorted(wanted), left.discard)
    return sorted(left)


def _named_in_table(connection: Connection, outbox: TableName) -> set[str]:
    # Arrays of any dimensions: those of a row that is held for them.
    values, table = "ARRAY(SELECT unnest(kafka_header_values))", outbox.quoted.replace("%", "%%")
    hides = hides_sql(outbox)
    # Both by one statement: what a policy hides from it must not look as if no record named it.
    sql = f"SELECT {values}, false FROM {table} WHERE %s = ANY (kafka_header_keys) UNION ALL SELECT NULL, {hides}"
    rows = fetch_on(connection, LONG_SECONDS, "names of payloads")(sql, [CLAIM_HEADER])
    if any(is_hidden for _, is_hidden in rows):
        refuse_hidden(fetch_on(connection), [outbox])
        raise RowsHidden(f"row level security of {outbox} hid rows for a moment, so nothing is known of orphans")
    rows = [row for row in rows if row[0] is not None]
    texts = (value for values, _ in rows for value in values if value is not None)
    return {text if isinstance(text, str) else bytes(text).decode(errors="replace") for text in texts}


def _exists(connection: Connection, table: TableName) -> bool:
    with closing(plain_cursor(connection)) as cursor:
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [table.quoted])
        (found,) = cursor.fetchall()[0]
    return bool(found)


def _read_topics(settings: Mapping[str, Any], topics: list[str], found: Callable[[str], None]) -> None:
    def fail(error: KafkaError, topic: str) -> None:
        if error.code() not in CONSUMER_RECOVERS:
            raise KafkaUnavailable(f"topic {topic!r} cannot be read: {error.str()}")

    def fail_in_silence(unfinished: set[tuple[str, int]]) -> NoReturn:
        raise KafkaUnavailable(f"no answer while reading {', '.join(sorted({topic for topic, _ in unfinished}))}")

    consumer = make_consumer(settings)
    try:
        ends = partition_ends(settings, topics, timeout_seconds=_ANSWER_SECONDS)
        missing = sorted(set(topics) - {topic for topic, _ in ends})
        if missing:
            raise KafkaUnavailable(f"topic {missing[0]!r} does not exist on this cluster, so nothing can be told")
        starts = [TopicPartition(topic, partition, 0) for topic, partition in ends]
        reader = PartitionReader(
            consumer,
            starts,
            ends,
            on_error=fail,
            on_silence=fail_in_silence,
            silence_seconds=_SILENCE_SECONDS,
            at_once=_AT_ONCE,
        )
        for messages in reader:
            for message in messages:
                name = claim_of(headers_of(message), message.value())
                if name is not None:
                    found(name)
    except KafkaException as error:
        raise KafkaUnavailable(f"the topics cannot be read: {error.args[0].str()}") from None
    finally:
        consumer.close()
