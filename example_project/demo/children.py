"""The demo's child processes: started with a log each, and all of them ended when the demo ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from example_project.demo.applications import CHECKOUT

_PATIENCE_SECONDS = 15


class DemoError(Exception):
    """The demo cannot go on."""


class Child:
    """One process. In a session of its own, so that Ctrl-C reaches the demo alone, which then ends it in good order."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_directory: Path) -> None:
        self.name = name
        self._output = log_directory / f"{name}.out"
        self._log = log_directory / f"{name}.log"
        with self._output.open("wb") as output, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Tell whether it has not ended."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """Return the text that it has written to stdout."""
        return self._output.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False if it still runs after so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def check(self) -> None:
        """Raise DemoError if it has failed."""
        code = self._process.poll()
        if code:
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            reason = lines[-1] if lines else "it says nothing"
            raise DemoError(f"{self.name} ended with exit code {code}: {reason} (log: {self._log})")


class Children:
    """All of them; a context manager that leaves none behind.

    Args:
        log_directory: where their outputs go.
        env: the environment of each.
    """

    def __init__(self, log_directory: Path, env: Mapping[str, str]) -> None:
        self._log_directory = log_directory
        self._env = env
        self._children: list[Child] = []

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start one."""
        child = Child(name, command, self._env, self._log_directory)
        self._children.append(child)
        return child

    def stop(self) -> None:
        """Ask all that run to end, and kill those that do not."""
        running = [child for child in self._children if child.is_running]
        for child in running:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for child in running:
            if not child.wait(max(0.0, deadline - time.monotonic())):
                child.signal(signal.SIGKILL)
                child.wait(_PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run_all(children: Sequence[Child], seconds: float) -> None:
    """Wait until all have ended well.

    Raises:
        DemoError: one failed, or still runs after so many seconds.
    """
    deadline = time.monotonic() + seconds
    for child in children:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            raise DemoError(f"{child.name} still runs after {seconds:.0f} s")
        child.check()


def child_environment(additional: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without settings that are meant for another outbox, and with `additional`."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    return {
        **ours,
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONUNBUFFERED": "1",
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        **additional,
    }
