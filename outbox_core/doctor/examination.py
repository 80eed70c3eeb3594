"""The examination behind `outbox doctor`: all findings on an outbox, one by one, as they are made.

Database and Kafka are connected to side by side, each given two seconds to answer, and examined one after the other.
What the database does not tell is assumed: the name of the leader group, from the data source and the table's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg

from outbox_core.config import redact
from outbox_core.doctor.findings import Commands, Finding, Verdict, fine, problem, unanswered, warning
from outbox_core.doctor.kafka import KafkaConnecting
from outbox_core.doctor.postgres import MOST_TOPICS, PostgresChecks
from outbox_core.doctor.retention import RetentionChecks
from outbox_core.doctor.session import CONNECT_SECONDS, DatabaseSession, TableLocked, assumed_identity
from outbox_core.doctor.table import TableChecks
from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError, StoreUnavailable
from outbox_core.stores.postgres.connection import LENT_BY_TRANSACTION, location
from outbox_core.stores.postgres.notify import CommitNotices, NoNotices
from outbox_core.stores.postgres.store import PostgresStore

if TYPE_CHECKING:
    from outbox_core.config import HarvestConfig

_NAME = "kafka-outbox doctor"
_DATABASE, _KAFKA = "database", "Kafka"
_LATE_SECONDS = 30.0


@dataclass(slots=True)
class _Learned:
    """The answers of the database that the questions to Kafka need."""

    identity: str | None = None
    server_id: str = ""
    topics: list[str] = field(default_factory=list)
    with_keyless: set[str] = field(default_factory=set)
    oldest_ready_seconds: float = 0.0  # of the records that no hold keeps


def examine(
    config: HarvestConfig, commands: Commands, *, connect_seconds: float = CONNECT_SECONDS
) -> Iterator[Finding]:
    """Yield the findings on a configuration, its database and its cluster, each as soon as it is made.

    Changes nothing, and needs no right but to read. A service that does not answer within `connect_seconds` is a
    finding with `unanswered`. Raises InvalidConfig for settings that cannot be used.
    """
    learned = _Learned()
    with KafkaConnecting(config.base_kafka_config, commands, connect_seconds=connect_seconds) as connecting:
        yield from _database_findings(config, commands, learned, connect_seconds)
        yield from _kafka_findings(config, learned, connecting)


def _database_findings(
    config: HarvestConfig, commands: Commands, learned: _Learned, connect_seconds: float
) -> Iterator[Finding]:
    try:
        yield from _examine_database(config, commands, learned, connect_seconds)
    except InvalidConfig:
        raise
    except TableLocked as error:
        yield unanswered("lock", "database", str(error), error.remedy)
    except StoreUnavailable as error:
        yield unanswered(_DATABASE, "database", redact(str(error)), _reach_database(config))
    except OutboxError as error:
        if str(error) == LENT_BY_TRANSACTION:
            yield problem("pooler", str(error), "name the database itself, or a pool of sessions")
            return
        yield problem(_DATABASE, redact(str(error)), "the role needs SELECT on the outbox and its table of holds")


def _kafka_findings(config: HarvestConfig, learned: _Learned, connecting: KafkaConnecting) -> Iterator[Finding]:
    try:
        yield from _examine_kafka(config, learned, connecting)
    except KafkaUnavailable as error:
        servers = config.base_kafka_config.get("bootstrap.servers", "")
        remedy = f"see that brokers run at bootstrap.servers={servers}, and that TLS and SASL settings fit them"
        yield unanswered(_KAFKA, "kafka", redact(str(error)), remedy)
    except OutboxError as error:
        yield problem(_KAFKA, redact(str(error)), "see the settings of baseKafkaConfig")


def _reach_database(config: HarvestConfig) -> str:
    return (
        f"see that PostgreSQL answers for {location(config.data_source)}; --dsn, OUTBOX_POSTGRES_DSN, dataSource of "
        "the file or Django's DATABASES name it"
    )


def _examine_database(
    config: HarvestConfig, commands: Commands, learned: _Learned, connect_seconds: float
) -> Iterator[Finding]:
    with DatabaseSession(
        config.data_source, config.outbox_table, application_name=_NAME, connect_seconds=connect_seconds
    ) as session:
        checks = PostgresChecks(session, commands)
        yield from checks.server()
        learned.server_id = session.server_id()
        learned.identity = session.identity()
        if learned.identity is None:
            yield problem(
                "table",
                f"outbox table {session.table} does not exist in {session.place}",
                f"make it with {commands.make_tables()}, or name the right one (--table, OUTBOX_TABLE, outboxTable)",
            )
            return
        table = TableChecks(session, commands)
        yield from table.from_catalog()
        needs_holds = config.on_poison == "dead-letter"
        yield from checks.holds(needed=needs_holds, only_reads=table.only_reads)
        kept = RetentionChecks(session, commands)
        yield from kept.history(only_reads=table.only_reads)
        if config.retention == "archive":
            yield from kept.archive(only_reads=table.only_reads)
        yield from checks.snapshots()
        if not table.is_outbox:
            return
        if not checks.is_standby:  # which refuses the sessions of a harvester
            if config.notify:
                yield _examine_notices(config, commands)
            yield _settled_floor(config)
        yield from table.from_rows(without_marks=config.delivery == "exactly-once")
        yield from checks.held_findings()
        heads = checks.topics_at_head()
        learned.oldest_ready_seconds = max((head.oldest_deliverable_seconds or 0.0 for head in heads), default=0.0)
        heads = heads[:MOST_TOPICS]
        learned.topics = [head.topic for head in heads]
        learned.with_keyless = {head.topic for head in heads if head.has_keyless}


def _examine_notices(config: HarvestConfig, commands: Commands) -> Finding:
    notices = CommitNotices(config.data_source, config.outbox_table, application_name=_NAME)
    try:
        notices.open()
    except NoNotices as error:
        has_trigger = "no trigger" not in str(error)
        remedy = "name the database itself as the data source" if has_trigger else commands.add_trigger()
        return warning("notices", f"{error}. Until then the harvester looks at intervals, up to markBackoff", remedy)
    finally:
        notices.dispose()
    return fine("notices", "the trigger is there, and notices come through")


def _settled_floor(config: HarvestConfig) -> Finding:
    source = psycopg.conninfo.make_conninfo(config.data_source, connect_timeout=2)
    with closing(PostgresStore(source, config.outbox_table, application_name=_NAME, statement_timeout=5.0)) as store:
        unusable = store.sequence.snapshot().unusable
    if not unusable:
        return fine("settled floor", "can be proven")
    remedy = unusable if unusable.startswith("GRANT ") else ""
    return warning(
        "settled floor",
        f"is off: {unusable}. Nothing is lost, but while old snapshots are open harvesting gets slower the more is "
        "harvested",
        remedy or "none is needed while harvesting is fast enough",
    )


def _examine_kafka(config: HarvestConfig, learned: _Learned, connecting: KafkaConnecting) -> Iterator[Finding]:
    kafka = connecting.checks()
    yield kafka.cluster()
    identity = learned.identity or assumed_identity(config.data_source, config.outbox_table)
    group, leader_topic = config.leader_names(identity)
    tracking = config.tracking_names(identity)
    is_needed = config.delivery == "exactly-once"
    yield from kafka.leader_topic(leader_topic)
    members = kafka.leader_group(group)
    yield members
    if learned.identity and members.verdict is Verdict.OK:  # else there are none, or they are not ours
        leader = _leader(config, identity, learned.server_id)
        yield leader
        if leader.verdict is Verdict.OK and learned.oldest_ready_seconds > _LATE_SECONDS:
            yield _delay(learned.oldest_ready_seconds, leader.detail)
    # The head names the outbox; ids and times take eight bytes each.
    manifest_bytes = 2048 + 16 * config.limits.most_in_transaction
    yield from kafka.tracking_topic(tracking.topic, needed=is_needed, manifest_bytes=manifest_bytes)
    timeout_ms = config.limits.transaction_timeout // timedelta(milliseconds=1)
    yield from kafka.transactional_id(
        tracking.transactional_id, tracking.topic, needed=is_needed, timeout_ms=timeout_ms
    )
    yield from kafka.relay_topic(tracking.relay_topic)
    if config.on_poison == "dead-letter":
        yield from kafka.dead_letter_topic(config.dead_letter_name(identity))
    yield kafka.writers([leader_topic, tracking.topic, tracking.relay_topic])
    if learned.topics:
        yield from kafka.topics(learned.topics, with_keyless=learned.with_keyless)


def _delay(seconds: float, leader: str) -> Finding:
    return warning(
        "delay",
        f"records that no hold keeps have waited for {seconds:,.0f} s, and {leader}",
        "`outbox status --watch` shows whether they become fewer, as after a burst; if not, that harvester's /healthz "
        "and log name what it waits for: a database connection, a broker, a lock, a refusal",
    )


def _leader(config: HarvestConfig, identity: str, server_id: str) -> Finding:
    """Return the finding on the leader, by its heartbeats: it must lead for this very outbox."""
    from outbox_core.election import NeliConfig
    from outbox_core.election.observer import next_heartbeat

    contest = NeliConfig.of(config, identity, server_id)
    heartbeat = next_heartbeat(contest)
    if heartbeat is None:
        return warning(
            "leader",
            f"no heartbeat of a leader was read on {contest.topic}",
            "look again; if it stays so, the log of the harvesters says what keeps them from leading",
        )
    if not contest.contest.agrees(heartbeat.contest):
        return problem(
            "leader",
            f"{heartbeat.name} leads {contest.group_id} for {heartbeat.contest}, and this is {contest.contest}",
            "if the database was upgraded by pg_upgrade or moved, restart that harvester; else set another "
            "leaderGroupID (leader_group_id) for one of the two: only one of them is published",
        )
    return fine("leader", f"{heartbeat.name} leads")
