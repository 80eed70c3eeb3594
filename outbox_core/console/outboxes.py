"""The outboxes of a console: their settings, sessions on their databases, and readings that pages share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from outbox_core.config import HarvestConfig, redact
from outbox_core.console.caching import Cached, Reading
from outbox_core.console.messages import ApiError
from outbox_core.doctor.examination import examine
from outbox_core.doctor.findings import CommandLine, Commands, Finding, problem
from outbox_core.doctor.session import DatabaseSession, TableLocked, assumed_identity
from outbox_core.doctor.status import DatabaseStatus, KafkaStatus, Unknown, read_database_status, read_kafka_status
from outbox_core.doctor.table import HEAD_ROWS
from outbox_core.errors import InvalidConfig, OutboxError
from outbox_core.schema import TableName
from outbox_core.stores.postgres.connection import location

_NAME = "kafka-outbox console"
_DATABASE_FRESH_SECONDS = 1.0
_KAFKA_FRESH_SECONDS = 5.0
_FINDINGS_FRESH_SECONDS = 30.0
_WAIT_SECONDS = 2.5
_TOO_OLD = timedelta(seconds=20)
_LONGEST_NAME = 100
_LETTER_READERS = 2


class Unavailable(NamedTuple):
    """A service that does not tell what it was asked for, why, and what to do."""

    service: str
    reason: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return it as JSON can have it."""
        return self._asdict()


class ConsoleOutbox:
    """One outbox of a console. For any thread; holds no connection between requests.

    Args:
        name: in addresses and on the page.
        config: its settings, as a harvester has them.
        commands: the commands that remedies name.
    """

    def __init__(self, name: str, config: HarvestConfig, commands: Commands | None = None) -> None:
        self.name = name
        self.config = config
        self._commands = commands or CommandLine(str(TableName.parse(config.outbox_table)))
        self.database = Cached(self._read_database, _DATABASE_FRESH_SECONDS, f"outbox-console-database-{name}")
        self.kafka = Cached(self._read_kafka, _KAFKA_FRESH_SECONDS, f"outbox-console-kafka-{name}")
        self.letter_readers = threading.BoundedSemaphore(_LETTER_READERS)
        self.findings = Cached(self._examine, _FINDINGS_FRESH_SECONDS, f"outbox-console-doctor-{name}")

    @cached_property
    def place(self) -> str:
        """The database, without secrets."""
        return location(self.config.data_source)

    @property
    def identity(self) -> str:
        """`<database>.<schema>.<table>`, assumed from the settings as long as the database has not told it."""
        reading = self.database.latest
        if reading is None or isinstance(
            reading.value.backlog, Unknown
        ):  # then it is an assumption, perhaps an old one
            reading = self.database.get(_WAIT_SECONDS)
        return reading.value.outbox if reading else assumed_identity(self.config.data_source, self.config.outbox_table)

    @property
    def dead_letter_topic(self) -> str:
        """The topic of this outbox's dead letters."""
        return self.config.dead_letter_name(self.identity)

    @contextmanager
    def session(self, *, writes: bool = False) -> Iterator[DatabaseSession]:
        """Open a session on the database. The errors are those of `DatabaseSession` and its `translated`."""
        with (
            DatabaseSession(
                self.config.data_source, self.config.outbox_table, application_name=_NAME, writes=writes
            ) as session,
            session.translated(),
        ):
            yield session

    def read(self, ask: Callable[[DatabaseSession], Any]) -> dict[str, Any]:
        """Return the answer of the database as `data`, or why there is none as `unavailable`."""
        try:
            with self.session() as session:
                return {"data": ask(session), "unavailable": None}
        except InvalidConfig as error:  # parameters that do not fit together
            raise ApiError(400, "bad_parameter", redact(str(error)), where="query") from None
        except OutboxError as error:
            return {"data": None, "unavailable": unavailable("database", error).as_json()}

    def changed(self) -> None:
        """Have the status read anew: an action has changed something."""
        self.database.expire()
        self.findings.expire()

    def status(self) -> dict[str, Any]:
        """Return both halves of the status, each with the time at which it was read."""
        kafka = self.kafka.get(0)  # so that both are read side by side
        database = self.database.get(_WAIT_SECONDS)
        if kafka is None:
            kafka = self.kafka.get(_WAIT_SECONDS if database is None else 0.5)
        return {
            "outbox": self.identity,
            "leader_group": self.config.leader_names(self.identity)[0],
            "database": _half("database", database, lambda status: status.backlog, _backlog),
            "kafka": _half("kafka", kafka, lambda status: status.harvesters, _harvesters),
        }

    def _read_database(self) -> DatabaseStatus:
        return read_database_status(self.config)

    def _read_kafka(self) -> KafkaStatus:
        return read_kafka_status(self.config, self.identity)

    def _examine(self) -> list[Finding]:
        try:
            return list(examine(self.config, self._commands))
        except InvalidConfig as error:
            return [problem("settings", redact(str(error)), "mend the settings of this outbox")]


def make_outboxes(
    configs: Mapping[str, HarvestConfig], commands: Mapping[str, Commands] | None = None
) -> dict[str, ConsoleOutbox]:
    """Return the outboxes of a console, by their names; InvalidConfig says what is wrong with a name."""
    if not configs:
        raise InvalidConfig("a console needs at least one outbox")
    for name, config in configs.items():
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or "/" in name:
            raise InvalidConfig(
                f"{name!r:.120} cannot be the name of an outbox of a console: 1 to {_LONGEST_NAME} characters without /"
            )
        if not isinstance(config, HarvestConfig):
            raise InvalidConfig(
                f"outbox {name!r} of the console: expected a HarvestConfig, got {type(config).__name__}"
            )
    chosen = commands or {}
    return {name: ConsoleOutbox(name, config, chosen.get(name)) for name, config in configs.items()}


def unavailable(service: str, error: OutboxError) -> Unavailable:
    """Return why a service did not answer, without secrets."""
    remedy = error.remedy if isinstance(error, TableLocked) else ""
    return Unavailable(service, redact(str(error)), remedy)


def _half(service: str, reading: Reading[Any] | None, part: Callable[[Any], Any], as_json: Callable[[Any], Any]) -> Any:
    # An old reading is of another time: nobody has asked since, or the service hangs.
    if reading is None or datetime.now(UTC) - reading.at > _TOO_OLD:
        return {"at": None, "data": None, "unavailable": Unavailable(service, "not known yet").as_json()}
    value = part(reading.value)
    at = reading.at.isoformat()
    if isinstance(value, Unknown):
        return {"at": at, "data": None, "unavailable": Unavailable(service, value.reason, value.remedy).as_json()}
    return {"at": at, "data": as_json(value), "unavailable": None}


def _backlog(backlog: Any) -> dict[str, Any]:
    document: dict[str, Any] = backlog.as_json()
    for topic in document["topics"]:
        topic["deliverable"] = topic["waiting"] - topic["held"]
    held = document.pop("held")
    return {**document, "holds": held, "head_rows": HEAD_ROWS}


def _harvesters(contenders: Any) -> dict[str, Any]:
    return {"harvesters": [contender._asdict() for contender in contenders]}
