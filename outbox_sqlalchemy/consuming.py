"""Handling the records of a Kafka consumer once, in SQLAlchemy transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox_core.errors import MissingExtra
from outbox_sqlalchemy.inbox import Inbox

if TYPE_CHECKING:
    from typing import Unpack

    from outbox_core.consuming import Consumed, ConsumeOptions
    from outbox_core.kafka.clients import Consumer, Message

AnySession = TypeVar("AnySession", bound="Session | Connection")


def consume(
    consumer: Consumer,
    handler: Callable[[AnySession, Message], object],
    session_factory: Callable[[], AnySession],
    *,
    inbox: Inbox | None = None,
    **options: Unpack[ConsumeOptions],
) -> Consumed:
    """Handle each record once: accept it, run `handler(session, record)` and commit, then commit the offset.

    Args:
        consumer: a subscribed confluent_kafka.Consumer with `enable.auto.offset.store` and `enable.auto.commit` False.
        handler: called with a session in a transaction, once for each record that is accepted.
        session_factory: a `sessionmaker`, or `engine.connect`; one session for each attempt at a record.
        inbox: the inbox table; by default the one named `inbox`.
        options: those of `outbox_core.consuming.consume`, which describes the errors, too.
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
        inbox=cast("consuming.Acceptor[AnySession]", inbox or Inbox()),
        **options,
    )
