"""The settings of the harvester."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    AliasGenerator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from outbox_core.config import kafka_settings
from outbox_core.config.data_source import DEFAULT_DATA_SOURCE, normalise_data_source
from outbox_core.config.durations import format_duration, parse_duration
from outbox_core.config.names import yaml_name
from outbox_core.config.problems import InvalidSettings, Problem, Settings
from outbox_core.config.redaction import redact, redact_settings
from outbox_core.schema import TableName
from outbox_core.topic_names import MAX_TOPIC_LENGTH, must_be_legal

_log = logging.getLogger("outbox_core.config")

_WITHOUT_EFFECT = {
    "queue_timeout",
    "send_concurrency",
    "send_buffer",
    "poll_duration",
    "max_poll_interval",
    "drain_interval",
}
"""goharvest's limits that have nothing to limit here; docs/configuration.md gives the reasons."""

_NAMED_AS_IN_YAML = ConfigDict(alias_generator=AliasGenerator(validation_alias=yaml_name))

_MOST_ROWS_OF_A_MANIFEST = 50_000  # 16 bytes each, of the 1 MB that brokers take by default
_SOCKET_TIMEOUT = timedelta(seconds=5)
_SHORTEST_DELIVERY_TIMEOUT = timedelta(milliseconds=100)
_DEFAULT_SERVERS = {"bootstrap.servers": "localhost:9092"}
_INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state")


def _between(shortest: str, longest: str) -> Callable[[timedelta], timedelta]:
    def check(value: timedelta) -> timedelta:
        if not parse_duration(shortest) <= value <= parse_duration(longest):
            raise ValueError(f"must be between {shortest} and {longest}")
        return value

    return check


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")  # noqa: TRY004  pydantic reports ValueErrors
    return value


def _must_be_name(text: str) -> str:
    """Refuse blanks, too, which nobody sees: with one behind its group, a harvester would lead beside the others."""
    if not text or text != text.strip():
        raise ValueError("must not be empty, or begin or end with blanks")
    return text


def _must_be_table(text: str) -> str:
    TableName.parse(text)
    return text


_Pause = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_between("1ms", "1h"))]
_Lease = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(_between("1s", "10m"))]
_Count = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=10_000_000)]
_Bytes = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=2**10, le=2**40)]
_Port = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=0, le=65535)]
_Name = Annotated[str, AfterValidator(_must_be_name)]  # a Field would clash with the factory of a default


class Limits(Settings):
    """Bounds on time and memory. Durations are `timedelta`, or text like `100ms`, `5s`, `1m30s`.

    Attributes:
        min_poll_interval: the shortest time between two of the leader's heartbeats, unless fewer than five would fit
            into `heartbeat_timeout`.
        heartbeat_timeout: the time for which leadership lasts without an own heartbeat coming back.
        mark_backoff: the longest pause between two queries while the table has nothing new. Pauses begin with a
            millisecond and grow up to it, or to two seconds while `notify` works.
        io_error_backoff: the pause after a statement failed.
        statement_timeout: the time after which the database cancels a statement of the harvester.
        max_in_flight_records: the most records in memory, marked and not yet purged.
        max_in_flight_bytes: the most bytes of their values and headers. One statement fetches a quarter of that, or a
            single larger record. The Kafka client holds a second copy of records under way.
        mark_query_records: the most records that one statement marks, and of a transaction of exactly-once delivery.
            While there is a backlog, and transactions are quick, they grow up to half of `max_in_flight_records`.
        lane_capacity: the most records of one key that wait in memory for their turn.
        min_metrics_interval: the shortest time between two `MeterRead` events.
        transaction_timeout: the time after which Kafka aborts an open transaction of exactly-once delivery; readers
            wait that long at most when a harvester dies.
        drain_timeout: the time for which a graceful stop waits for acknowledgements.
    """

    model_config = _NAMED_AS_IN_YAML

    min_poll_interval: _Pause = timedelta(milliseconds=100)
    heartbeat_timeout: _Lease = timedelta(seconds=5)
    mark_backoff: _Pause = timedelta(milliseconds=250)
    io_error_backoff: _Pause = timedelta(milliseconds=500)
    statement_timeout: _Pause = timedelta(seconds=30)
    max_in_flight_records: _Count = 20_000
    max_in_flight_bytes: _Bytes = 32 * 2**20
    mark_query_records: _Count = 5_000
    lane_capacity: _Count = 1_000
    min_metrics_interval: _Pause = timedelta(seconds=5)
    transaction_timeout: _Lease = timedelta(seconds=15)
    drain_timeout: _Pause = timedelta(seconds=10)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_has_no_effect(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kept, dropped = _split_limits(values)
        _say_without_effect([f"limits.{name}" for name in dropped])
        return kept

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        """Lower defaults that do not fit: a smaller `max_in_flight_records` takes the others down with it."""
        for name in ("mark_query_records", "lane_capacity"):
            if name not in self.model_fields_set:
                self.__dict__[name] = min(getattr(self, name), self.max_in_flight_records)
        if self.mark_query_records > self.max_in_flight_records:
            raise ValueError("markQueryRecords must not be more than maxInFlightRecords")
        return self

    @property
    def most_in_transaction(self) -> int:
        """The most records of a transaction of exactly-once delivery; two of them are in memory."""
        return max(self.mark_query_records, min(self.max_in_flight_records // 2, _MOST_ROWS_OF_A_MANIFEST))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, format_duration(value) if isinstance(value, timedelta) else value


class LeaderNames(NamedTuple):
    """The group in which harvesters of one outbox compete, and their leader topic."""

    group_id: str
    topic: str


class TrackingNames(NamedTuple):
    """The names in Kafka of exactly-once delivery of one outbox."""

    transactional_id: str
    topic: str
    relay_topic: str


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname() or "localhost")
    return f"{host}_{os.getpid()}_{int(time.time())}"


class HarvestConfig(Settings):
    """The settings of a harvester.

    Attributes:
        base_kafka_config: librdkafka properties of every client, TLS and SASL included. From Python also callables
            (`oauth_cb`). `bootstrap.servers` is `localhost:9092` unless set.
        producer_kafka_config: librdkafka properties on top of those, for the producer that publishes.
        leader_topic: the topic of the election; None for the leader group's name with `.neli` behind it.
        leader_group_id: the group of the election, one for each outbox; None for its database, schema and table.
        data_source: the outbox's database; see `outbox_core.config.data_source`.
        outbox_table: the outbox's table, `table` or `schema.table`.
        delivery: `at-least-once`, or `exactly-once` for readers with `isolation.level=read_committed`.
        transactional_id: of exactly-once delivery, the same for every harvester of the outbox and no other; None to
            derive it from the outbox's identity and the leader group.
        tracking_topic: the topic of exactly-once delivery's manifests; None to derive it likewise, with `.manifests`
            behind it.
        accept_marked: let exactly-once delivery publish rows that an at-least-once leader left marked, although some
            may have been published before.
        accept_moved: let exactly-once delivery go on although the last manifest names another database server: the
            database was upgraded by pg_upgrade, or moved here by other means than physical replication.
        on_poison: `hold` a record that Kafka refuses for good, with the later records of its key behind it, until an
            operator decides; or publish it to the `dead-letter` topic, and go on.
        dead_letter_topic: None to derive it from the outbox's identity, with `.dead-letter` behind it.
        retention: `delete` rows that are published, or move them into the `archive` beside the outbox
            (`outbox_core.retention.archive`).
        archive_days: the days for which the archive keeps them.
        notify: listen for the notices of the trigger that `outbox schema --notify` prints; without notices, query the
            table at growing intervals.
        name: the name of this instance in logs, and the default `client.id`.
        outbox_name: the text before the row's id in the id header; None for database, schema and table.
        id_header: the name of the header that tells repeats apart; empty for none.
        metrics_port: the port of `/metrics` and `/healthz`; 0 for any free port, None for no server.
        metrics_host: the address to serve them on.
        limits: bounds on time and memory.

    Raises:
        InvalidConfig: naming every setting that is wrong.
    """

    model_config = _NAMED_AS_IN_YAML

    base_kafka_config: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    producer_kafka_config: dict[str, Any] = Field(default_factory=dict)
    leader_topic: str | None = None
    leader_group_id: _Name | None = None
    data_source: Annotated[str, AfterValidator(normalise_data_source)] = Field(
        default=DEFAULT_DATA_SOURCE, validate_default=True
    )
    outbox_table: Annotated[str, AfterValidator(_must_be_table)] = "outbox"
    delivery: Literal["at-least-once", "exactly-once"] = "at-least-once"
    transactional_id: _Name | None = None
    tracking_topic: str | None = None
    accept_marked: bool = False
    accept_moved: bool = False
    on_poison: Literal["hold", "dead-letter"] = "hold"
    dead_letter_topic: str | None = None
    retention: Literal["delete", "archive"] = "delete"
    archive_days: Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=36_500)] = 30
    notify: bool = False
    name: _Name = Field(default_factory=_default_name)
    outbox_name: _Name | None = None
    id_header: str = "outbox-id"
    metrics_port: _Port | None = None
    metrics_host: _Name = "127.0.0.1"
    limits: Limits = Field(default_factory=Limits)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_has_no_effect(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kept, dropped = dict(values), []
        if isinstance(kept.get("limits"), Mapping):
            kept["limits"], names = _split_limits(kept["limits"])
            dropped += [f"limits.{name}" for name in names]
        for section in ("base_kafka_config", "baseKafkaConfig", "producer_kafka_config", "producerKafkaConfig"):
            if isinstance(kept.get(section), Mapping):
                of_go = [key for key in kept[section] if str(key).startswith(kafka_settings.GO_CLIENT_PREFIX)]
                kept[section] = {key: value for key, value in kept[section].items() if key not in of_go}
                dropped += [f"{section}.{key}" for key in of_go]
        _say_without_effect(dropped)
        return kept

    @field_validator("base_kafka_config", "producer_kafka_config")
    @classmethod
    def _check_properties(cls, settings: dict[str, Any]) -> dict[str, Any]:
        problems = [Problem((name,), why) for name, why in kafka_settings.refused_settings(settings)]
        if problems:
            raise InvalidSettings(problems)
        return settings

    @field_validator("base_kafka_config")
    @classmethod
    def _know_the_servers(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return settings if any(key in settings for key in kafka_settings.SERVERS) else _DEFAULT_SERVERS | settings

    @field_validator("leader_topic", "tracking_topic", "dead_letter_topic")
    @classmethod
    def _a_topic_of_its_own(cls, topic: str | None) -> str | None:
        if topic is None:
            return None
        if must_be_legal(topic) in _INTERNAL_TOPICS:
            raise ValueError("is one of Kafka's own topics, which clients must not write to; name another")
        return topic

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.delivery == "exactly-once" and self.limits.mark_query_records > _MOST_ROWS_OF_A_MANIFEST:
            why = (
                f"must not be more than {_MOST_ROWS_OF_A_MANIFEST} with exactly-once delivery: a manifest is one record"
            )
            raise InvalidSettings([Problem(("limits", "mark_query_records"), why)])
        if kafka_settings.linger(self._merged) >= self.delivery_timeout:
            given = "base" if kafka_settings.linger(self.base_kafka_config) >= self.delivery_timeout else "producer"
            raise InvalidSettings(
                [Problem((f"{given}_kafka_config", "linger.ms"), "must be less than the delivery timeout")]
            )
        longest_drain = kafka_settings.max_poll_interval(self.base_kafka_config) * 4 / 5
        if self.limits.drain_timeout > longest_drain:
            why = f"must not be more than {format_duration(longest_drain)}, or the group takes the leader for dead"
            raise InvalidSettings([Problem(("limits", "drain_timeout"), why)])
        wanted = kafka_settings.wanted_delivery_timeout(self.base_kafka_config, self.producer_kafka_config)
        if wanted is not None and wanted > self.delivery_timeout:
            _say_once(
                f"delivery.timeout.ms is lowered to {format_duration(self.delivery_timeout)}, 60% of heartbeatTimeout "
                f"({format_duration(self.limits.heartbeat_timeout)}): a send must be over before leadership can end"
            )
        return self

    @property
    def _merged(self) -> dict[str, Any]:
        return {**self.base_kafka_config, **self.producer_kafka_config}

    @property
    def delivery_timeout(self) -> timedelta:
        """The limit from `produce()` to the acknowledgement: no longer than a lease allows."""
        longest = kafka_settings.longest_delivery_timeout(self.limits.heartbeat_timeout)
        wanted = kafka_settings.wanted_delivery_timeout(self.base_kafka_config, self.producer_kafka_config)
        return longest if wanted is None else min(wanted, longest)

    @property
    def shortest_delivery_timeout(self) -> timedelta:
        """The least to which the delivery timeout may be lowered, so that records can leave the producer and arrive."""
        return max(_SHORTEST_DELIVERY_TIMEOUT, 2 * kafka_settings.linger(self._merged))

    @property
    def max_message_bytes(self) -> int:
        """The limit of a message, in bytes."""
        return kafka_settings.max_message_bytes(self._merged)

    def producer_settings(self) -> dict[str, Any]:
        """Return the librdkafka settings of the producer that publishes."""
        # At least once, a standby's may be idle for weeks, and something between drop its connections without a word:
        # the client notices at the first request, and by default after a minute.
        silence = max(_SOCKET_TIMEOUT, self.delivery_timeout)
        return {"socket.timeout.ms": silence // timedelta(milliseconds=1), **self._publishing_settings()}

    def _publishing_settings(self) -> dict[str, Any]:
        return kafka_settings.build_producer_settings(
            self._merged,
            name=self.name,
            delivery_timeout=self.delivery_timeout,
            max_in_flight_records=self.limits.max_in_flight_records,
        )

    def neli_settings(self, group_id: str) -> dict[str, Any]:
        """Return the librdkafka settings of the election's clients, without `producer_kafka_config`."""
        return {"client.id": self.name, **self.base_kafka_config, "group.id": group_id}

    def leader_names(self, identity: str) -> LeaderNames:
        """Return group and topic of the election, for an outbox of this identity (`<database>.<schema>.<table>`)."""
        group_id = self.leader_group_id or identity
        return LeaderNames(group_id, self.leader_topic or _topic_name(group_id, ".neli"))

    def tracking_names(self, identity: str) -> TrackingNames:
        """Return the names of exactly-once delivery, and a relay's topic, for an outbox of this identity."""
        group_id = self.leader_group_id or identity
        default_id = identity if group_id == identity else f"{identity}:{group_id}"
        return TrackingNames(
            self.transactional_id or f"kafka-outbox:{default_id}",
            self.tracking_topic or _topic_name(default_id.replace(":", "-"), ".manifests"),
            _topic_name(self.tracking_topic or default_id.replace(":", "-"), ".relay-manifests"),
        )

    def dead_letter_name(self, identity: str) -> str:
        """Return the dead-letter topic, for an outbox of this identity."""
        return self.dead_letter_topic or _topic_name(identity, ".dead-letter")

    @property
    def batch_settings(self) -> kafka_settings.BatchSettings:
        """The settings of the producer's batches."""
        return kafka_settings.batch_settings(self._merged)

    def unbatched_producer_settings(self) -> dict[str, Any]:
        """Return the librdkafka settings of the producer whose batches have one record each."""
        aliases = ("linger.ms", "queue.buffering.max.ms", "batch.num.messages")
        kept = {name: value for name, value in self.producer_settings().items() if name not in aliases}
        return {**kept, "linger.ms": 0, "batch.num.messages": 1}

    def lone_producer_settings(self) -> dict[str, Any]:
        """Return `unbatched_producer_settings()`; deprecated."""
        name = "HarvestConfig.unbatched_producer_settings"
        warnings.warn(f"HarvestConfig.lone_producer_settings is now {name}", DeprecationWarning, stacklevel=2)
        return self.unbatched_producer_settings()

    def transactional_settings(self, transactional_id: str) -> dict[str, Any]:
        """Return the librdkafka settings of the transactional producer."""
        timeout = self.limits.transaction_timeout // timedelta(milliseconds=1)
        return {
            # A topic that does not exist holds up its transaction no longer than this.
            "topic.metadata.propagation.max.ms": 5000,
            **self._publishing_settings(),
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout,
            "delivery.timeout.ms": timeout * 2 // 3,
        }

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if isinstance(value, dict):
                yield name, redact_settings(value)
            else:
                yield name, redact(value) if isinstance(value, str) else value


def _topic_name(text: str, suffix: str) -> str:
    """Return the text as a topic name; where it has to change, a digest keeps different texts apart."""
    legal = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    if legal == text and len(text + suffix) <= MAX_TOPIC_LENGTH:
        return text + suffix
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{legal[:200]}-{digest}{suffix}"


def _split_limits(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    without_effect = _WITHOUT_EFFECT.union(map(yaml_name, _WITHOUT_EFFECT))
    dropped = [name for name in values if name in without_effect]
    return {name: value for name, value in values.items() if name not in without_effect}, dropped


def _say_without_effect(names: list[str]) -> None:
    if names:
        _say_once(f"without effect here, see docs/configuration.md: {', '.join(names)}")


@functools.cache
def _say_once(message: str) -> None:
    """Log once per process: settings may be validated by a system check and again by the harvester."""
    _log.warning(message)
