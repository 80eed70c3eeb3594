"""The common options of `outbox` and `outbox_kafka_txn`: settings on which a relay and its harvesters must agree."""

from __future__ import annotations

import functools
import json
from contextlib import closing
from typing import Any

from outbox_core.config import HarvestConfig, Limits, format_duration, parse_duration
from outbox_core.errors import InvalidConfig
from outbox_core.stores.postgres.store import PostgresStore
from outbox_spark.runtime.options import Options

# Option -> field of HarvestConfig.
_FIELDS = {
    "dsn": "data_source",
    "table": "outbox_table",
    "leaderTopic": "leader_topic",
    "leaderGroupId": "leader_group_id",
    "transactionalId": "transactional_id",
    "trackingTopic": "tracking_topic",
    "outboxName": "outbox_name",
    "name": "name",
}
_DURATIONS = {"transactionTimeout": "transaction_timeout", "heartbeatTimeout": "heartbeat_timeout"}
_PRODUCER = "producer."
_ID_HEADER = "idHeader"
_NO_HEADER = "-"

COMMON_OPTIONS = (
    *_FIELDS,
    *_DURATIONS,
    _ID_HEADER,
    "acceptMarked",
    "acceptMoved",
    "outbox",
    "server",
    "term",
    "producerKafkaConfig",
)


def config_of(options: Options) -> HarvestConfig:
    """Read the harvester's settings. Raises InvalidConfig."""
    values: dict[str, Any] = {field: options.optional(option) for option, field in _FIELDS.items()}
    limits: dict[str, Any] = {
        field: _duration(options, option) for option, field in _DURATIONS.items() if options.optional(option)
    }
    header = options.text(_ID_HEADER, "outbox-id")
    return HarvestConfig(
        **{field: value for field, value in values.items() if value is not None},
        base_kafka_config=options.kafka() if options.has_kafka else {},
        producer_kafka_config=_json(options, "producerKafkaConfig"),
        id_header="" if header == _NO_HEADER else header,
        accept_marked=options.flag("acceptMarked", default=False),
        accept_moved=options.flag("acceptMoved", default=False),
        delivery="exactly-once",
        limits=Limits(**limits),
    )


def options_of(config: HarvestConfig, identity: str, term: int, server_id: str = "") -> dict[str, str]:
    """Write settings as options. Raises InvalidConfig for a Kafka setting that cannot be text, such as a function."""
    options = {option: value for option, field in _FIELDS.items() if (value := getattr(config, field)) is not None}
    options |= {option: format_duration(getattr(config.limits, field)) for option, field in _DURATIONS.items()}
    for name, value in (*config.base_kafka_config.items(), *config.producer_kafka_config.items()):
        if callable(value) or not isinstance(value, str | int | float | bool):
            raise InvalidConfig(f"Kafka setting {name}: a function cannot be handed to Spark's workers; use text")
    options |= {f"kafka.{name}": _text(value) for name, value in config.base_kafka_config.items()}
    options |= {
        "producerKafkaConfig": json.dumps(config.producer_kafka_config),
        _ID_HEADER: config.id_header or _NO_HEADER,
        "acceptMarked": _text(config.accept_marked),
        "acceptMoved": _text(config.accept_moved),
        "outbox": identity,
        "server": server_id,
        "term": str(term),
    }
    return options


def identity_of(options: Options, config: HarvestConfig) -> str:
    """Return the outbox's identity: from the options, or else from the database, which each process asks once."""
    return options.optional("outbox") or _identify(config.data_source, config.outbox_table)


def server_id_of(config: HarvestConfig) -> str:
    """Return the database server's ID."""
    with closing(PostgresStore(config.data_source, config.outbox_table)) as store:
        return store.server_id()


@functools.cache
def _identify(data_source: str, table: str) -> str:
    with closing(PostgresStore(data_source, table)) as store:
        return store.check()


def _duration(options: Options, option: str) -> Any:
    try:
        return parse_duration(options.text(option))
    except ValueError as error:
        raise options.error(option, str(error)) from None


def _json(options: Options, option: str) -> dict[str, Any]:
    try:
        found = json.loads(options.text(option, "{}"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise options.error(option, "must be a JSON object with librdkafka's settings")
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
