"""The outbox table on its connection: find it, inspect it, send statements to it, and translate their errors.

Each statement is one transaction (autocommit). `synchronous_commit` is on for all but those of the history alone: a
purge that vanished in a crash would come back as a repeat.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import psycopg
from psycopg import errors

from outbox_core.errors import (
    OutboxTableError,
    RightsMissing,
    RowsHidden,
    RowsRemain,
    StatementCancelled,
    StoreSilent,
    StoreUnavailable,
)
from outbox_core.row_security import fetch_on, is_refusal, refuse_hidden, seeing_all, set_row_security
from outbox_core.schema import (
    HOLD_COLUMNS,
    REQUIRED_COLUMNS,
    TableName,
    archive_beside,
    archive_rotation,
    hold_beside,
    quote,
)
from outbox_core.stores.interface import StoredRecord
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.connection import Connection, connect_to_primary, milliseconds, one_line
from outbox_core.stores.postgres.deadlines import LONG_SECONDS, LOOK_SECONDS, ConnectionGivenUp

_log = logging.getLogger(__name__)

Row = TypeVar("Row")

_TEXT_TYPES = {"text", "character varying", "character"}
_TIME_TYPES = {"timestamp with time zone", "timestamp without time zone", "date"}
_EXPECTED = {
    "id": ("bigint", {"bigint", "integer"}),
    "leader_id": ("uuid", {"uuid"}),
    "kafka_topic": ("text", _TEXT_TYPES),
    "kafka_key": ("text", _TEXT_TYPES),
    "kafka_partition": ("integer", {"integer", "smallint", "bigint"}),
    "create_time": ("timestamp with time zone", _TIME_TYPES),
    "kafka_value": ("bytea or text", _TEXT_TYPES | {"bytea"}),
    "kafka_header_keys": ("text[]", _TEXT_TYPES),  # of the elements
    "kafka_header_values": ("bytea[] or text[]", _TEXT_TYPES | {"bytea"}),
}
# A server that has become a standby is as good as away: the next connection may find the new primary.
_PASSING = (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction)
# Of the server and its resources: a transaction or session that was ended, no more memory or connections, a shutdown,
# an internal error. None of them says anything about the table.
_PASSING_CLASSES = ("08", "25", "53", "57", "58", "XX")
# "cached plan must not change result type", among others
# Without a timeout, the waits for them end all the same, after so many timeouts or a quarter of an hour.
_WHOLE_TABLE_FACTOR = 30
_BRIEF_SECONDS = 1.0
_STATEMENTS = {
    text: f"statement {name.lower().replace('_', ' ')}"
    for name, text in vars(sql).items()
    if name.isupper() and isinstance(text, str)
}
_ALTERED = (errors.FeatureNotSupported, errors.UndefinedColumn, errors.UndefinedFunction, errors.DatatypeMismatch)


class OutboxMissing(OutboxTableError):
    """The outbox table is not there."""


class Layout(NamedTuple):
    """The properties of the table that statements depend on; `outbox` is `<schema>.<table>`."""

    database: str
    outbox: str
    by_address: bool
    has_partition: bool

    @property
    def partition(self) -> str:
        """The column of explicit partitions, -1 for none, as SQL."""
        return "least(coalesce(kafka_partition, -1), 2147483648)" if self.has_partition else "-1"


class Rules(NamedTuple):
    """The constraints of rows, as SQL: the names of those that a row violates, and if it fulfils all."""

    broken: str
    fulfilled: str


class OutboxTable:
    """An outbox table, the table of holds beside it, and the connection to both. Used by one thread at a time."""

    def __init__(
        self,
        data_source: str,
        table: str,
        *,
        application_name: str,
        statement_timeout: float,
        archives: bool = False,
        found: TableName | None = None,
        had_holds: bool = False,
    ) -> None:
        self.statement_timeout = statement_timeout
        self.archives = archives
        self.name = TableName.parse(table)
        self.hold_name = hold_beside(self.name)
        self.found = found or self.name
        self.had_holds = had_holds  # ever: what was held since then is not known while their table is away
        self.connection: Connection | None = None
        self.role = ""
        self._connect_to = data_source, application_name
        self._layout: Layout | None = None
        self._was_altered = False  # since the last mark, scan or deletion that succeeded
        self._doubts: list[str] = []  # of the last check, which are in the log
        self._formatted: dict[tuple[object, ...], str] = {}

    # -- connection

    def connected(self) -> Connection:
        """Return the connection; make another one if there is none."""
        if self.connection is None or self.connection.closed:
            # Found once: another session's path must not lead to another table.
            names = () if self.found.schema else (self.name,)
            connection, found = connect_to_primary(*self._connect_to, *names, statement_timeout=self.statement_timeout)
            if found:
                (self.found,) = found
                self._formatted.clear()
            self.role = connection.role
            try:
                connection.policies = set_row_security(fetch_on(connection), self._secured_names)
            except psycopg.Error as error:
                self.connection = connection  # which is given up
                self._raise(error)
            except BaseException:
                connection.close()  # or the next call would find it, and policies could hide rows from it
                raise
            self.connection = connection
        return self.connection

    def ask_apart(self, question: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement on the catalogs alone, over a connection of its own; return its rows.

        It waits for no lock on our tables, as the question about their policies does (`set_row_security`).
        """
        connection, _ = connect_to_primary(*self._connect_to, statement_timeout=self.statement_timeout)
        with closing(connection):
            text, names = numbered(question)
            try:
                connection.execute("SET ROLE NONE")  # of others' sessions the catalogs tell their own role alone
                return psycopg.RawCursor(connection).execute(text, [parameters[name] for name in names]).fetchall()
            except ConnectionGivenUp as error:
                raise StoreSilent(one_line(error)) from error
            except psycopg.Error as error:
                raise StoreUnavailable(one_line(error)) from error

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    @property
    def quoted(self) -> str:
        """The table with its schema, as statements name it."""
        return self.found_outbox.quoted

    @property
    def found_outbox(self) -> TableName:
        """The table with its schema."""
        self.connected()
        return self.found

    @property
    def holds(self) -> TableName:
        """The table of holds beside the one that was found: another of that name may come first on the path."""
        return hold_beside(self.found)

    @property
    def quoted_role(self) -> str:
        """The role as statements name it."""
        return quote(self.role)

    # -- statements

    def query(self, statement: str, parameters: Any = (), **parts: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows; `parts` and `FRAGMENTS` fill its braces."""
        return self._run(statement, parameters, parts).fetchall()

    def records(self, statement: str, parameters: Any, **parts: object) -> list[StoredRecord]:
        """Run a statement that returns the columns of a record; return the records."""
        cursor: psycopg.RawCursor[StoredRecord] = psycopg.RawCursor(self.connected(), row_factory=_as_record)
        return self._send(cursor, statement, parameters, parts).fetchall()

    def execute(self, statement: str, parameters: Any = (), **parts: object) -> int:
        """Run a statement and return the number of rows it changed."""
        return self._run(statement, parameters, parts).rowcount

    def _run(self, statement: str, parameters: Any, parts: dict[str, object]) -> psycopg.Cursor[tuple[Any, ...]]:
        return self._send(psycopg.RawCursor(self.connected()), statement, parameters, parts)

    def _send(
        self, cursor: psycopg.RawCursor[Row], statement: str, parameters: Any, parts: dict[str, object]
    ) -> psycopg.Cursor[Row]:
        text, names = numbered(self.format(statement, **parts))
        values = [parameters[name] for name in names] if isinstance(parameters, Mapping) else parameters
        cast("Connection", cursor.connection).purpose = _STATEMENTS.get(statement, "a statement of ours")
        try:
            with self.seeing_all():
                return cursor.execute(text, values, prepare=statement in sql.PLANNED_ONCE, binary=True)
        except psycopg.Error as error:
            self._raise(error)

    def seeing_all(self) -> AbstractContextManager[None]:
        """Return the context of a statement: it raises RowsHidden if policies may have hidden rows from it."""
        connection = self.connected()
        return nullcontext() if connection.policies is None else seeing_all(connection)

    @property
    def _secured_names(self) -> list[TableName]:
        """The tables of which a row that is not seen matters."""
        return [self.found, self.holds, *([archive_beside(self.found)] if self.archives else [])]

    def format(self, statement: str, **parts: object) -> str:
        """Fill in the parts of a statement, tables among them, and the tables that a connection has found."""
        self.connected()
        key = (statement, *parts.values())
        if key not in self._formatted:
            texts = {**sql.FRAGMENTS, "table": self.found, "holds": self.holds, **parts}
            self._formatted[key] = statement.format(**{part: _in_sql(text) for part, text in texts.items()})
        return self._formatted[key]

    def archived(self, statement: str, **parts: str) -> str:
        """Return a statement, or a part of one, that puts rows into the archive; '' if they are deleted for good."""
        if not self.archives:
            return ""
        columns = [*REQUIRED_COLUMNS, *(["kafka_partition"] if self.layout().has_partition else [])]
        names = {
            "columns": ", ".join(columns),
            "of_stored": ", ".join(f"stored.{column}" for column in columns),
        }
        return self.format(statement, archive=archive_beside(self.found_outbox), **names, **parts)

    def set_timeout(self, seconds: float) -> None:
        """Give up statements on this connection after so long."""
        self.execute("SELECT set_config('statement_timeout', %s, false)", (milliseconds(seconds),))
        connection = self.connected()
        connection.set_patience(seconds or max(LONG_SECONDS, _WHOLE_TABLE_FACTOR * self.statement_timeout))
        connection.looks_after = float("inf") if seconds else LOOK_SECONDS

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Lift the server's timeout for statements that read the whole table, once, when a leadership begins."""
        self.set_timeout(0.0)
        yield
        self.set_timeout(self.statement_timeout)

    @contextmanager
    def briefly_waiting(self) -> Iterator[None]:
        """Give up statements that wait for a lock for longer than a moment: they raise StoreUnavailable."""
        self.execute("SELECT set_config('lock_timeout', %s, false)", (milliseconds(_BRIEF_SECONDS),))
        yield  # an error closes the connection
        self.execute("SELECT set_config('lock_timeout', '0', false)")

    def statement_succeeded(self) -> None:
        """Note that the layout fits the table, after a mark, a scan or a deletion."""
        self._was_altered = False

    def _raise(self, error: psycopg.Error) -> NoReturn:
        """Translate, and give up the connection: after an error its state is not worth a guess."""
        was_cut = self.connection is None or self.connection.closed
        self.close()
        message = one_line(error)
        if isinstance(error, ConnectionGivenUp):
            raise StoreSilent(message, in_doubt=True) from error
        if is_refusal(error):
            raise self._refused(message) from error
        if isinstance(error, errors.QueryCanceled):
            raise StatementCancelled(message, in_doubt=True) from error
        if was_cut or isinstance(error, _PASSING) or (error.sqlstate or "")[:2] in _PASSING_CLASSES:
            raise StoreUnavailable(message, in_doubt=True) from error
        if isinstance(error, _ALTERED) and self._layout and not self._was_altered:
            # The table was altered under our prepared statements. It is looked at again before the next mark or scan.
            self._was_altered = True
            self._layout = None
            raise StoreUnavailable(f"table {self.name} was altered: {message}", in_doubt=True) from error
        self._layout = None  # the table that comes back may be another one
        if isinstance(error, errors.UndefinedTable) and not self.query(sql.INSPECT, (self.quoted,)):
            raise self._missing() from error  # it, and not only a table beside it
        if isinstance(error, errors.InsufficientPrivilege):
            raise RightsMissing(
                f"missing rights on {self.name}: {message}, for role {quote(self.role)}; "
                "`outbox schema --grants` prints what it needs",
                in_doubt=True,
            ) from error
        raise OutboxTableError(f"outbox table {self.name}: {message}") from error

    def _refused(self, message: str) -> StoreUnavailable:
        """Return the error for a statement that PostgreSQL refused, as row level security would hide rows from it."""
        found: StoreUnavailable = RowsHidden(
            f"{message}, for role {quote(self.role)}: row level security or its policies were changed at this moment, "
            f"or a trigger of {self.name} meets it on another table; its function needs SET row_security = on"
        )
        try:
            refuse_hidden(self.query, self._secured_names)
        except StoreUnavailable as error:  # RowsHidden, with the remedy
            found = error
            self._layout = None  # calls look at the policies first until these hide nothing: no statement is in doubt
        found.in_doubt = True
        return found

    # -- the table as it is

    def refuse_unseen(self) -> None:
        """Raise OutboxTableError if no connection has found the outbox: of what belongs to it nothing is known then."""
        if not self.found_outbox.schema:
            self.check()

    def layout(self) -> Layout:
        """Return the layout; check the table first if that was not done or it was altered."""
        return self._layout or self.check()

    def look_again(self) -> None:
        """Have the next statement that depends on the layout check the table first."""
        self._layout = None

    def check(self) -> Layout:
        """Check the table and return its layout.

        Raises:
            OutboxTableError: if the table is missing, or is no outbox.
            RightsMissing: if the role may not harvest it, or not read its holds.
            RowsHidden: if row level security hides rows of it, its holds or its archive.
        """
        if not self.found.schema:
            self.close()  # another session may find it
        rows = self.query(sql.INSPECT, (self.quoted,))
        if not rows:
            raise self._missing()
        kind, ids_may_repeat, database, schema, table, may_harvest, columns, cache = rows[0]
        if kind not in {"r", "p"}:
            raise OutboxTableError(f"{self.name} is not a table, so it cannot be harvested")
        self._check_columns(columns)
        if not may_harvest:
            raise RightsMissing(
                f"missing rights on {self.name}: harvesting needs SELECT, DELETE and UPDATE (leader_id); {self.grant()}"
            )
        refuse_hidden(self.query, self._secured_names)
        self._warn([*self._doubts_of_ids(cache, ids_may_repeat), *map(self._doubt_of_obstacle, self.obstacles())])
        may_read, missing = self.inspect_holds()
        if not (may_read or missing):
            raise RightsMissing(
                f"missing rights on {self.hold_name}: what is held there would be published; {self.grant_holds()}"
            )
        by_address = kind == "r" and not ids_may_repeat
        self._layout = Layout(database, f"{schema}.{table}", by_address, "kafka_partition" in columns)
        return self._layout

    def _warn(self, doubts: list[str]) -> None:
        """Log what the last check of the table did not find."""
        for doubt in doubts:
            if doubt not in self._doubts:
                _log.warning("%s", doubt)
        self._doubts = doubts

    def _doubts_of_ids(self, cache: int | None, may_repeat: bool) -> Iterator[str]:
        if cache is not None and cache > 1:
            yield (
                f"the sequence of {self.name}.id has CACHE {cache}: ids are not drawn in order, so neither are records "
                "of transactions in different sessions, and the settled floor is off; ALTER SEQUENCE ... CACHE 1"
            )
        if may_repeat:
            yield (
                f"two rows of {self.name} may have one id: it has no unique index on id alone, or heirs. At-least-once "
                "delivery stops at such rows, exactly-once delivery may take one for the other; draw all ids from one "
                "sequence"
            )

    def _doubt_of_obstacle(self, obstacle: str) -> str:
        return f"table {self.name} has {obstacle}: publishing stops if it keeps records from being marked or removed"

    def _check_columns(self, columns: dict[str, str]) -> None:
        missing = [column for column in REQUIRED_COLUMNS if column not in columns]
        if missing:
            raise OutboxTableError(f"table {self.name} is no outbox: it lacks the column(s) {', '.join(missing)}")
        wrong = [f"{column} is {found}, expected {expected}" for column, found, expected in wrong_types(columns)]
        if wrong:
            raise OutboxTableError(f"table {self.name} is no outbox: {'; '.join(wrong)}")

    def inspect_holds(self) -> tuple[bool, list[str]]:
        """Return True if the table of holds may be read, and the columns that it lacks; all, if it is missing."""
        self.connected()
        rows = self.query(sql.INSPECT_HOLDS, (self.holds.quoted,))
        may_read, columns = rows[0] if rows else (False, ())
        self.had_holds |= bool(columns)
        return may_read, [column for column in HOLD_COLUMNS if column not in columns]

    def _missing(self) -> OutboxMissing:
        schemas = [quote(schema) for (schema,) in self.query(sql.SCHEMAS_WITHHELD, (self.name.table,))]
        if schemas and not self.name.schema:
            named = f"schema {schemas[0]}" if len(schemas) == 1 else f"schemas {', '.join(schemas)}"
            return OutboxMissing(
                f"outbox table {self.name} is not found in database {self.connected().info.dbname}: {named} has such a "
                f"table, and role {quote(self.role)} may not use it; GRANT USAGE ON SCHEMA {schemas[0]} TO "
                f"{quote(self.role)}, and name the table with its schema unless that is on the role's search path"
            )
        return OutboxMissing(
            f"outbox table {self.found} does not exist in database {self.connected().info.dbname}; make it with "
            f"`outbox schema --table {self.name} --apply`, with Alembic or with `manage.py migrate`, or name the right "
            "one (--table, OUTBOX_TABLE, outboxTable, OUTBOX['TABLE'])"
        )

    def check_archive(self) -> None:
        """Raise OutboxTableError or RightsMissing if published rows cannot go into the archive."""
        outbox = self.found_outbox
        archive, rotate = archive_beside(outbox).quoted, archive_rotation(outbox).quoted
        rows = self.query(sql.INSPECT_ARCHIVE, {"archive": archive, "rotate": f"{rotate}(integer)"})
        if not rows:
            raise OutboxTableError(
                f"retention: archive needs a table {archive}; make it with `outbox schema --archive --table "
                f"{self.name}`, with outbox_sqlalchemy.alembic.outbox_archive or with "
                "outbox_django.operations.ArchivePublished"
            )
        if not all(rows[0]):
            raise RightsMissing(
                f"missing rights on the archive: GRANT SELECT, INSERT ON TABLE {archive} TO {self.quoted_role}; "
                f"GRANT EXECUTE ON FUNCTION {rotate}(integer) TO {self.quoted_role}"
            )

    def grant(self) -> str:
        """Return the statement that grants the rights on the outbox table."""
        return f"GRANT SELECT, DELETE, UPDATE (leader_id) ON TABLE {self.quoted} TO {self.quoted_role}"

    def grant_holds(self) -> str:
        """Return the statement that grants the rights on the table of holds."""
        return f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {self.hold_name.quoted} TO {self.quoted_role}"

    def obstacles(self) -> list[str]:
        """List triggers and rules that may keep this role from marking and deleting rows that it can read."""
        return [what for (what,) in self.query(sql.OBSTACLES, {"name": self.quoted})]

    def time_digits(self) -> int | None:
        """Return how many digits of a second `create_time` has, None for all six."""
        rows = self.query(sql.TIME_PRECISION, (self.quoted,))
        digits = int(rows[0][0]) if rows else -1
        return digits if 0 <= digits < 6 else None

    def rules(self) -> Rules:
        """Return the constraints that a row may have come to violate, as SQL."""
        rules = self.query(sql.CONSTRAINTS, {"name": self.quoted})
        escaped = [(name.replace("%", "%%").replace("'", "''"), rule.replace("%", "%%")) for name, rule in rules]
        return Rules(
            broken=", ".join(f"CASE WHEN NOT ({rule}) THEN '{name}' END" for name, rule in escaped) or "NULL",
            fulfilled="(((" + ") AND (".join([rule for _, rule in escaped] or ["true"]) + ")) IS NOT FALSE)",
        )

    def refuse_what_remains(self, question: str, parameters: dict[str, Any]) -> None:
        """Raise RowsRemain if rows are still there after a DELETE that deleted fewer than it was given."""
        number, first = self.query(question, parameters)[0]
        if not number:
            return
        obstacles = ", ".join(self.obstacles()) or "no trigger or rule that could be seen is to blame"
        raise self._remain(
            f"{number} published rows of {self.name} (the first is {first}) are still there after they were deleted: "
            f"{obstacles}"
        )

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Raise RowsRemain if published rows cannot be deleted: a harvester that is started anew would repeat them."""
        try:
            yield
        except RowsHidden:
            raise  # it cannot be read either
        except (OutboxTableError, StoreUnavailable) as error:  # a foreign key, a trigger or a publication refuses it
            if isinstance(error, OutboxMissing):
                raise  # with all its rows
            is_refusal = isinstance(error, OutboxTableError | RightsMissing)
            if is_refusal or isinstance(error.__cause__, errors.ObjectNotInPrerequisiteState):
                raise self._remain(f"published rows cannot be deleted: {error}") from error
            raise

    def _remain(self, why: str) -> RowsRemain:
        until = f"until role {self.quoted_role} can remove rows from this table"
        return RowsRemain(f"{why}. Nothing more is published, as it would be repeated, {until}")


def _in_sql(text: object) -> object:
    return text.quoted.replace("%", "%%") if isinstance(text, TableName) else text


def _as_record(_: object) -> Callable[[Sequence[Any]], StoredRecord]:
    return partial(tuple.__new__, StoredRecord)  # as `StoredRecord._make`, several times as fast


@lru_cache(maxsize=128)
def numbered(statement: str) -> tuple[bytes, tuple[str, ...]]:
    """Return a statement with `$1`, `$2` ... for its parameters, and their names.

    A cursor of the usual kind does the same, for statements as long as a mark anew at each run: a tenth of a
    millisecond.
    """
    names: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        name = found[1] or str(len(names))
        return f"${names.setdefault(name, len(names) + 1)}"

    text = re.sub(r"%(?:\((\w+)\)s|s|%)", number, statement)
    return text.encode(), tuple(names)


def wrong_types(columns: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return name, found type and expected type of each column that has a type which no outbox has there."""
    return [
        (column, columns[column], expected)
        for column, (expected, types) in _EXPECTED.items()
        if column in columns
        and (columns[column].removesuffix("[]") if expected.endswith("[]") else columns[column]) not in types
    ]
