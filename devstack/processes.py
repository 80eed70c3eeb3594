"""The processes of the stack: started, recognised and ended.

A process is remembered by a pid file. Pids are recycled, so before a signal is sent the process's command line must
contain the *mark*: a path inside the service's own directory that is part of the command it was started with.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from devstack.errors import DevstackError

_CAUSES = r"error|exception|refused|denied|timed out|unable|not found|unknown host"


class ServiceProcess:
    """A process that outlives us, found again by its pid file.

    Args:
        pid_file: Where the pid is kept; its first line is the pid (as in Postgres's `postmaster.pid`).
        mark: Text that is part of the command line of this process and of no other.
    """

    def __init__(self, pid_file: Path, mark: str) -> None:
        self._pid_file = pid_file
        self._mark = mark
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid of the running process, or None if it does not run."""
        if self._child is not None:  # polling reaps it, and while it becomes another program it has no command line
            return self._child.pid if self._child.poll() is None else None
        try:
            pid = int(self._pid_file.read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None
        return pid if self._mark in command_line(pid) else None

    def spawn(self, command: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None) -> Self:
        """Start it in a session of its own (no Ctrl-C, no inherited pipes), with both outputs in `log`."""
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        pid = self._child.pid
        self._pid_file.write_text(f"{pid}\n")
        # Others recognise it only once it has become its program.
        wait_until(lambda: self.pid is None or self._mark in command_line(pid), timeout=5, interval=0.005)
        return self

    def send(self, number: signal.Signals) -> None:
        """Send it a signal. Does nothing if it does not run."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, number)

    def kill(self) -> None:
        """End it at once (SIGKILL) and wait until it is gone. Does nothing if it does not run."""
        self._end(signal.SIGKILL, patience=10)

    def terminate(self, patience: float = 15) -> None:
        """Ask it to end (SIGTERM); kill it if it still runs after `patience` seconds."""
        if not self._end(signal.SIGTERM, patience):
            self.kill()
        self._pid_file.unlink(missing_ok=True)

    def _end(self, number: signal.Signals, patience: float) -> bool:
        pid = self.pid
        if pid is None:
            return True
        os.kill(pid, number)
        return wait_until(lambda: self.pid is None, timeout=patience)


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if there is no such process or it is a zombie."""
    proc = Path("/proc")
    if (proc / "self").exists():
        try:
            return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    return subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = 0.05) -> bool:
    """Poll `condition` until it holds; False if it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def run_watched(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    on_line: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    idle_timeout: float = 60,
) -> None:
    """Run a command to its end, showing each line it prints to `on_line`.

    Args:
        name: Its name in errors.
        command: Program and arguments.
        log: Receives the output; removed if the command succeeds.
        on_line: Called with each line, stripped.
        env: The whole environment, if not ours.
        idle_timeout: Seconds of silence after which the command is given up.

    Raises:
        DevstackError: It failed, or was silent for too long; the message is one line that names the log.
    """
    with log.open("wb") as output, log.open("r", errors="replace") as lines:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
        try:
            _watch(process, lines.readline, on_line, idle_timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode == 0:
        log.unlink()
        return
    gave_up = process.returncode == -signal.SIGKILL
    ending = f"said nothing for {idle_timeout:.0f} s" if gave_up else f"failed with exit code {process.returncode}"
    raise DevstackError(f"{name} {ending}{_reason(log)} (see {log})")


def _reason(log: Path) -> str:
    """Return the first line of a log that looks like the cause of a failure."""
    for line in map(str.strip, log.read_text(errors="replace").splitlines()):
        warning = re.search(r"warn", line, re.IGNORECASE)
        if not warning and len(line) > 15 and re.search(_CAUSES, line, re.IGNORECASE):
            return f": {line[:200]}"
    return ""


def _watch(
    process: subprocess.Popen[bytes],
    readline: Callable[[], str],
    on_line: Callable[[str], None],
    idle_timeout: float,
) -> None:
    """Follow the log until the process ends or says nothing for `idle_timeout` seconds."""
    heard = time.monotonic()
    while True:
        ended = process.poll() is not None
        while line := readline():
            heard = time.monotonic()
            on_line(line.strip())
        if ended or time.monotonic() - heard > idle_timeout:
            return
        time.sleep(0.1)
