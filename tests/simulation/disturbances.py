"""When processes, their connections and the brokers were disturbed: some promises hold for what was not held up."""

from __future__ import annotations

from typing import NamedTuple

_RECOVERY_SECONDS = 0.3  # until a client has found out, and has sent again
_EVERYBODY = ""


class _Disturbance(NamedTuple):
    begin: float
    end: float  # at the latest
    process: str


class Disturbances:
    """All disturbances of a run, with the processes that they concern."""

    def __init__(self) -> None:
        self._all: list[_Disturbance] = []

    def add(self, now: float, seconds: float = 0.0, process: str = _EVERYBODY) -> None:
        """Note one that begins now and lasts for so long at most."""
        self._all.append(_Disturbance(now, now + seconds + _RECOVERY_SECONDS, process))

    def seconds(self, process: str, since: float, until: float) -> float:
        """Return for how long, at most, they have held up a process between two moments."""
        return sum(
            max(0.0, min(each.end, until) - max(each.begin, since))
            for each in self._all
            if each.process in (_EVERYBODY, process)
        )
