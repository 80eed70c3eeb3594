"""The harvesters of one outbox: the current leader, and the time without one.

Each serves `/healthz`, as it would for an orchestrator; the answer says whether it leads.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from urllib.error import URLError

from devstack.ports import LOCALHOST, free_ports
from example_project.demo.applications import Application
from example_project.demo.children import Child, Children

_HARVESTERS = 2
_PROBE_SECONDS = 2

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know our ports


class Harvesters:
    """Two harvesters of one outbox, started at once.

    Attributes:
        leader: the one that led at the last probe, or None.
        killed: the one that was killed, or None.
        took_over_after: seconds from that to its successor's leadership, or None while there is none.
    """

    def __init__(self, application: Application, children: Children) -> None:
        self._port_of = {
            children.start(
                f"{application.name}-{number}",
                [*application.harvest, f"--name={application.name}-{number}", f"--metrics-port={port}"],
            ): port
            for number, port in enumerate(free_ports(_HARVESTERS), start=1)
        }
        self.leader: Child | None = None
        self.killed: Child | None = None
        self.took_over_after: float | None = None
        self._seconds_without = 0.0
        self._leaderless_since: float | None = None

    @property
    def are_ready(self) -> bool:
        """Tell whether one leads and the others stand by."""
        return self.leader is not None and all(self._leads(child) is not None for child in self._alive())

    @property
    def seconds_without_leader(self) -> float:
        """Return the seconds without a leader, counted from the first leadership."""
        since = self._leaderless_since
        return self._seconds_without + (time.monotonic() - since if since is not None else 0.0)

    def look(self) -> None:
        """Probe all harvesters, and note the leader.

        Raises:
            DemoError: a harvester ended by itself.
        """
        for child in self._alive():
            child.check()
        before, self.leader = self.leader, next((child for child in self._alive() if self._leads(child)), None)
        if self.leader is None and before is not None:
            self._leaderless_since = time.monotonic()
        elif self.leader is not None and self._leaderless_since is not None:
            self._seconds_without += time.monotonic() - self._leaderless_since
            self._leaderless_since = None
            if self.killed is not None and self.took_over_after is None:
                self.took_over_after = self._seconds_without

    def kill_leader(self) -> Child:
        """End the leader as a crash would."""
        victim = self.leader
        if victim is None:
            raise ValueError("nobody leads")
        victim.signal(signal.SIGKILL)
        self.killed, self.leader = victim, None
        self._leaderless_since = time.monotonic()
        return victim

    def _alive(self) -> list[Child]:
        return [child for child in self._port_of if child is not self.killed]

    def _leads(self, child: Child) -> bool | None:
        """Tell whether it leads; None if it does not answer (yet)."""
        try:
            url = f"http://{LOCALHOST}:{self._port_of[child]}/healthz"
            with _DIRECT.open(url, timeout=_PROBE_SECONDS) as answer:
                return bool(json.load(answer)["leader"])
        except (URLError, OSError, ValueError):
            return None
