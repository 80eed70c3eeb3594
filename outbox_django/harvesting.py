"""The harvester's configuration, from the Django settings. Needs the extra `[harvester]`.

The Django settings are the only source: the environment variables of `outbox harvest` are not read, because a Django
project reads its environment in its settings, and because a data source from elsewhere would have the harvester look at
another database than the one `stash` writes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from outbox_core.config import HarvestConfig
from outbox_core.config.problems import InvalidSettings, Path
from outbox_core.errors import InvalidConfig
from outbox_django.settings import OutboxSettings

_KEY_OF_FIELD = {
    "base_kafka_config": "KAFKA",
    "producer_kafka_config": "PRODUCER_KAFKA",
    "leader_topic": "LEADER_TOPIC",
    "leader_group_id": "LEADER_GROUP_ID",
    "delivery": "DELIVERY",
    "transactional_id": "TRANSACTIONAL_ID",
    "tracking_topic": "TRACKING_TOPIC",
    "on_poison": "ON_POISON",
    "dead_letter_topic": "DEAD_LETTER_TOPIC",
    "notify": "NOTIFY",
    "name": "NAME",
    "outbox_name": "OUTBOX_NAME",
    "id_header": "ID_HEADER",
    "metrics_host": "METRICS_HOST",
    "metrics_port": "METRICS_PORT",
    "limits": "LIMITS",
}
"""HarvestConfig's fields, by our keys; data_source and outbox_table come from elsewhere."""

_OF_THE_WEB_PROCESS = {"application_name", "client_encoding"}
"""libpq settings that describe Django's own connection."""


def harvest_config(current: OutboxSettings, alias: str, overrides: Mapping[str, Any] | None = None) -> HarvestConfig:
    """The configuration of a harvester for the outbox in the database of this alias.

    Args:
        current: the OUTBOX setting.
        alias: alias in DATABASES; its connection is not opened.
        overrides: HarvestConfig's fields from the command line; they win, and None means not given.

    Raises:
        InvalidConfig: naming every setting that is wrong, by the key it has in OUTBOX.
    """
    values: dict[str, Any] = {"data_source": data_source(alias), "outbox_table": current.table.quoted}
    for name, key in _KEY_OF_FIELD.items():
        value = getattr(current, key.lower())
        if isinstance(value, Mapping):
            values[name] = dict(value)
        elif value is not None:
            values[name] = value
    for name, value in (overrides or {}).items():
        if isinstance(value, Mapping):
            values[name] = {**values.get(name, {}), **value}
        elif value is not None:
            values[name] = value
    try:
        return HarvestConfig(**values)
    except InvalidSettings as error:
        raise InvalidSettings(error.problems, _setting_of) from None


def data_source(alias: str) -> str:
    """The libpq connection string of a Django database: host or socket folder, credentials, TLS, `service` and so on.

    Raises:
        InvalidConfig: if there is no such alias, it is no PostgreSQL database, or its settings are incomplete.
    """
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        raise InvalidConfig(f"database alias {alias!r} is not in DATABASES") from None
    if connection.vendor != "postgresql":
        raise InvalidConfig(f"database {alias!r} is {connection.vendor}; the outbox needs PostgreSQL")
    try:
        django_parameters: dict[str, Any] = connection.get_connection_params()
    except ImproperlyConfigured as error:
        raise InvalidConfig(f"DATABASES[{alias!r}]: {error}") from None
    keywords = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()} - _OF_THE_WEB_PROCESS
    parameters = {name: value for name, value in django_parameters.items() if name in keywords and value is not None}
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if role:
        escaped_role = str(role).replace("\\", "\\\\").replace(" ", "\\ ")
        parameters["options"] = f"{parameters.get('options', '')} -c role={escaped_role}".strip()
    return psycopg.conninfo.make_conninfo("", **parameters)


def _setting_of(path: Path) -> str:
    """A field of HarvestConfig as it is written in Django's settings."""
    fields = {yaml: name for name, yaml in HarvestConfig.names().items()}
    field = fields.get(path[0], path[0]) if path else ""
    if field not in _KEY_OF_FIELD:
        return field
    return "".join([f"OUTBOX[{_KEY_OF_FIELD[field]!r}]", *(f"[{part!r}]" for part in path[1:])])
