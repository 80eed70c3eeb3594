"""Handling the records of a Kafka consumer once, in Django transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from outbox_core.errors import MissingExtra, OutboxError
from outbox_django.databases import postgres_connection, whole_atomic
from outbox_django.inbox import InboxTable, configured_inbox

if TYPE_CHECKING:
    from typing import Unpack

    from outbox_core.consuming import Consumed, ConsumeOptions
    from outbox_core.kafka.clients import Consumer, Message


class _On(NamedTuple):
    """The inbox of a table, in the transactions of a database, which Django keeps."""

    table: InboxTable
    alias: str

    def accept(self, _: None, source: str, message_id: str) -> bool:
        return self.table.accept(source, message_id, using=self.alias)

    def confirm(self, _: None, source: str, message_id: str) -> None:
        self.table.confirm(source, message_id, using=self.alias)


def consume(
    consumer: Consumer,
    handler: Callable[[Message], object],
    *,
    using: str | None = None,
    inbox: InboxTable | None = None,
    **options: Unpack[ConsumeOptions],
) -> Consumed:
    """Handle each record once: accept it, run `handler(record)` and commit, then commit the offset.

    Before each record Django replaces a connection older than CONN_MAX_AGE and, with CONN_HEALTH_CHECKS, one that was
    lost. With a CONN_MAX_AGE of 0, the default, one connection is kept until it fails.

    Call it outside `transaction.atomic()` (RuntimeError) and with autocommit on (OutboxError): a record whose offset is
    committed must not be rolled back.

    Args:
        consumer: a subscribed confluent_kafka.Consumer with `enable.auto.offset.store` and `enable.auto.commit` False.
        handler: called inside `transaction.atomic(using)`, once for each record that is accepted.
        using: alias of the database; without it as of `accept`.
        inbox: the inbox table; by default the one of the OUTBOX setting.
        options: those of `outbox_core.consuming.consume`, which describes the errors, too.
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
        if connection.settings_dict["CONN_MAX_AGE"] != 0 and not connection.in_atomic_block:  # which is a test's
            connection.close_if_unusable_or_obsolete()
        # The offset is committed behind this block: nothing around it may roll the block back.
        with whole_atomic(alias, durable=True):
            if not connection.commit_on_exit:
                raise OutboxError(f"autocommit is off on database {alias!r}: consume could commit no record")
            yield

    return consuming.consume(
        consumer,
        lambda _, message: handler(message),
        begin,
        inbox=_On(table, alias),
        **options,
    )
