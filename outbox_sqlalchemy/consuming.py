"""Handling the records of a Kafka consumer once, in SQLAlchemy transactions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox_core.errors import MissingExtra
from outbox_sqlalchemy.inbox import Inbox

if TYPE_CHECKING:
    import threading

    from outbox_core.consuming import Consumed, RetryPolicy
    from outbox_core.kafka import Consumer, Message

AnySession = TypeVar("AnySession", Session, Connection)


def consume(
    consumer: Consumer,
    handler: Callable[[AnySession, Message], object],
    session_factory: Callable[[], AnySession],
    *,
    inbox: Inbox | None = None,
    source: str | None = None,
    id_header: str = "outbox-id",
    outboxes: Mapping[str, Collection[str]] | None = None,
    commit: Literal["sync", "stored"] = "sync",
    retry: RetryPolicy | None = None,
    max_records: int | None = None,
    stop: threading.Event | None = None,
) -> Consumed:
    """Handle each record once: accept it, run `handler(session, record)` and commit, then commit the offset.

    Args:
        consumer: a subscribed confluent_kafka.Consumer with `enable.auto.offset.store` and `enable.auto.commit` False.
        handler: called with a session in a transaction, once for each record that is accepted.
        session_factory: a `sessionmaker`, or `engine.connect`; one session for each attempt at a record.
        inbox: the inbox table; by default the one named `inbox`.
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
        InvalidConfig: if there is no source.
        KafkaException: what the consumer cannot recover from.
        Exception: what the handler or the database raised. The record's transaction is rolled back, its offset is not
            committed, and the consumer is set back to it.
    """
    try:
        from outbox_core import consuming
    except ImportError as error:
        raise MissingExtra(f"needs {error.name}, which is not installed; pip install confluent-kafka") from None

    @contextmanager
    def transaction() -> Iterator[Any]:
        with session_factory() as session, session.begin():
            yield session

    return consuming.consume(
        consumer,
        handler,
        transaction,
        accept=(inbox or Inbox()).accept,
        source=source,
        id_header=id_header,
        outboxes=outboxes,
        commit=commit,
        retry=retry,
        max_records=max_records,
        stop=stop,
    )
