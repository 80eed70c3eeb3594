"""Options of the data sources, as settings: their names ignore case, those of librdkafka begin with `kafka.`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from outbox_core.config.problems import InvalidSettings, Settings
from outbox_core.errors import InvalidConfig

_KAFKA = "kafka."
_SERVERS = "bootstrap.servers"
# Spark adds these to the options of a source.
_OF_SPARK = {"checkpointlocation", "queryname", "path", "paths"}


class SourceOptions(Settings):
    """The options of one format, by their names in camel case; a field `kafka` has librdkafka's settings."""

    @classmethod
    def read(cls, source: str, given: Mapping[str, str]) -> Self:
        """Read the options of a format; empty ones count as not given. Raises InvalidConfig with all problems."""
        names = {name.lower(): name for name in cls.names().values()}
        kafka: dict[str, str] = {}
        values: dict[str, Any] = {"kafka": kafka} if "kafka" in cls.model_fields else {}
        for name, text in given.items():
            short, value = name.lower(), text.strip()
            if values.get("kafka") is kafka and (short.startswith(_KAFKA) or short == _SERVERS):
                kafka[short.removeprefix(_KAFKA)] = text
            elif short == "path" and value:
                raise InvalidConfig(f"{source}: takes no path; see its options")
            elif short not in names.keys() | _OF_SPARK or (value and short in names):
                values[names.get(short, short)] = value
        problems = [] if "kafka" not in values or kafka.get(_SERVERS) else ["kafka.bootstrap.servers is missing"]
        try:
            found = cls(**values)
        except InvalidSettings as error:
            problems += [f"{cls.names().get(part.path[0], part.path[0])} {part.message}" for part in error.problems]
        if problems:
            raise InvalidConfig(*(f"{source}: option {problem}" for problem in problems))
        return found
