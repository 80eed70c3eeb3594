"""Web servers as processes, with the files of a page of the docs."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx

CHECKOUT = Path(__file__).resolve().parents[3]
_PATIENCE_SECONDS = 60.0
_BLOCK = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files_of(page):
    """Return the files that a page of the docs shows: name -> content."""
    return dict(_BLOCK.findall((CHECKOUT / "docs" / page).read_text()))


def write_files(page, folder, *names):
    """Write some of the files that a page shows into a folder."""
    for name in names:
        (folder / name).write_text(files_of(page)[name])


class Server:
    """A web server in a folder, on a free port, that has begun to answer; it is killed at the end of the context."""

    def __init__(self, folder, environment, module, *arguments):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = folder / f"server-{self.port}.log"
        paths = os.pathsep.join([str(folder), str(CHECKOUT)])
        command = [part.replace("PORT", str(self.port)) for part in (sys.executable, "-m", module, *arguments)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment, "PYTHONPATH": paths, "HOME": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its workers, too
        self.process.wait()

    def request(self, method, path, **options):
        """Send a request to the server, which may not have begun to listen."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with suppress(httpx.TransportError):
                return httpx.request(method, f"http://127.0.0.1:{self.port}{path}", timeout=30, **options)
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def terminate(self):
        """Send SIGTERM, and wait until the server and its harvesters have ended in good order."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(_PATIENCE_SECONDS)
        assert code in (0, -signal.SIGTERM), self.log  # uvicorn passes the signal on at its end
        assert "left behind" not in self.log
        assert "Traceback" not in self.log, self.log

    @property
    def log(self):
        return self._log.read_text()
