"""References in place of secrets: `${file:/run/secrets/kafka}` and `${env:KAFKA_PASSWORD}`.

They are looked up where a client is made: on the driver, and in each task on its own machine. So neither a plan nor a
pickled task nor a log has the secret, whatever Spark's user interface shows of them.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from outbox_core.config import HarvestConfig
from outbox_core.errors import InvalidConfig

REFERENCE = re.compile(r"\$\{(env|file):([^}]+)\}")


def filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with secrets in place of references. Raises InvalidConfig for one that is not on this machine."""
    return {
        name: REFERENCE.sub(partial(_look_up, name), value) if isinstance(value, str) else value
        for name, value in settings.items()
    }


def filled_harvest(config: HarvestConfig) -> HarvestConfig:
    """Return the settings of an outbox with secrets in place of references. Raises InvalidConfig."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    found: dict[str, Any] = {
        "base_kafka_config": filled(config.base_kafka_config),
        "producer_kafka_config": filled(config.producer_kafka_config),
    }
    if REFERENCE.search(config.data_source):
        found["data_source"] = make_conninfo(**filled(conninfo_to_dict(config.data_source)))
    return config.model_copy(update=found)


def _look_up(name: str, found: re.Match[str]) -> str:
    kind, place = found.groups()
    try:
        return os.environ[place] if kind == "env" else Path(place).read_text().rstrip("\r\n")
    except (KeyError, OSError, UnicodeDecodeError) as error:
        reason = "is not set" if kind == "env" else f"cannot be read ({getattr(error, 'strerror', 'it is no text')})"
        raise InvalidConfig(f"{name}: {found[0]} {reason} on {socket.gethostname()}") from None
