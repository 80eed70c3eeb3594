"""A harvester process of the chaos suite, in the hands of a test: to start, arm, freeze, thaw and kill."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from devstack.processes import wait_until
from tests.chaos.failpoints import VARIABLE, ArmedFailpoint
from tests.chaos.worker import WorkerSettings

CHECKOUT = Path(__file__).resolve().parents[2]
_LEADERSHIP = {"LeaderAcquired", "LeaderRevoked", "LeaderFenced"}
_START_SECONDS = 60.0
_GOOD_END_SECONDS = 60.0


class HarvesterProcess:
    """One process, running from the start. Used by one thread at a time.

    Args:
        settings: the worker's settings.
        log: where its output goes.
        failpoint: the failpoint that is armed from its start.

    Attributes:
        name: of the process.
        led_at: time of its last LeaderAcquired, on the clock of leases; None while it does not lead by its journal.
        committed: transactions it committed, a moment ago.
        failure: the reason for which it ended by itself, if it did.
    """

    def __init__(self, settings: WorkerSettings, log: Path, failpoint: ArmedFailpoint | None = None) -> None:
        self.name = settings.name
        self.led_at: float | None = None
        self.committed = 0
        self.sprung: list[str] = []
        self.failure: str | None = None
        self._log = log
        self._journal = Path(settings.journal)
        self._read = 0
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        if failpoint is not None:
            environment[VARIABLE] = str(failpoint)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.worker", settings.to_json()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=CHECKOUT,
                env=environment,
                text=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def is_frozen(self) -> bool:
        """Tell whether it is stopped by SIGSTOP now."""
        try:
            status = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in {"T", "t"}

    def arm(self, failpoint: ArmedFailpoint | None) -> None:
        """Arm or disarm it. Does nothing if it is dead."""
        if not self.is_running or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(f"{failpoint or 'off'}\n")
            self._process.stdin.flush()
        except OSError:
            return  # it has just died

    def kill(self) -> None:
        """Send SIGKILL, frozen or not, and wait."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def print_stacks(self) -> None:
        """Let it print the stacks of its threads to its log."""
        self._process.send_signal(signal.SIGUSR1)

    def terminate(self) -> None:
        """Send SIGTERM once it is handled, and wait for a good end."""
        wait_until(lambda: not self.is_running or catches(self._process.pid, signal.SIGTERM), timeout=_START_SECONDS)
        if not self.is_running:
            return
        self._process.terminate()
        try:
            self._process.wait(_GOOD_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.failure = f"{self.name} did not end within {_GOOD_END_SECONDS:.0f} s after SIGTERM"
            self.kill()

    def look(self) -> None:
        """Read on in its journal."""
        try:
            with self._journal.open("rb") as journal:
                journal.seek(self._read)
                complete, newline, _ = journal.read().rpartition(b"\n")
        except OSError:
            return
        self._read += len(complete) + len(newline)
        for line in complete.splitlines():
            self._note(json.loads(line))

    def _note(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event in _LEADERSHIP:
            self.led_at = entry["at"] if event == "LeaderAcquired" else None
        elif event == "committed":
            self.committed = entry["count"]
        elif event == "failpoint":
            self.sprung.append(entry["what"])
        elif event == "failed":
            self.failure = f"{self.name}: {entry['error']}"

    def tail(self, size: int = 3000) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-size:]


def catches(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process has a handler for a signal; False if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], base=16) >> (number - 1) & 1)
