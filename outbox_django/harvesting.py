"""The harvester's configuration, from the Django settings. Needs the extra `[harvester]`.

The environment variables of `outbox harvest` are not read: a Django project reads its environment in its settings, and
a data source from elsewhere would point the harvester at another database than the one `stash` writes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from outbox_core.config import HarvestConfig
from outbox_core.config.names import PER_RUN, Path, django_key, option
from outbox_core.config.problems import InvalidSettings
from outbox_core.errors import InvalidConfig
from outbox_django.databases import direct_alias
from outbox_django.settings import OutboxSettings, outbox_settings

__all__ = ["data_source", "harvest_config"]

_KEY_OF_FIELD = {
    field: django_key(field)
    for field in HarvestConfig.names()
    if field not in ("data_source", "outbox_table", *PER_RUN)  # they come from elsewhere
}

_OF_THE_WEB_PROCESS = {"application_name", "client_encoding"}  # libpq settings of Django's own connection


def harvest_config(
    current: OutboxSettings | None = None, alias: str | None = None, overrides: Mapping[str, Any] | None = None
) -> HarvestConfig:
    """Return the configuration of a harvester for an outbox in a database of Django's, which is not opened.

    Args:
        current: the settings; by default those of OUTBOX.
        alias: of the database; by default the one that `stash` writes to.
        overrides: HarvestConfig's fields from the command line, None for those not given.

    Raises:
        InvalidConfig: naming every setting that is wrong.
    """
    current = current or outbox_settings()
    alias = direct_alias(alias)
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
        raise InvalidSettings(error.problems, lambda path: _name_of(path, overrides or {})) from None


def data_source(alias: str) -> str:
    """Return the libpq connection string of a Django database: host or socket folder, credentials, TLS, `service`."""
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


def _name_of(path: Path, overrides: Mapping[str, Any]) -> str:
    """Return the name by which a setting was given: the option, or the key of OUTBOX."""
    given = overrides.get(path[0]) if path else None
    is_option = path[1] in given if isinstance(given, Mapping) and len(path) > 1 else given is not None
    return option(path) if is_option else _setting_of(path)


def _setting_of(path: Path) -> str:
    fields = {yaml: name for name, yaml in HarvestConfig.names().items()}
    field = fields.get(path[0], path[0]) if path else ""
    if field not in _KEY_OF_FIELD:
        return field
    return "".join([f"OUTBOX[{_KEY_OF_FIELD[field]!r}]", *(f"[{part!r}]" for part in path[1:])])
