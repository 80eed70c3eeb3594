"""The errors of the development stack, in one root class."""

from pathlib import Path


class DevstackError(Exception):
    """A service of the development stack that could not be had, started or reached."""


class BrokerUnavailableError(DevstackError):
    """A real Kafka broker that cannot be started on this machine; the message names the missing part."""


def log_tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a service's log, indented for an error message; empty if there is no log."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    tail = text.splitlines()[-lines:]
    return "".join(f"\n  | {line}" for line in tail)
