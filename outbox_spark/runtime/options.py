"""Options of the data sources, read by name: Spark's are in lower case, librdkafka's begin with `kafka.`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from outbox_core.errors import InvalidConfig

_KAFKA = "kafka."
_SERVERS = "bootstrap.servers"
_TRUE, _FALSE = {"true", "1", "yes"}, {"false", "0", "no"}
# Spark adds these to the options of a sink or a source.
_OF_SPARK = {"checkpointlocation", "queryname", "path", "paths"}


class Options:
    """The options of one format, of which `known` has all names. Raises InvalidConfig for others."""

    def __init__(
        self, source: str, given: Mapping[str, str], known: Collection[str], *, takes_kafka: bool = True
    ) -> None:
        self._source = source
        self._given = {name.lower(): value for name, value in given.items()}
        names = {name.lower() for name in known}
        unknown = [
            name
            for name in self._given
            if name not in names | _OF_SPARK and not (takes_kafka and (name.startswith(_KAFKA) or name == _SERVERS))
        ]
        if unknown:
            also = ", and kafka.* for librdkafka's settings" if takes_kafka else ""
            raise InvalidConfig(
                f"{source}: unknown option(s) {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}{also}"
            )
        if self._given.get("path"):
            raise InvalidConfig(f"{source}: takes no path; see its options")

    def text(self, name: str, default: str | None = None) -> str:
        """Return an option's text. Raises InvalidConfig if it is missing or empty and there is no default."""
        value = self._given.get(name.lower(), "").strip()
        if value:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default

    def optional(self, name: str) -> str | None:
        """Return an option's text, or None if it is missing or empty."""
        return self._given.get(name.lower(), "").strip() or None

    def names(self, name: str, default: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return a list separated by commas. Raises InvalidConfig if it is missing and there is no default."""
        if default is not None and self.optional(name) is None:
            return tuple(default)
        found = tuple(part.strip() for part in self.text(name).split(",") if part.strip())
        if not found:
            raise self.error(name, "names nothing")
        return found

    def number(self, name: str, default: int | None, *, at_least: int = 1, at_most: int = 2**31 - 1) -> int | None:
        """Return a whole number. Raises InvalidConfig if it is none, or out of range."""
        value = self.optional(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            raise self.error(name, f"must be a whole number, is {value!r}") from None
        if not at_least <= number <= at_most:
            raise self.error(name, f"must be from {at_least} to {at_most}, is {number}")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false. Raises InvalidConfig for anything else."""
        value = (self.optional(name) or str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise self.error(name, f"must be true or false, is {value!r}")
        return value in _TRUE

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """Return one of several words. Raises InvalidConfig for any other."""
        value = (self.optional(name) or default).lower()
        if value not in choices:
            raise self.error(name, f"must be one of {', '.join(sorted(choices))}, is {value!r}")
        return value

    def kafka(self) -> dict[str, Any]:
        """Return librdkafka's settings. Raises InvalidConfig if `bootstrap.servers` is missing."""
        settings: dict[str, Any] = {
            name.removeprefix(_KAFKA): value for name, value in self._given.items() if name.startswith(_KAFKA)
        }
        if self.optional(_SERVERS):
            settings[_SERVERS] = self.text(_SERVERS)
        if not settings.get(_SERVERS):
            raise self.error("kafka.bootstrap.servers", "is missing")
        return settings

    def error(self, name: str, problem: str) -> InvalidConfig:
        """Return an error about an option; the problem must not show a secret."""
        return InvalidConfig(f"{self._source}: option {name} {problem}")
