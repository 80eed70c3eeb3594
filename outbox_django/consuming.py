"""Handling the records of a Kafka consumer once, in Django transactions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from django.db import transaction

from outbox_core.errors import MissingExtra
from outbox_django.databases import postgres_connection
from outbox_django.inbox import InboxTable, configured_inbox

if TYPE_CHECKING:
    import threading

    from outbox_core.consuming import Consumed, RetryPolicy
    from outbox_core.kafka import Consumer, Message


def consume(
    consumer: Consumer,
    handler: Callable[[Message], object],
    *,
    using: str | None = None,
    inbox: InboxTable | None = None,
    source: str | None = None,
    id_header: str = "outbox-id",
    outboxes: Mapping[str, Collection[str]] | None = None,
    commit: Literal["sync", "stored"] = "sync",
    retry: RetryPolicy | None = None,
    max_records: int | None = None,
    stop: threading.Event | None = None,
) -> Consumed:
    """Handle each record once: accept it, run `handler(record)` and commit, then commit the offset.

    Before each record Django replaces a connection older than CONN_MAX_AGE and, with CONN_HEALTH_CHECKS, one that was
    lost. With a CONN_MAX_AGE of 0, the default, one connection is kept until it fails.

    Args:
        consumer: a subscribed confluent_kafka.Consumer with `enable.auto.offset.store` and `enable.auto.commit` False.
        handler: called inside `transaction.atomic(using)`, once for each record that is accepted.
        using: alias of the database; without it as of `accept`.
        inbox: the inbox table; by default the one of the OUTBOX setting.
        source: whose ids these are; by default the consumer's group.
        id_header: as of `outbox_core.consuming.consume`, like the following.
        outboxes: for each topic the names of the outboxes whose ids are believed there; without an entry, all.
        commit: "sync" after each record, or "stored": by the client, now and then.
        retry: what to do when the handler raises; by default raise. See `outbox_core.consuming.backoff`.
        max_records: return after so many records, repeats included; None for no limit.
        stop: return once this is set, after the record in hand.

    Raises:
        MissingExtra: if confluent-kafka is not installed.
        UnsafeConsumer: if the consumer stores offsets by itself; nothing was handled.
        InvalidConfig: if there is no source, or the alias does not exist or is no PostgreSQL database.
        KafkaException: what the consumer cannot recover from.
        Exception: what the handler or the database raised. The record's transaction is rolled back, its offset is not
            committed, and the consumer is set back to it.
    """
    try:
        from outbox_core import consuming
    except ImportError as error:
        raise MissingExtra(f"needs {error.name}, which is not installed; pip install confluent-kafka") from None
    table = inbox or configured_inbox()
    alias = table.alias(using)
    connection = postgres_connection(alias)

    @contextmanager
    def begin() -> Iterator[None]:
        # An age of 0, Django's default, is meant for requests: here it would cost a connection for each record.
        if connection.settings_dict["CONN_MAX_AGE"] != 0:
            connection.close_if_unusable_or_obsolete()
        with transaction.atomic(using=alias):
            yield

    return consuming.consume(
        consumer,
        lambda _, message: handler(message),
        begin,
        accept=lambda _, accepted_source, message_id: table.accept(accepted_source, message_id, using=alias),
        source=source,
        id_header=id_header,
        outboxes=outboxes,
        commit=commit,
        retry=retry,
        max_records=max_records,
        stop=stop,
    )
