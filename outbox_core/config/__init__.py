"""Settings of the harvester: frozen, keyword-only, validated once, with units in their types.

The names are those of goharvest (seed 001): `HarvestConfig(leader_topic=...)` in Python, `leaderTopic:` in YAML,
`OUTBOX_LEADER_TOPIC` in the environment. Needs the extra `[harvester]`.

Secrets (passwords, tokens, private keys) never show in a `repr`, a log line or an error; see `redact`.
"""

from __future__ import annotations

from outbox_core.config.data_source import DEFAULT_DATA_SOURCE, normalise_data_source
from outbox_core.config.durations import format_duration, parse_duration
from outbox_core.config.models import HarvestConfig, LeaderNames, Limits
from outbox_core.config.redaction import redact, redact_settings
from outbox_core.config.sources import load_config, load_file, log_format, log_level, read_document

__all__ = [
    "DEFAULT_DATA_SOURCE",
    "HarvestConfig",
    "LeaderNames",
    "Limits",
    "format_duration",
    "load_config",
    "load_file",
    "log_format",
    "log_level",
    "normalise_data_source",
    "parse_duration",
    "read_document",
    "redact",
    "redact_settings",
]
