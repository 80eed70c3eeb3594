"""Harvester processes that contend for one outbox, and the signals that end, pause and resume them.

A process is `tests.acceptance.worker`, or the real `outbox harvest`, whose log then stands in for the journal: it
names the leader, but not the deadlines of its leases.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from devstack.processes import wait_until
from outbox_core.election import now
from tests.acceptance.terms import Term, terms_of
from tests.acceptance.worker import Settings

_CHECKOUT = Path(__file__).resolve().parents[2]
_PATIENCE = 60.0
_LOGGED = {
    "LeaderAcquired": re.compile(r"election: \S+ leads .*, term \d+, leader ID (\S+)"),
    "LeaderRefreshed": re.compile(r"harvest: leading on, new leader ID (\S+):"),
    "LeaderRevoked": re.compile(r"election: \S+ has handed over ()"),
    "LeaderFenced": re.compile(r"election: \S+ no longer leads ()"),
}


class HarvesterProcess:
    """One process, running from the start.

    Args:
        settings: for the worker, and as far as they exist there for the command.
        log: where its output goes.
        command: whether to run `outbox harvest` instead of the worker.
    """

    def __init__(self, settings: Settings, log: Path, *, command: bool = False) -> None:
        self.name = settings.name
        self.ended_at: float | None = None
        self.is_paused = False
        self._log = log
        self._journal = None if command else Path(settings.journal)
        arguments = _command(settings) if command else ["-m", "tests.acceptance.worker", settings.to_json()]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=_CHECKOUT
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> float:
        """Send SIGKILL; return the time of that on the clock of leases."""
        return self._end(signal.SIGKILL, -signal.SIGKILL)

    def terminate(self) -> float:
        """Send SIGTERM once it is handled, and wait for a good end; return the time of the signal."""
        assert wait_until(self._catches_sigterm, timeout=_PATIENCE), f"{self.name} does not start: {self.output()}"
        return self._end(signal.SIGTERM, 0)

    def pause(self) -> None:
        """Send SIGSTOP."""
        self.is_paused = True
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)
        self.is_paused = False

    def discard(self) -> None:
        """End it in any state, at the end of a test."""
        if self.is_running:
            self._process.kill()
            self._process.wait()

    def output(self) -> str:
        """Return the text that it wrote to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def journal(self) -> list[dict[str, Any]]:
        """Return the notes that it has written so far; see `worker`."""
        if self._journal is None:
            return _read_log(self.output())
        if not self._journal.exists():
            return []
        complete, _, _ = self._journal.read_text().rpartition("\n")
        return [json.loads(line) for line in complete.splitlines()]

    def leader_ids(self) -> list[str]:
        """Return all IDs that its marks may carry."""
        return [
            entry["leader_id"] for entry in self.journal() if entry["event"] in {"LeaderAcquired", "LeaderRefreshed"}
        ]

    def terms(self) -> list[Term]:
        """Return the terms in which it led."""
        return terms_of(self.name, self.journal())

    def count(self, event: str) -> int:
        """Count its notes of this event."""
        return sum(entry["event"] == event for entry in self.journal())

    def _catches_sigterm(self) -> bool:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        caught = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], base=16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def _end(self, number: signal.Signals, code: int) -> float:
        asked_at = now()
        self._process.send_signal(number)
        found = self._process.wait(_PATIENCE)
        self.ended_at = now()
        assert found == code, f"{self.name} ended with {found}: {self.output()[-2000:]}"
        return asked_at


class Fleet:
    """The harvester processes of one outbox.

    Args:
        settings: those of all processes, but for `name` and `journal`.
        directory: for journals and logs.
        command: whether they are `outbox harvest`.
    """

    def __init__(self, directory: Path, *, command: bool = False, **settings: Any) -> None:
        self._directory = directory
        self._command = command
        self._settings = settings
        self.processes: list[HarvesterProcess] = []
        directory.mkdir(parents=True, exist_ok=True)

    def start(self, count: int = 1) -> list[HarvesterProcess]:
        """Start more processes."""
        started = [self._start_one(len(self.processes) + number) for number in range(count)]
        self.processes += started
        return started

    def leader(self, *, besides: HarvesterProcess | None = None, delivered: bool = True) -> HarvesterProcess:
        """Wait for a leader, which with `delivered` has delivered a first record, and return it."""
        found: list[HarvesterProcess] = []

        def look() -> bool:
            for process in self.processes:
                self._check_alive(process)
                if process is not besides and _leads(process, delivered=delivered):
                    found.append(process)
            return bool(found)

        assert wait_until(look, timeout=_PATIENCE, interval=0.05), f"nobody leads; {self.tails()}"
        return found[0]

    def running(self) -> list[HarvesterProcess]:
        return [process for process in self.processes if process.is_running]

    def terms(self) -> list[Term]:
        """Return the terms of all processes together."""
        return sorted((term for process in self.processes for term in process.terms()), key=lambda term: term.begin)

    def stop(self) -> None:
        """Send SIGTERM to all that run, standbys first so that leadership does not wander."""
        running = sorted(self.running(), key=lambda process: _leads(process, delivered=False))
        for process in running:
            process.terminate()

    def discard(self) -> None:
        for process in self.processes:
            process.discard()

    def count(self, event: str) -> int:
        """Count the notes of this event by all processes together."""
        return sum(process.count(event) for process in self.processes)

    def takeover_seconds(self, since: float) -> float:
        """Return the seconds from that moment to the first record that a leadership begun after it delivered."""
        notes = [entry for process in self.processes for entry in _deliveries_of_terms(process, since)]
        return min(notes) - since if notes else float("nan")

    def tails(self) -> str:
        """Return the last lines of every process's log."""
        return "\n".join(f"--- {process.name}\n{process.output()[-1500:]}" for process in self.processes)

    def _start_one(self, number: int) -> HarvesterProcess:
        name = f"{self._directory.name}-{number}"
        settings = Settings(name=name, journal=str(self._directory / f"{name}.jsonl"), **self._settings)
        return HarvesterProcess(settings, self._directory / f"{name}.log", command=self._command)

    @staticmethod
    def _check_alive(process: HarvesterProcess) -> None:
        died = not process.is_running and process.ended_at is None
        assert not died, f"{process.name} died by itself: {process.output()[-3000:]}"


def _leads(process: HarvesterProcess, *, delivered: bool) -> bool:
    if process.is_paused or not process.is_running:
        return False
    journal = process.journal()
    terms = terms_of(process.name, journal)
    if not terms or terms[-1].end <= now():
        return False
    arrived = any(entry["event"] == "delivered" and entry["at"] >= terms[-1].begin for entry in journal)
    return arrived or not delivered


def _deliveries_of_terms(process: HarvesterProcess, since: float) -> list[float]:
    begun = min((term.begin for term in process.terms() if term.begin > since), default=float("inf"))
    return [entry["at"] for entry in process.journal() if entry["event"] == "delivered" and entry["at"] > begun]


def _command(settings: Settings) -> list[str]:
    options = {
        "--dsn": settings.dsn,
        "--bootstrap-servers": settings.bootstrap,
        "--table": settings.table,
        "--name": settings.name,
    }
    return ["-m", "outbox_core", "harvest", *(part for option in options.items() for part in option)]


def _read_log(text: str) -> list[dict[str, Any]]:
    """Read the leadership events from the log of `outbox harvest`.

    The log does not name leases and first records: a lease is taken to last, and a first record to arrive at once.
    """
    journal: list[dict[str, Any]] = []
    behind = time.time() - now()
    leading = ""
    for line in text.splitlines():
        for event, pattern in _LOGGED.items():
            found = pattern.search(line)
            if found is None:
                continue
            at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp() - behind
            if event == "LeaderAcquired":
                leading = found[1]
                journal.append({"at": at, "event": event, "leader_id": leading, "deadline": float("inf")})
                journal.append({"at": at, "event": "delivered"})
            else:
                journal.append({"at": at, "event": event, "leader_id": found[1] or leading})
    return journal
