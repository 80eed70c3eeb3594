"""The status of an outbox, as `outbox status` prints it: what waits, what is held, and who leads.

Each half is read by itself and says why, if it is not known. SELECT on the outbox and its holds suffices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from outbox_core.config import redact
from outbox_core.doctor.findings import CommandLine
from outbox_core.doctor.kafka import Contender, KafkaConnecting
from outbox_core.doctor.postgres import MOST_TOPICS, Held, PostgresChecks, TopicAtHead
from outbox_core.doctor.session import CONNECT_SECONDS, DatabaseSession, TableLocked, assumed_identity
from outbox_core.errors import InvalidConfig, OutboxError, OutboxTableError, StoreUnavailable
from outbox_core.schema import events_beside

if TYPE_CHECKING:
    from outbox_core.config import HarvestConfig

_NAME = "kafka-outbox status"

_LEADERSHIP = """
SELECT kind, actor, term, extract(epoch FROM clock_timestamp() - create_time)::float8, reason FROM {events}
WHERE outbox = %s AND kind IN ('leader_acquired', 'leader_handed_over', 'leader_fenced') ORDER BY id DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The records in the outbox table. Ages are in seconds, None where there is no record or its time is infinite."""

    pending: int
    is_estimate: bool
    """True beyond 100,000 records: then the number is the planner's."""
    oldest_age_seconds: float | None
    oldest_deliverable_seconds: float | None
    """Of the first of the oldest 10,000 that no hold keeps; a larger age of the whole table is of a held record."""
    oldest_held_seconds: float | None
    held_at_head: int
    """Records that holds keep, among the oldest 10,000."""
    topics: tuple[TopicAtHead, ...]
    held: Held | None
    """The holds; None where they cannot be read."""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as JSON can have them."""
        named = {name: _rounded(getattr(self, name)) for name in _BACKLOG_FIELDS}
        topics = [{name: _rounded(value) for name, value in topic._asdict().items()} for topic in self.topics]
        return named | {"topics": topics, "held": self.held and self.held._asdict()}


class Leadership(NamedTuple):
    """The last thing that the history tells of leaderships."""

    kind: str
    """`leader_acquired`, `leader_handed_over` or `leader_fenced`."""
    harvester: str
    term: int | None
    seconds_ago: float
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The reason why a half of the status is not known, and what to do."""

    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DatabaseStatus:
    """The half that the database knows."""

    outbox: str
    """`<database>.<schema>.<table>`, assumed from the settings if the database does not answer."""
    backlog: Backlog | Unknown
    leadership: Leadership | None = None
    """None without a history, or without the right to read it."""


@dataclass(frozen=True, slots=True)
class KafkaStatus:
    """The half that Kafka knows."""

    group: str
    harvesters: tuple[Contender, ...] | Unknown


@dataclass(frozen=True, slots=True)
class Status:
    """Both halves."""

    database: DatabaseStatus
    kafka: KafkaStatus

    def as_json(self) -> dict[str, Any]:
        """Return the status as JSON can have it; null is what is not known."""
        backlog, harvesters = self.database.backlog, self.kafka.harvesters
        leadership = self.database.leadership
        known = backlog.as_json() if isinstance(backlog, Backlog) else dict.fromkeys(_BACKLOG_FIELDS)
        return {
            "outbox": self.database.outbox,
            **known,
            "last_leadership": leadership and {name: _rounded(value) for name, value in leadership._asdict().items()},
            "leader_group": self.kafka.group,
            "harvesters": None if isinstance(harvesters, Unknown) else [one._asdict() for one in harvesters],
            "database_error": asdict(backlog) if isinstance(backlog, Unknown) else None,
            "kafka_error": asdict(harvesters) if isinstance(harvesters, Unknown) else None,
        }


_BACKLOG_FIELDS = tuple(field.name for field in fields(Backlog))


def read_status(config: HarvestConfig, *, connect_seconds: float = CONNECT_SECONDS) -> Status:
    """Read both halves, each given `connect_seconds` to answer. Raises InvalidConfig for unusable settings."""
    halves = read_halves(config, connect_seconds=connect_seconds)
    database, kafka = cast("tuple[DatabaseStatus, KafkaStatus]", tuple(halves))
    return Status(database, kafka)


def read_halves(
    config: HarvestConfig, *, connect_seconds: float = CONNECT_SECONDS
) -> Iterator[DatabaseStatus | KafkaStatus]:
    """Yield the database's half and then Kafka's, each as soon as it is read; both are connected to side by side."""
    with KafkaConnecting(config.base_kafka_config, connect_seconds=connect_seconds) as connecting:
        database = read_database_status(config, connect_seconds=connect_seconds)
        yield database
        yield _read_kafka_status(config, database.outbox, connecting)


def read_database_status(config: HarvestConfig, *, connect_seconds: float = CONNECT_SECONDS) -> DatabaseStatus:
    """Read the half that the database knows."""
    outbox = assumed_identity(config.data_source, config.outbox_table)
    try:
        with DatabaseSession(
            config.data_source, config.outbox_table, application_name=_NAME, connect_seconds=connect_seconds
        ) as session:
            identity = session.identity()
            if identity is None:
                raise OutboxTableError(f"outbox table {session.table} does not exist in {session.place}")
            outbox = identity
            return DatabaseStatus(outbox, _backlog(PostgresChecks(session, CommandLine())), _leadership(session))
    except InvalidConfig:
        raise
    except TableLocked as error:
        return DatabaseStatus(outbox, Unknown(str(error), error.remedy))
    except OutboxError as error:
        return DatabaseStatus(outbox, Unknown(redact(str(error))))


def _leadership(session: DatabaseSession) -> Leadership | None:
    events = events_beside(session.table)
    try:
        rows = session.ask(_LEADERSHIP.format(events=events.quoted.replace("%", "%%")), (str(session.table),))
    except (OutboxTableError, StoreUnavailable):
        return None
    return Leadership(*rows[0]) if rows else None


def read_kafka_status(config: HarvestConfig, outbox: str, *, connect_seconds: float = CONNECT_SECONDS) -> KafkaStatus:
    """Read the half that Kafka knows, of an outbox of this identity (`<database>.<schema>.<table>`)."""
    with KafkaConnecting(config.base_kafka_config, connect_seconds=connect_seconds) as connecting:
        return _read_kafka_status(config, outbox, connecting)


def _read_kafka_status(config: HarvestConfig, outbox: str, connecting: KafkaConnecting) -> KafkaStatus:
    group, _ = config.leader_names(outbox)
    try:
        return KafkaStatus(group, tuple(connecting.checks().contenders(group)))
    except InvalidConfig:
        raise
    except OutboxError as error:
        return KafkaStatus(group, Unknown(redact(str(error))))


def _backlog(checks: PostgresChecks) -> Backlog:
    counted = checks.backlog()
    heads = checks.topics_at_head()
    return Backlog(
        pending=counted.pending,
        is_estimate=counted.is_estimate,
        oldest_age_seconds=counted.oldest_age_seconds,
        oldest_deliverable_seconds=_largest(head.oldest_deliverable_seconds for head in heads),
        oldest_held_seconds=_largest(head.oldest_held_seconds for head in heads),
        held_at_head=sum(head.held for head in heads),
        topics=tuple(heads[:MOST_TOPICS]),
        held=checks.held(),
    )


def _largest(ages: Iterable[float | None]) -> float | None:
    return max((age for age in ages if age is not None), default=None)


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
