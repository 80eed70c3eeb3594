"""The processes of a run: killed, stopped and replaced, and what became of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from devstack.processes import wait_until
from tests.chaos.effects.misfortunes import Place
from tests.chaos.process import CHECKOUT, catches

_START_SECONDS = 60.0
_GOOD_END_SECONDS = 90.0


@dataclass(frozen=True)
class Role:
    """A kind of processes.

    Attributes:
        name: of the role.
        number: of its processes.
        command: the module and its arguments.
        environments: of the processes, in turn.
    """

    name: str
    number: int
    command: list[str]
    environments: list[Mapping[str, str]]


class Crew:
    """A constant number of processes of each role. Used by one thread.

    Attributes:
        killed: names of those that were killed, by us or by themselves.
        failures: those that ended by themselves in another way, or did not end when they were asked to.
    """

    def __init__(self, roles: list[Role], place: Place) -> None:
        self.killed: set[str] = set()
        self.failures: list[str] = []
        self._place = place
        self._made = 0
        self._running: dict[str, list[tuple[str, subprocess.Popen[bytes]]]] = {role.name: [] for role in roles}
        self._roles = {role.name: role for role in roles}

    def fill(self) -> None:
        """Start what is missing, and note what has ended by itself."""
        for role in self._roles.values():
            running = self._running[role.name]
            for one in [one for one in running if one[1].poll() is not None]:
                running.remove(one)
                self._note_end(*one)
            while len(running) < role.number:
                running.append(self._start(role))

    def kill(self, role: str, number: int) -> str:
        """Send SIGKILL to one, whose name is returned."""
        name, process = self._take(role, number)
        process.kill()
        process.wait()
        self.killed.add(name)
        return name

    def leave(self, role: str, number: int) -> str:
        """Ask one to end, and start another meanwhile; return its name."""
        name, process = self._take(role, number)
        _ask_to_end(process)
        self.fill()
        self._await_end(name, process)
        return name

    def end(self) -> None:
        """Ask all to end, and wait until they have."""
        ending = [one for running in self._running.values() for one in running]
        for _, process in ending:
            _ask_to_end(process)
        for one in ending:
            self._await_end(*one)
        self._running = {name: [] for name in self._running}

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for running in self._running.values():
            for _, process in running:
                process.kill()
                process.wait()

    def _take(self, role: str, number: int) -> tuple[str, subprocess.Popen[bytes]]:
        running = self._running[role]
        return running.pop(number % len(running))

    def _await_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_GOOD_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.failures.append(f"{name} did not end within {_GOOD_END_SECONDS:.0f} s after SIGTERM")
            return
        self._note_end(name, process)

    def _note_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        if process.returncode == -signal.SIGKILL:
            self.killed.add(name)
        elif process.returncode:
            self.failures.append(f"{name} ended with {process.returncode}: {self._log(name).read_text()[-2000:]}")

    def _log(self, name: str) -> Path:
        return Path(self._place.directory) / f"{name}.log"

    def _start(self, role: Role) -> tuple[str, subprocess.Popen[bytes]]:
        self._made += 1
        name = f"{role.name}-{self._made}"
        environment = role.environments[self._made % len(role.environments)]
        with self._log(name).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *role.command],
                cwd=CHECKOUT,
                env={**os.environ, **environment, **replace(self._place, name=name).environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return name, process


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM once it is handled."""
    wait_until(lambda: process.poll() is not None or catches(process.pid, signal.SIGTERM), timeout=_START_SECONDS)
    process.send_signal(signal.SIGTERM)
