"""Settings of queues, for producers, consumers and trackers alike.

Durations are `timedelta` or text like `100ms`, `5s`, `1m30s`. `QueueConfig.from_yaml` also reads kafka-mq-go's files
as they are: its names (`redelivery-timeout`), and whole numbers for milliseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasGenerator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from outbox_core.config.durations import format_duration, parse_duration
from outbox_core.config.kafka_settings import EMPTY_SERVERS, is_blank
from outbox_core.config.problems import InvalidSettings, Problem, Settings
from outbox_core.config.redaction import redact, redact_settings
from outbox_core.config.yaml_file import read_yaml
from outbox_core.errors import InvalidConfig
from outbox_core.topic_names import must_be_legal

_log = logging.getLogger(__name__)

_LARGEST_MESSAGE = 1_000_000_000
_MILLISECOND = timedelta(milliseconds=1)
_BROKERS_LOOK_EVERY = timedelta(seconds=10)  # transaction.abort.timed.out.transaction.cleanup.interval.ms
_GO_CONSUMER = "consumer-"  # begins the names of its consumer settings

_OURS = {
    "bootstrap.servers": "bootstrap_servers",
    "metadata.broker.list": "bootstrap_servers",
    "message.max.bytes": "max_message_bytes",
    "transactional.id": "transactional",
    "transaction.timeout.ms": "transaction_timeout",
}
_FIXED = (
    "group.id",
    "group.protocol",
    "group.remote.assignor",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "auto.offset.reset",
    "isolation.level",
    "acks",
    "request.required.acks",
    "enable.idempotence",
    "partition.assignment.strategy",
    "partitioner",
    "delivery.report.only.error",
    "delivery.timeout.ms",
    "message.timeout.ms",
)
_SOCKET_TIMEOUT = "socket.timeout.ms"
_BY_ASSIGNORS = "the group's other members, Go's included, could not share the queue"
_WHY_FIXED = {
    "group.protocol": _BY_ASSIGNORS,
    "group.remote.assignor": _BY_ASSIGNORS,
    "partition.assignment.strategy": _BY_ASSIGNORS,
}


def _between(shortest: str, longest: str) -> Callable[[timedelta], timedelta]:
    def check(value: timedelta) -> timedelta:
        if not parse_duration(shortest) <= value <= parse_duration(longest):
            raise ValueError(f"must be between {shortest} and {longest}")
        return value

    return check


def _must_name_servers(text: str) -> str:
    if is_blank(text):
        raise ValueError(EMPTY_SERVERS)
    return text


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")  # noqa: TRY004  pydantic reports ValueErrors
    return value


_Duration = BeforeValidator(parse_duration)
Span = Annotated[timedelta, _Duration, AfterValidator(_between("100ms", "12h"))]
TransactionSpan = Annotated[timedelta, _Duration, AfterValidator(_between("1s", "15m"))]
Interval = Annotated[timedelta, _Duration, AfterValidator(_between("1ms", "1h"))]
Patience = Annotated[timedelta, _Duration, AfterValidator(_between("0s", "1h"))]
Delay = Annotated[timedelta, _Duration, AfterValidator(_between("0s", "4380h"))]
Lifetime = Annotated[timedelta, _Duration, AfterValidator(_between("1s", "8760h"))]
Count = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=10_000_000)]
Partitions = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=10_000)]
Topic = Annotated[str, AfterValidator(must_be_legal)]


class _QueueSettings(Settings):
    """Settings whose names in YAML are those of kafka-mq-go: words joined by hyphens."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=lambda name: name.replace("_", "-")))

    @classmethod
    def names(cls) -> dict[str, str]:
        return {name: name.replace("_", "-") for name in cls.model_fields}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if isinstance(value, timedelta):
                yield name, format_duration(value)
            elif isinstance(value, dict):
                yield name, redact_settings(value)
            else:
                yield name, redact(value) if isinstance(value, str) else value


class TrackerConfig(_QueueSettings):
    """Settings of the redelivery tracker.

    Attributes:
        use_now_if_no_marker_seen: while messages are in progress, longest time between the tracker's questions for the
            broker's time; it asks at once when a message seems to be expired.
        num_offsets_per_commit: limit of markers read between two commits of the tracker's offsets.
        commit_interval: longest time between two such commits.
    """

    use_now_if_no_marker_seen: Patience = timedelta(seconds=5)
    num_offsets_per_commit: Count = 10_000
    commit_interval: Interval = timedelta(seconds=1)


class QueueConfig(_QueueSettings):
    """Settings that all processes of a pair of topics need, and should share; see `docs/how-to-queues.md`.

    Attributes:
        bootstrap_servers: `host:port`, several separated by commas.
        message_topic: the topic of the messages of all queues.
        marker_topic: the topic of their markers.
        dead_letter_topic: the topic of dead letters; by default the message topic's name and `-dead-letters`.
        message_partitions: of the message topic, 8 for None where it is made; an existing topic must not have fewer.
        marker_partitions: of the marker topic, when it is made; limits the trackers that share the work.
        replication_factor: of the topics, when they are made; -1 for the cluster's own.
        marker_retention: of the marker topic, when it is made. A message is in progress or delayed for half of it at
            most.
        redelivery_timeout: time from a message's last marker to its redelivery. Keep-alives are sent in half that time.
        max_processing_time: time for which a message that was handed out is kept alive, unless it is extended.
        max_delay: the longest delay of a message that is sent or given back.
        max_attempts: times that a message is handed out before it becomes a dead letter; None for no limit.
        max_in_progress: limit of a consumer's messages that are started and not finished.
        receive_buffer_capacity: limit of those that wait to be handed out; a consumer begins with few.
        max_messages_per_commit: limit of messages of other queues that a consumer skips between two commits.
        commit_interval: longest time before a consumer commits the offsets of skipped messages.
        next_message_timeout: longest wait for a message in one call to Kafka; cut to 200 ms, so that closing is prompt.
        max_message_bytes: the largest record that both topics take; a larger message is refused when it is sent.
        marker_key: `message` spreads a queue's markers over all partitions; `queue` keeps them in one, for as long as
            trackers or consumers of kafka-mq-go take part: a Go tracker can end for good over markers elsewhere.
        transactional: write a start marker and commit its message's offset in one transaction. With a tracker of
            kafka-mq-go, `redelivery_timeout` must be more than 2 x (`transaction_timeout` + 10 s).
        transaction_timeout: time after which Kafka aborts the transaction of a consumer or tracker that died.
        delivery_timeout: time after which an undelivered record counts as failed.
        close_timeout: longest time that closing a producer or consumer takes.
        kafka: librdkafka properties of every client, TLS and SASL included.
        redelivery_tracker: settings of trackers.

    Raises:
        InvalidConfig: naming every setting that is wrong.
    """

    bootstrap_servers: Annotated[str, AfterValidator(_must_name_servers)]
    message_topic: Topic = "messages"
    marker_topic: Topic = "markers"
    dead_letter_topic: Topic | None = None
    message_partitions: Partitions | None = None
    marker_partitions: Partitions = 8
    replication_factor: Annotated[int, BeforeValidator(_no_truth_value), Field(ge=-1, le=100)] = -1
    marker_retention: Lifetime = timedelta(days=7)
    redelivery_timeout: Span = timedelta(seconds=60)
    max_processing_time: Lifetime = timedelta(hours=12)
    max_delay: Delay = timedelta(days=1)
    max_attempts: Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=2**31 - 2)] | None = 10
    max_in_progress: Count = 1000
    receive_buffer_capacity: Count = 1000
    max_messages_per_commit: Count = 1000
    commit_interval: Interval = timedelta(seconds=1)
    next_message_timeout: Interval = timedelta(milliseconds=200)
    max_message_bytes: Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1000, le=_LARGEST_MESSAGE)] = 1_000_000
    marker_key: Literal["message", "queue"] = "message"
    transactional: bool = False
    transaction_timeout: TransactionSpan = timedelta(seconds=10)
    delivery_timeout: Span = timedelta(seconds=30)
    close_timeout: Patience = timedelta(seconds=10)
    kafka: dict[str, Any] = Field(default_factory=dict)
    redelivery_tracker: TrackerConfig = Field(default_factory=TrackerConfig)

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> Self:
        """Read a YAML file of ours or of kafka-mq-go; `overrides` win over it.

        Raises:
            InvalidConfig: naming the file and every setting that is wrong.
        """
        content = read_yaml(Path(path))
        if not isinstance(content, Mapping):
            raise InvalidConfig(f"{path}: must be a mapping of settings")
        values = {str(name).removeprefix(_GO_CONSUMER): value for name, value in content.items()}
        tracker = next((name for name in ("redelivery-tracker", "redelivery_tracker") if name in values), None)
        if tracker is not None and isinstance(values[tracker], Mapping):
            values[tracker] = _with_milliseconds({str(k): v for k, v in values[tracker].items()}, TrackerConfig)
        values = {name: value for name, value in values.items() if name.replace("-", "_") not in overrides}
        try:
            return cls(**_with_milliseconds(values, cls), **overrides)
        except InvalidSettings as error:
            names = "; ".join(f"{'.'.join(problem.path)}: {problem.message}" for problem in error.problems)
            raise InvalidConfig(f"{path}: {names}") from None

    def for_queue(self, **changes: Any) -> Self:
        """Return a copy for one queue, checked again (`InvalidConfig`)."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})

    @field_validator("kafka")
    @classmethod
    def _check_properties(cls, settings: dict[str, Any]) -> dict[str, Any]:
        problems = []
        for name, value in settings.items():
            if name in _OURS:
                problems.append(Problem((name,), f"is the setting `{_OURS[name]}`"))
            elif name in _FIXED:
                problems.append(
                    Problem((name,), f"cannot be set: {_WHY_FIXED.get(name, 'the protocol needs its own')}")
                )
            elif value is None or isinstance(value, Mapping | list | tuple | set):
                problems.append(Problem((name,), "must be a single value"))
        if problems:
            raise InvalidSettings(problems)
        return settings

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        problems = []
        topics = {self.message_topic, self.marker_topic, self.dead_letters}
        if len(topics) < 3:
            problems.append(Problem(("message_topic",), "message, marker and dead letter topic must be different ones"))
        for name in ("max_processing_time", "max_delay"):
            if getattr(self, name) > self.marker_retention / 2:
                why = f"must not be more than half of marker_retention ({format_duration(self.marker_retention)})"
                problems.append(Problem((name,), why))
        if self.max_processing_time < self.redelivery_timeout:
            problems.append(Problem(("max_processing_time",), "must not be less than redelivery_timeout"))
        socket_timeout = self.kafka.get(_SOCKET_TIMEOUT)
        most = milliseconds(self.transaction_timeout)
        if socket_timeout is not None and not _is_number_up_to(socket_timeout, most):
            why = f"must be a number of milliseconds, and no more than transaction_timeout ({most})"
            problems.append(Problem(("kafka", _SOCKET_TIMEOUT), why))
        if problems:
            raise InvalidSettings(problems)
        hidden = 2 * (self.transaction_timeout + _BROKERS_LOOK_EVERY)
        if self.transactional and self.marker_key == "queue" and self.redelivery_timeout <= hidden:
            _log.warning(
                "redelivery_timeout (%s) should be more than %s: with transactional: true and a tracker of kafka-mq-go "
                "(marker_key: queue), a consumer that dies hides the end markers of others for so long, and that "
                "tracker sends finished messages again",
                format_duration(self.redelivery_timeout),
                format_duration(hidden),
            )
        return self

    @property
    def dead_letters(self) -> str:
        """The dead letter topic."""
        return self.dead_letter_topic or f"{self.message_topic}-dead-letters"


def milliseconds(duration: timedelta) -> int:
    """Convert to whole milliseconds, rounded up, so that a short time does not become none."""
    return -(-duration // _MILLISECOND)


def _is_number_up_to(value: object, most: int) -> bool:
    try:
        return int(str(value)) <= most
    except ValueError:
        return False


def _with_milliseconds(values: dict[str, Any], model: type[_QueueSettings]) -> dict[str, Any]:
    python_names = {yaml: name for name, yaml in model.names().items()}
    fields = model.model_fields
    return {
        name: f"{value}ms"
        if isinstance(value, int)
        and not isinstance(value, bool)
        and (field := fields.get(python_names.get(name, name))) is not None
        and field.annotation is timedelta
        else value
        for name, value in values.items()
    }
