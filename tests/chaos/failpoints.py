"""Failpoints: places at which a harvester process dies or freezes on demand.

A failpoint is written `STEP:COUNT[:ACTION[:DELAY]]`, for example `commit-sent:3` or `after-produce:1:stop`. The
COUNT-th time from then on that the process reaches the step, ACTION happens: `kill` (SIGKILL, the default) or `stop`
(SIGSTOP). With a DELAY, in seconds, it happens that much later, while the process goes on: so it meets a commit that is
under way. `commit-sent` has a small delay by default, as its step comes just before the request is sent.

The environment variable OUTBOX_FAILPOINT arms a process from its start; lines on its stdin arm it later. The product
has no code for this: the steps of exactly-once delivery are reported to `Harvester(reached=...)`, those of
at-least-once delivery are seen from outside by a store and a producer that are wrapped (`tests.chaos.worker`).
"""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from outbox_core.kafka.identity import Failpoint

VARIABLE = "OUTBOX_FAILPOINT"
EXACTLY_ONCE_STEPS = tuple(step.value for step in Failpoint)
AT_LEAST_ONCE_STEPS = ("after-mark", "after-send", "before-purge", "after-purge")
_COMMIT_UNDER_WAY_SECONDS = 0.003
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class ArmedFailpoint:
    """A step of a process, and the action there.

    Attributes:
        step: name of the step.
        count: number of the visit from now on, from 1.
        action: "kill" or "stop".
        delay: seconds after the step was reached.
    """

    step: str
    count: int = 1
    action: str = "kill"
    delay: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        step, *rest = text.strip().split(":")
        if step not in EXACTLY_ONCE_STEPS + AT_LEAST_ONCE_STEPS:
            raise ValueError(f"no such step: {text!r}")
        count, action, delay = (*rest, *("1", "kill", "")[len(rest) :])
        if action not in _SIGNALS:
            raise ValueError(f"no such action: {text!r}")
        default = _COMMIT_UNDER_WAY_SECONDS if step == Failpoint.COMMIT_SENT.value else 0.0
        return cls(step, int(count), action, float(delay) if delay else default)

    def __str__(self) -> str:
        return f"{self.step}:{self.count}:{self.action}:{self.delay:g}"


class Trap:
    """A holder of this process's armed failpoint, which it springs. `reached` may be called from any thread.

    Args:
        note: called with the failpoint just before it springs.
    """

    def __init__(self, note: Callable[[ArmedFailpoint], None]) -> None:
        self._note = note
        self._armed: ArmedFailpoint | None = None
        self._left = 0
        self._lock = threading.Lock()

    def arm(self, failpoint: ArmedFailpoint | None) -> None:
        """Replace the failpoint; None for none."""
        with self._lock:
            self._armed = failpoint
            self._left = failpoint.count if failpoint is not None else 0

    def reached(self, step: str) -> None:
        """Note that the process is at this step; spring the failpoint if it is armed for it."""
        with self._lock:
            failpoint = self._armed
            if failpoint is None or failpoint.step != step:
                return
            self._left -= 1
            if self._left:
                return
            self._armed = None
        if failpoint.delay:
            threading.Timer(failpoint.delay, self._spring, [failpoint]).start()
        else:
            self._spring(failpoint)

    def _spring(self, failpoint: ArmedFailpoint) -> None:
        self._note(failpoint)
        os.kill(os.getpid(), _SIGNALS[failpoint.action])
