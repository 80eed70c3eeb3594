"""Gathering settings: command line over environment over file over defaults.

The file is the YAML of goharvest's `reaper`: `harvest:` holds the settings, `logging:` a level. Environment variables
are named by `names.py`, and `OUTBOX_LIMITS_<LIMIT>`, `OUTBOX_KAFKA_<PROPERTY>` and `OUTBOX_PRODUCER_KAFKA_<PROPERTY>`
with `_` for `.`: `OUTBOX_KAFKA_SECURITY_PROTOCOL` is `security.protocol`.

An empty variable counts as not set, except `OUTBOX_ID_HEADER`, where it turns the header off.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from outbox_core.config.models import HarvestConfig, Limits
from outbox_core.config.names import BOOTSTRAP_SERVERS, MAPPINGS, PER_RUN, Path, option, variable, yaml_name
from outbox_core.config.problems import InvalidSettings, Problem, unknown_field
from outbox_core.config.redaction import is_secret
from outbox_core.config.yaml_file import read_yaml
from outbox_core.errors import InvalidConfig

_log = logging.getLogger("outbox_core.config")

Document = Mapping[str, Any]

_SECTIONS: dict[str, dict[str, str]] = {
    **{field: {} for field in MAPPINGS},
    "limits": {yaml_name(name): name for name in Limits.names()},
}
"""The fields that are mappings, with the YAML names of what is in them (none: any name goes)."""

_FIELDS = {yaml: name for name, yaml in HarvestConfig.names().items()}
_DOCUMENT = {"harvest": "harvest", "logging": "logging"}
_LOGGING = {"level": "level", "format": "format"}
_PATHS: list[Path] = [
    *((field,) for field in HarvestConfig.names() if field not in MAPPINGS + PER_RUN),
    *(("limits", name) for name in Limits.names()),
    BOOTSTRAP_SERVERS,
]
_VARIABLES = {variable(path): path for path in _PATHS}
_PROPERTY_PREFIXES = {"OUTBOX_PRODUCER_KAFKA_": "producer_kafka_config", "OUTBOX_KAFKA_": "base_kafka_config"}
_LOG_LEVEL = "OUTBOX_LOG_LEVEL"
_LOG_FORMAT = "OUTBOX_LOG_FORMAT"
_LOG_FORMATS = ("text", "json")
_OF_OTHERS = ("OUTBOX_CONSOLE_TOKEN", "OUTBOX_DEVSTACK_", "OUTBOX_TEST_", "OUTBOX_DEMO_", "OUTBOX_BENCH_")

_LEVELS = {
    "all": logging.DEBUG,
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "panic": logging.CRITICAL,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 10,
}


def load_file(
    path: str | FilePath, *, environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> HarvestConfig:
    """Load settings as `load_config` does, from a YAML file."""
    return load_config(read_document(path), environ=environ, overrides=overrides)


def read_document(path: str | FilePath) -> Document:
    """Read a YAML file without checking its content; an empty file is an empty document."""
    document = read_yaml(FilePath(path))
    if not isinstance(document, dict):
        raise InvalidConfig(f"{path}: must be a mapping with `harvest:` and `logging:`")
    return document


def load_config(
    document: Document | None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> HarvestConfig:
    """Gather settings and validate them.

    Args:
        document: the content of the YAML file, `{"harvest": {...}, "logging": {...}}`, with names of goharvest or ours.
        environ: environment variables, for example `os.environ`; None for none.
        overrides: settings that win over both, by our names; sections are merged, None means not given.

    Raises:
        InvalidConfig: naming everything that is wrong by the name it was set with.
    """
    gathered = _Gathered()
    gathered.take_document(document or {})
    gathered.take_environment(environ or {})
    gathered.take_overrides(overrides or {})
    try:
        config = HarvestConfig(**gathered.values)
    except InvalidSettings as error:
        raise InvalidSettings([*gathered.problems, *error.problems], gathered.name_of) from None
    if gathered.problems:
        raise InvalidSettings(gathered.problems, gathered.name_of)
    return config


def log_level(
    document: Document | None, *, environ: Mapping[str, str] | None = None, override: str | None = None
) -> int:
    """Return the level for `logging`, from logrus' names or Python's, INFO unless set.

    Raises:
        InvalidConfig: if there is no such level.
    """
    section = (document or {}).get("logging")
    in_file = section.get("level") if isinstance(section, Mapping) else None
    sources = ((override, "--log-level"), ((environ or {}).get(_LOG_LEVEL), _LOG_LEVEL), (in_file, "logging.level"))
    for text, where in sources:
        if text not in (None, ""):
            # YAML reads a bare `off` as false.
            level = _LEVELS.get("off" if text is False else str(text).lower())
            if level is None:
                raise InvalidConfig(f"{where}: is not a level; write one of {', '.join(_LEVELS)}")
            return level
    return logging.INFO


def log_format(
    document: Document | None, *, environ: Mapping[str, str] | None = None, override: str | None = None
) -> str:
    """Return the format of the log, `text` unless set.

    Raises:
        InvalidConfig: if there is no such format.
    """
    section = (document or {}).get("logging")
    in_file = section.get("format") if isinstance(section, Mapping) else None
    sources = ((override, "--log-format"), ((environ or {}).get(_LOG_FORMAT), _LOG_FORMAT), (in_file, "logging.format"))
    for text, where in sources:
        if text not in (None, ""):
            if text not in _LOG_FORMATS:
                raise InvalidConfig(f"{where}: is not a format; write one of {', '.join(_LOG_FORMATS)}")
            return str(text)
    return _LOG_FORMATS[0]


class _Gathered:
    """Settings by our names, with the name under which each was last set, and the problems."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._names: dict[Path, str] = {}

    def name_of(self, path: Path) -> str:
        """Return the name by which the user wrote this setting."""
        return self._names.get(path) or self._names.get(path[:1]) or ".".join(path)

    def take_document(self, document: Document) -> None:
        for name, section in _by_text(document).items():
            if name in _FIELDS or name in _FIELDS.values():
                self._complain((name,), name, "belongs under `harvest:`")
            elif name not in _DOCUMENT:
                self._complain((name,), name, unknown_field(name, _DOCUMENT))
            elif section is not None and not isinstance(section, Mapping):
                self._complain((name,), name, "must be a mapping")
        logging_section = document.get("logging")
        for name in _by_text(logging_section) if isinstance(logging_section, Mapping) else ():
            if name not in _LOGGING:
                self._complain(("logging", name), f"logging.{name}", unknown_field(name, _LOGGING))
        harvest = document.get("harvest")
        for name, value in harvest.items() if isinstance(harvest, Mapping) else ():
            self._take_field(str(name), value)

    def _take_field(self, name: str, value: Any) -> None:
        field, shown = _FIELDS.get(name, name), f"harvest.{name}"
        self._names.setdefault((field,), shown)
        if field in self.values:
            self._complain((field,), shown, "is given twice")
        elif value is None and field not in _SECTIONS:
            return  # `name:` with nothing behind it
        elif field in _SECTIONS and isinstance(value, Mapping):
            for key, entry in value.items():
                self._take_entry(field, str(key), entry, f"{shown}.{key}")
        elif field not in _SECTIONS or value is not None:
            self.values[field] = value

    def _take_entry(self, section: str, key: str, value: Any, shown: str) -> None:
        name = _SECTIONS[section].get(key, key)
        if is_secret(key) and isinstance(value, int | float):
            self._complain((section, name), shown, "put it in quotes: YAML reads it as a number")
            return
        self._set((section, name), value, shown)

    def take_environment(self, environ: Mapping[str, str]) -> None:
        for name, text in environ.items():
            if not name.startswith("OUTBOX_") or name.startswith(_OF_OTHERS) or name in (_LOG_LEVEL, _LOG_FORMAT):
                continue
            path = _VARIABLES.get(name) or _property_path(name)
            if path is None:
                _log.warning("%s: %s; it is ignored", name, _unknown_variable(name))
            elif text or path == ("id_header",):
                self._set(path, text, name)

    def take_overrides(self, overrides: Mapping[str, Any]) -> None:
        for field, value in overrides.items():
            if field in _SECTIONS and isinstance(value, Mapping):
                for key, entry in value.items():
                    self._set((field, key), entry, option((field, key)))
                    of_producer = self.values.get("producer_kafka_config")
                    if field == "base_kafka_config" and isinstance(of_producer, dict):
                        of_producer.pop(key, None)  # the command line wins over the file
            elif value is not None:
                self._set((field,), value, option((field,)))

    def _set(self, path: Path, value: Any, shown: str) -> None:
        self._names[path] = shown
        target = self.values
        for section in path[:-1]:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                return  # refused elsewhere: not a mapping
        target[path[-1]] = value

    def _complain(self, path: Path, shown: str, message: str) -> None:
        self._names[path] = shown
        self.problems.append(Problem(path, message))


def _by_text(section: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping with its names as text: YAML reads `on:` as true, and `1:` as a number."""
    return {str(name): value for name, value in section.items()}


def _property_path(variable: str) -> Path | None:
    for prefix, section in _PROPERTY_PREFIXES.items():
        if variable.startswith(prefix) and variable != prefix:
            return section, variable.removeprefix(prefix).lower().replace("_", ".")
    return None


_MEANT = {
    "OUTBOX_DSN": "OUTBOX_POSTGRES_DSN",
    "OUTBOX_DATA_SOURCE": "OUTBOX_POSTGRES_DSN",
    "OUTBOX_DATABASE_URL": "OUTBOX_POSTGRES_DSN",
    "OUTBOX_POSTGRES_URL": "OUTBOX_POSTGRES_DSN",
    "OUTBOX_BOOTSTRAP_SERVERS": "OUTBOX_KAFKA_BOOTSTRAP",
    "OUTBOX_KAFKA": "OUTBOX_KAFKA_BOOTSTRAP",
}
"""Variables that are not alike in their letters, and are taken for ours all the same."""


def _unknown_variable(variable: str) -> str:
    if variable in _MEANT:
        return f"unknown variable; did you mean {_MEANT[variable]}?"
    return unknown_field(variable, {name: name for name in (*_VARIABLES, _LOG_LEVEL, _LOG_FORMAT)}).replace(
        "field", "variable"
    )
