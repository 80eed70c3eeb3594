"""The names of a setting: one rule for each way of writing it, and its exceptions.

| field          | YAML         | environment           | command line     | Django           |
|----------------|--------------|-----------------------|------------------|------------------|
| `leader_topic` | `leaderTopic`| `OUTBOX_LEADER_TOPIC` | `--leader-topic` | `LEADER_TOPIC`   |
"""

from __future__ import annotations

Path = tuple[str, ...]
"""A field of `HarvestConfig`, and the name within it if it is a mapping."""

BOOTSTRAP_SERVERS: Path = ("base_kafka_config", "bootstrap.servers")

_YAML = {"leader_group_id": "leaderGroupID", "transactional_id": "transactionalID"}
_VARIABLES: dict[Path, str] = {
    ("data_source",): "OUTBOX_POSTGRES_DSN",
    ("outbox_table",): "OUTBOX_TABLE",
    BOOTSTRAP_SERVERS: "OUTBOX_KAFKA_BOOTSTRAP",
}
_OPTIONS: dict[Path, str] = {
    ("data_source",): "--dsn",
    ("outbox_table",): "--table",
    BOOTSTRAP_SERVERS: "--bootstrap-servers",
}
_DJANGO = {"base_kafka_config": "KAFKA", "producer_kafka_config": "PRODUCER_KAFKA"}

MAPPINGS = ("base_kafka_config", "producer_kafka_config", "limits")
"""Fields that hold settings by name; the first two hold librdkafka's."""

PER_RUN = ("accept_marked", "accept_moved")
"""Fields for one run: the environment and Django's settings do not have them."""

ON_COMMAND_LINE = (
    "data_source",
    "outbox_table",
    "leader_topic",
    "leader_group_id",
    "delivery",
    "accept_marked",
    "accept_moved",
    "on_poison",
    "dead_letter_topic",
    "retention",
    "notify",
    "name",
    "metrics_port",
    "metrics_host",
)
"""Fields with an option of their own; `-X` sets any of librdkafka's."""


def yaml_name(field: str) -> str:
    """Return goharvest's name of a field, or of a limit."""
    first, *others = field.split("_")
    return _YAML.get(field) or first + "".join(map(str.capitalize, others))


def variable(path: Path) -> str:
    """Return the environment variable of a field, or of a limit."""
    return _VARIABLES.get(path) or "_".join(("OUTBOX", *path)).upper()


def option(path: Path) -> str:
    """Return the command line's option."""
    if path in _OPTIONS:
        return _OPTIONS[path]
    return f"-X {path[-1]}" if len(path) > 1 else "--" + path[0].replace("_", "-")


def option_name(path: Path) -> str:
    """Return the name of a parsed option."""
    return option(path).removeprefix("--").replace("-", "_")


def django_key(field: str) -> str:
    """Return the key in Django's setting `OUTBOX`."""
    return _DJANGO.get(field) or field.upper()
