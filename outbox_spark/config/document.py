"""A pipeline's YAML file.

    kafka:                    # librdkafka's properties, for every client
      bootstrap.servers: localhost:9092
    spark:                    # optional
      master: local[2]
      settings: {spark.driver.memory: 2g}
    logging: {level: info}    # optional
    project: ...              # a section for each pipeline; a file may have several
    harvest: ...              # with `relay:`, the section of `outbox harvest`

`${NAME}` in a value is the environment variable NAME, `$${` stands for `${`. In the settings of clients `${env:NAME}`
and `${file:PATH}` stand for secrets that each machine looks up itself (`outbox_spark.runtime.secrets`). Errors name
settings as the file does, and never show values, which may be passwords.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox_core.config import HarvestConfig, load_config, log_level
from outbox_core.config.problems import InvalidSettings, Problem, Settings, unknown_field
from outbox_core.config.yaml_file import read_yaml
from outbox_core.errors import InvalidConfig
from outbox_spark.config.models import (
    ArchiveSettings,
    AuditSettings,
    KafkaSettings,
    ProjectSettings,
    RelaySettings,
    ReplaySettings,
    SparkSettings,
)
from outbox_spark.runtime.secrets import REFERENCE

PIPELINES: dict[str, type[Settings]] = {
    "project": ProjectSettings,
    "archive": ArchiveSettings,
    "replay": ReplaySettings,
    "audit": AuditSettings,
    "relay": RelaySettings,
}

_SHARED = ("kafka", "spark", "logging", "harvest")
_SERVERS = "bootstrap.servers"
_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_OF_CLIENTS = ("kafka", "dsn", "registry", "dataSource", "baseKafkaConfig", "producerKafkaConfig")


@dataclass(frozen=True, kw_only=True)
class PipelineFile:
    """The settings of one pipeline in a file; `level` is for `logging`, `harvest` is the relay's outbox, else None."""

    pipeline: str
    settings: Any
    kafka: dict[str, str] = field(repr=False)
    spark: SparkSettings
    level: int
    harvest: HarvestConfig | None = None

    def require_kafka(self) -> None:
        """Check that the file names Kafka's servers. Raises InvalidConfig."""
        if _SERVERS not in self.kafka:
            raise InvalidSettings([Problem(("kafka", _SERVERS), f"is missing: `{self.pipeline}` needs it")])


def load_pipeline(path: str | Path, pipeline: str, environ: Mapping[str, str]) -> PipelineFile:
    """Read a file and validate one pipeline's sections. Raises InvalidConfig with every wrong setting."""
    return validate(read_document(path, environ), pipeline, where=str(path))


def read_document(path: str | Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read a file and fill in environment variables; validate only its sections' names. Raises InvalidConfig."""
    document = read_yaml(Path(path))
    if not isinstance(document, dict):
        raise InvalidConfig(f"{path}: must be a mapping with `kafka:` and a section for each pipeline")
    known = {name: name for name in (*_SHARED, *PIPELINES)}
    problems = [Problem((str(name),), unknown_field(str(name), known)) for name in document if name not in known]
    filled = {name: _fill(content, (str(name),), environ, problems) for name, content in document.items()}
    if problems:
        raise InvalidSettings(problems)
    return filled


def validate(document: Mapping[str, Any], pipeline: str, *, where: str = "the file") -> PipelineFile:
    """Validate the sections of one pipeline. Raises InvalidConfig."""
    problems: list[Problem] = []
    section = document.get(pipeline)
    if not isinstance(section, Mapping):
        what = "is missing" if section is None else "must be a mapping"
        problems.append(Problem((pipeline,), f"{what}: {where} needs a section of this name"))
    settings = _section(PIPELINES[pipeline], section, (pipeline,), problems) if isinstance(section, Mapping) else None
    spark = _section(SparkSettings, document.get("spark") or {}, ("spark",), problems)
    kafka = _section(KafkaSettings, {"properties": document.get("kafka") or {}}, ("kafka",), problems)
    if kafka is not None and _SERVERS not in kafka.properties and _reads_kafka(pipeline, settings):
        problems.append(Problem(("kafka", _SERVERS), f"is missing: `{pipeline}` needs it"))
    if problems:
        raise InvalidSettings(problems)
    harvest = load_config({"harvest": document.get("harvest") or {}}) if pipeline == "relay" else None
    level = log_level(document)
    return PipelineFile(
        pipeline=pipeline, settings=settings, kafka=kafka.properties, spark=spark, level=level, harvest=harvest
    )


def _reads_kafka(pipeline: str, settings: Any) -> bool:
    """Tell whether the pipeline needs the section `kafka`; a replay needs it only to publish."""
    if pipeline == "audit" and settings is not None:
        return any(side.topics is not None for side in (settings.expected, settings.found))
    return pipeline in ("project", "archive")


def _section(model: type[Settings], values: Any, path: tuple[str, ...], problems: list[Problem]) -> Any:
    if not isinstance(values, Mapping):
        problems.append(Problem(path, "must be a mapping"))
        return None
    try:
        return model(**{str(name): value for name, value in values.items()})
    except InvalidSettings as error:
        yaml_names = model.names()
        for problem in error.problems:
            first = tuple(yaml_names.get(part, part) for part in problem.path[:1] if part != "properties")
            problems.append(Problem(path + first + problem.path[1:], problem.message))
        return None


def _fill(value: Any, path: tuple[str, ...], environ: Mapping[str, str], problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        return {name: _fill(item, (*path, str(name)), environ, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, (*path, str(number)), environ, problems) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def variable(found: re.Match[str]) -> str:
        if found[1] is None:
            return "${"
        if REFERENCE.fullmatch(found[0]):
            if not set(_OF_CLIENTS).intersection(path):
                problems.append(
                    Problem(path, f"{found[0]}: only `kafka`, `dsn` and `registry` take secrets that workers look up")
                )
            return found[0]
        if found[1] not in environ:
            problems.append(Problem(path, f"the environment variable {found[1]!r} is not set"))
        return environ.get(found[1], "")

    return _VARIABLE.sub(variable, value)
