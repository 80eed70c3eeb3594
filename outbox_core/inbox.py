"""The inbox: a message that was accepted once is not accepted again.

    with connection.transaction():
        if not Inbox().accept(connection, "payments-api", request_id):
            return                                     # a repeat: all of its effects are committed already
        connection.execute("UPDATE account SET ...")

The invariant: one transaction commits a row of the inbox and the effects of its message, or neither. So

- a repeat finds the row, and has no effect;
- a transaction that is rolled back takes its row along: the message may come again, and is accepted then;
- of two transactions that accept the same message at once, the second waits inside `accept` for the outcome of the
  first: False if that commits, True if it rolls back. (Under REPEATABLE READ and SERIALIZABLE it raises the driver's
  serialization failure, and gets False when it is repeated as a whole.)

Decorators of the frameworks make requests idempotent by it: a request runs in a transaction that first accepts its
Idempotency-Key, so that it is either done as a whole, or may come again:

- an answer of 400 or more, or an exception, rolls back and frees the key;
- a repeat that overtakes the answer of the first waits for the outcome of its transaction;
- no key stays "in progress" after a crash.

**Success is what the database says.** PostgreSQL makes of the COMMIT of an aborted transaction a ROLLBACK, without an
error: a handler that catches an error of the database, and goes on, would lose its work and the acceptance while its
caller takes both for done. So the end of a transaction is preceded by a question, `confirm`: is it the one that has
accepted? `accept` marks it by a setting that ends with it, or with a savepoint around it, which can be read under any
`search_path`, role and policy that the handler has set. Where a later acceptance has replaced the mark, the row is
looked for: is it there, and of this transaction or a savepoint of it? A row that another transaction committed is not:
then the handler has ended ours, and what it did since belongs to no acceptance. A savepoint that is rolled back hurts
nobody.

The conflict is named, `(source, message_id)`, so that a table without its primary key is an error. It is the unique
index that knows a repeat, which row level security hides from nobody; a row that a policy refuses is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, Final, Protocol
from uuid import UUID

from outbox_core.drivers import ABORTED_TRANSACTION, IN_TRANSACTION, plain_cursor, sqlstate, transaction_status
from outbox_core.errors import AcceptanceLost, InvalidMessageId, OutboxError, is_unfinished
from outbox_core.plain import plain
from outbox_core.row_security import fetch_on, refuse_hidden
from outbox_core.schema import TableName, iso_time_sql
from outbox_core.stasher import Connection, require_transaction
from outbox_core.watched_calls import LONG_SECONDS, watched

__all__ = [
    "MAX_ID_BYTES",
    "Inbox",
]

MAX_ID_BYTES = 1000
"""Of source and message id each. PostgreSQL limits an index entry to 2,704 bytes."""

PRUNE_BATCH = 10_000

_LOST: Final = (
    "the transaction is aborted or was ended, so the handler's work cannot be committed together with the acceptance: "
    "the handler has caught an error of the database, committed or rolled back. Put statements whose error you catch "
    "into a savepoint (psycopg: connection.transaction(), SQLAlchemy: session.begin_nested(), Django: atomic()), and "
    "leave the end of the transaction to the caller"
)

KEY_HEADER: Final = "Idempotency-Key"

_ACCEPT = """
INSERT INTO {table} (source, message_id, accept_time) VALUES (%s, %s, now())
ON CONFLICT (source, message_id) DO NOTHING RETURNING set_config('{mark}', %s, true)
"""

MARK_SETTING: Final = "kafka_outbox.accepted"
IS_MARKED: Final = f"SELECT 1 WHERE current_setting('{MARK_SETTING}', true) = %s"

# A row whose transaction is in progress, and that is seen nevertheless, is our own. `xmin` has the lower half of a
# number; the row has ours, or that of a savepoint, which is later. Earlier ones are others'.
_OURS = "CAST(CAST(pg_current_xact_id_if_assigned() AS text) AS bigint)"
_LATER = f"((CAST(CAST(xmin AS text) AS bigint) - {_OURS}) & 4294967295)"
_STATUS = f"pg_xact_status(CAST(CAST({_OURS} + {_LATER} AS text) AS xid8))"
IS_OURS: Final = f"CASE WHEN {_LATER} < 2147483648 THEN {_STATUS} = 'in progress' END"

_CONFIRM = f"SELECT 1 FROM {{table}} WHERE source = %s AND message_id = %s AND {IS_OURS}"

# Where there is no message to accept: a setting that ends with its transaction, or with a savepoint.
BEGIN: Final = "SELECT set_config('kafka_outbox.handling', 'yes', true)"
GOES_ON: Final = "SELECT 1 WHERE current_setting('kafka_outbox.handling', true) = 'yes'"

# Times go back and forth as text, which no driver's time zone can bend, and no session's: IST has several meanings.
_CUTOFF = f"SELECT {iso_time_sql('now() - %s::interval')}"

# `ctid` saves a second walk through an index. Where one ctid names several rows (a partitioned table), the condition
# on their age still holds for each of them; the added zero keeps it from being taken for another way to find them.
_PRUNE = f"""
WITH oldest AS MATERIALIZED (
    SELECT array_agg(ctid) AS rows, count(*) AS number, {iso_time_sql("max(accept_time)")} AS latest
    FROM (
        SELECT ctid, accept_time FROM {{table}}
        WHERE accept_time < %s::timestamptz AND accept_time >= %s::timestamptz
        ORDER BY accept_time LIMIT %s
    ) AS head
), pruned AS (
    DELETE FROM {{table}} WHERE ctid = ANY ((SELECT rows FROM oldest)::tid[])
    AND accept_time + interval '0' < %s::timestamptz
    RETURNING 1
)
SELECT number, latest, (SELECT count(*) FROM pruned) FROM oldest
"""

_ALL_TIMES = "-infinity"


class PrunedConnection(Connection, Protocol):
    """The part of a DB-API connection that pruning uses."""

    def commit(self) -> object:
        """Commit the transaction, if there is one."""


class Inbox:
    """One inbox table. Immutable; may be shared between threads, each with its own connection.

    Works with psycopg 3, psycopg2 and every other PostgreSQL driver of paramstyle `format`.

    Args:
        table: name of the table, `inbox` or `billing.inbox`.

    Raises:
        InvalidConfig: if `table` is not a table name.
    """

    __slots__ = ("_accept_sql", "_confirm_sql", "_prune_sql", "table")

    def __init__(self, table: str | TableName = "inbox") -> None:
        self.table = TableName.parse(table) if isinstance(table, str) else table
        escaped_name = self.table.quoted.replace("%", "%%")
        self._accept_sql = _ACCEPT.format(table=escaped_name, mark=MARK_SETTING)
        self._confirm_sql = _CONFIRM.format(table=escaped_name)
        self._prune_sql = _PRUNE.format(table=escaped_name)

    def __repr__(self) -> str:
        return f"Inbox({str(self.table)!r})"

    def accept(self, connection: Connection, source: str | int | UUID, message_id: str | bytes | int | UUID) -> bool:
        """Accept a message in the connection's transaction. Call it first, before the message has any effect.

        Args:
            connection: in a transaction, or one that begins it by itself.
            source: vouches that its ids are different: an API and its client, a consumer group.
            message_id: the message, among those of its source. Compared exactly, upper and lower case included.

        Returns:
            True the first time; False for a repeat, whose effects are all committed already.

        Raises:
            InvalidMessageId: if one of them is empty, too long or no text; nothing was sent.
            TransactionRequired: if the connection is in autocommit mode and outside a transaction; nothing was sent.
        """
        key = inbox_key(source, message_id)
        require_transaction(connection, "acceptance")
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(self._accept_sql, (*key, mark(self.table, *key)))
            return cursor.fetchone() is not None

    def confirm(self, connection: Connection, source: str | int | UUID, message_id: str | bytes | int | UUID) -> None:
        """Make sure that this transaction can commit what it has accepted. Call it last, before the commit.

        `consume` and the decorators of the frameworks do. It takes one round trip; two if the transaction has accepted
        another message since.

        Raises:
            AcceptanceLost: if an error has aborted the transaction, or if it was ended since `accept` returned True.
        """
        key = inbox_key(source, message_id)
        with confirming(), closing(plain_cursor(connection)) as cursor:
            cursor.execute(IS_MARKED, [mark(self.table, *key)])
            if cursor.fetchone() is None:
                cursor.execute(self._confirm_sql, key)
                refuse_lost(goes_on=cursor.fetchone() is not None)

    @staticmethod
    def begin(connection: Connection) -> None:
        """Mark the transaction of work that accepts no message, for `confirm_begun`."""
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(BEGIN)

    @staticmethod
    def confirm_begun(connection: Connection) -> None:
        """Make sure that a transaction can commit since it was marked, or raise AcceptanceLost, as `confirm` does."""
        with confirming(), closing(plain_cursor(connection)) as cursor:
            cursor.execute(GOES_ON)
            refuse_lost(goes_on=cursor.fetchone() is not None)

    def prune(
        self,
        connection: PrunedConnection,
        older_than: timedelta,
        *,
        batch: int = PRUNE_BATCH,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Forget messages that were accepted longer ago than `older_than`, the oldest first; return how many.

        Each batch is a transaction of its own: locks are short, and a run that breaks off loses no work. Several calls
        may run at once.

        Args:
            connection: outside a transaction; in autocommit mode or not.
            older_than: by the database's clock. A repeat that comes later than that is accepted again.
            batch: messages of one transaction.
            on_batch: called after each with the number deleted so far.

        Raises:
            ValueError: if `older_than` or `batch` is not positive.
            OutboxError: if the connection is in a transaction, which the first batch would commit.
            RowsHidden: if row level security hides rows of the inbox from the connection's role.
        """
        if older_than <= timedelta(0) or batch <= 0:
            raise ValueError("prune: older_than and batch have to be positive")
        _require_no_transaction(connection)
        refuse_hidden(fetch_on(connection), [self.table])
        cutoff = self._one_row(connection, _CUTOFF, [older_than])[0]
        begin = _ALL_TIMES
        pruned: int = 0
        while True:
            # From where the last batch ended: what it deleted is still in the index until vacuum.
            number, latest, deleted = self._one_row(connection, self._prune_sql, [cutoff, begin, batch, cutoff])
            pruned += deleted
            on_batch(pruned)
            if number < batch:
                return pruned
            begin = latest

    @staticmethod
    def _one_row(connection: PrunedConnection, sql: str, parameters: list[Any]) -> tuple[Any, ...]:
        with watched(connection, LONG_SECONDS, "pruning the inbox"):
            with closing(plain_cursor(connection)) as cursor:
                cursor.execute(sql, parameters)
                row: tuple[Any, ...] = cursor.fetchone()
            connection.commit()
        return row


@contextmanager
def confirming(*refusals: type[Exception]) -> Iterator[None]:
    """Take a refusal of a statement, as the transaction is aborted, for an acceptance lost.

    `refusals` are errors of a framework that refuses it by itself.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, refusals) or sqlstate(error) == ABORTED_TRANSACTION:
            raise AcceptanceLost(_LOST) from error
        raise


def refuse_lost(*, goes_on: bool) -> None:
    """Raise AcceptanceLost unless the transaction goes on in which a message was accepted."""
    if not goes_on:
        raise AcceptanceLost(_LOST)


def mark(table: object, source: str, message_id: str) -> str:
    """Return the mark of a transaction that has accepted a message: no two messages have the same."""
    return f"{table}:{len(source)}:{source}:{message_id}"


def request_key(
    request: Any, headers: Mapping[str, str], source: str | Callable[[Any], str], *, required: bool
) -> tuple[str, str] | None:
    """Return source and message id of a request; None for one without a key.

    Raises:
        InvalidMessageId: if the key cannot be one, or is missing although it is required: the client's mistake.
    """
    key = headers.get(KEY_HEADER)
    if key is None:
        if required:
            raise InvalidMessageId(f"the header {KEY_HEADER} is missing: send one with each new request")
        return None
    try:
        inbox_key("any", key)
    except InvalidMessageId as error:
        raise InvalidMessageId(f"{KEY_HEADER}: {error}") from None
    return source(request) if callable(source) else source, key


def is_refusal(status: int | None) -> bool:
    """Return True if an answer of that status undoes its transaction; None is one that the framework chooses."""
    return status is not None and status >= 400


def refuse_late(answer: object, *, is_finished: bool) -> None:
    """Refuse an answer that is made after the commit, by work that no transaction would keep (`OutboxError`)."""
    if not is_finished or is_unfinished(answer):
        raise OutboxError(
            f"the endpoint answered {type(answer).__name__}, whose body is made after its transaction: what is done "
            "there would be lost, and its key accepted; do the work first, and return a finished answer"
        )


def inbox_key(source: object, message_id: object) -> tuple[str, str]:
    """Return source and message id as the inbox keeps them.

    Raises:
        InvalidMessageId: saying which of them is wrong, and how.
    """
    return _text(source, "source"), _text(message_id, "message_id")


def _text(value: object, field: str) -> str:
    value = plain(value)
    if isinstance(value, bytes) and field == "message_id":
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise InvalidMessageId("message_id: bytes that are not UTF-8; encode them, for example by .hex()") from None
    if isinstance(value, UUID):
        return UUID.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = _digits(value, field)
    if not isinstance(value, str):
        kinds = "str, bytes, int or UUID" if field == "message_id" else "str, int or UUID"
        raise InvalidMessageId(f"{field}: expected {kinds}, got {type(value).__name__}")
    if not value:
        raise InvalidMessageId(f"{field}: is empty")
    if "\0" in value:
        raise InvalidMessageId(f"{field}: contains a NUL character, which a text column cannot hold")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessageId(f"{field}: cannot be encoded as UTF-8 ({error.reason} at {error.start})") from None
    if length > MAX_ID_BYTES:
        raise InvalidMessageId(
            f"{field}: {length} bytes are more than the {MAX_ID_BYTES} that an inbox keeps; use a hash of it"
        )
    return value


def _digits(number: int, field: str) -> str:
    try:
        return str(number)
    except ValueError as error:
        raise InvalidMessageId(f"{field}: {error}") from None


def _require_no_transaction(connection: object) -> None:
    """Refuse an open transaction as far as the driver tells: psycopg does, and Django's connection when it commits."""
    driver_connection = getattr(connection, "driver_connection", None) or connection
    if transaction_status(driver_connection) in IN_TRANSACTION:
        raise OutboxError("prune commits after each batch; call it outside a transaction, or on another connection")
