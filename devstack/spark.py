"""Spark's own services, from PySpark's distribution: a standalone cluster, and a server of Spark Connect.

Each is a process with a home, a temporary folder and a PATH of its own: of this environment its workers have nothing
but what an application sends them.
"""

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from devstack.errors import DevstackError
from devstack.ports import LOCALHOST, free_port, free_ports
from devstack.processes import ServiceProcess, wait_until

_SECONDS_TO_START = 240.0  # on a machine that does seven other things
_SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_CLEANUP = """
spark.worker.cleanup.enabled true
spark.worker.cleanup.interval 1800
spark.worker.cleanup.appDataTtl 86400
"""


def python_of_workers() -> str:
    """Return the interpreter below this environment, which has none of its packages."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


class _Services:
    """Processes of Spark, which end with those that they have started."""

    def __init__(self, directory: Path, java_home: Path) -> None:
        self.directory = directory
        self._java_home = java_home
        self._services: dict[str, ServiceProcess] = {}

    def _start(self, name: str, program: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        import pyspark

        home = self.directory / name
        (home / "tmp").mkdir(parents=True)
        (home / "properties").write_text(_CLEANUP)
        environment = {
            "PATH": os.pathsep.join((str(Path(python_of_workers()).parent), "/usr/local/bin", "/usr/bin", "/bin")),
            "JAVA_HOME": str(self._java_home),
            "HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "SPARK_LOCAL_DIRS": str(home / "local"),
            "SPARK_LOCAL_IP": LOCALHOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "JAVA_TOOL_OPTIONS": _SMALL,  # of executors, too, which live for seconds
            **(environ or {}),
        }
        command = [str(Path(pyspark.__file__).parent / "bin" / program), *arguments]
        service = ServiceProcess(home / "pid", str(home / "properties"))
        self._services[name] = service.spawn(
            [*command, "--properties-file", str(home / "properties")], log=self.log(name), env=environment
        )

    def log(self, name: str) -> Path:
        """Return the log of a process."""
        return self.directory / f"{name}.log"

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process and those that it has started."""
        self._end(self._services.pop(name))

    def stop(self) -> None:
        """End all."""
        while self._services:
            self._end(self._services.popitem()[1])

    def _end(self, service: ServiceProcess) -> None:
        pid = service.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            service.kill()

    def _must_run(self, name: str, is_ready: bool) -> None:
        if not is_ready or self._services[name].pid is None:
            ending = self.log(name).read_text()[-2000:]
            raise DevstackError(f"Spark's {name} did not start (see {self.log(name)}): {ending}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class SparkCluster(_Services):
    """A standalone master and its workers.

    Args:
        directory: for logs, and a folder for each process, in which workers run their applications.
        java_home: of a Java for Spark.
        cores: of each worker.
        gigabytes: of memory of each worker, for its executors.
    """

    def __init__(self, directory: Path, java_home: Path, *, cores: int = 1, gigabytes: int = 1) -> None:
        super().__init__(directory, java_home)
        self._size = ("-c", str(cores), "-m", f"{gigabytes}g")
        self._port, self._page_port = free_ports(2)

    @property
    def url(self) -> str:
        """Return the master's URL."""
        return f"spark://{LOCALHOST}:{self._port}"

    def start(self, workers: int = 2) -> Self:
        """Start master and workers, and wait until all are registered. Raises DevstackError."""
        ports = (f"--port={self._port}", f"--webui-port={self._page_port}")
        options = [part for option in ports for part in option.split("=")]
        self._start("master", "spark-class", "org.apache.spark.deploy.master.Master", "--host", LOCALHOST, *options)
        self._must_run("master", wait_until(lambda: self.state().get("status") == "ALIVE", _SECONDS_TO_START))
        for number in range(workers):
            self.start_worker(f"worker-{number}")
        is_complete = wait_until(lambda: self.state().get("aliveworkers") == workers, _SECONDS_TO_START)
        for number in range(workers):
            self._must_run(f"worker-{number}", is_complete)
        return self

    def start_worker(self, name: str) -> None:
        """Start a worker, which registers itself; below `<directory>/<name>/work` is a folder for each application."""
        folder = self.directory / name / "work"
        options = ("--host", LOCALHOST, "--webui-port", "0", *self._size, "-d", str(folder), self.url)
        self._start(name, "spark-class", "org.apache.spark.deploy.worker.Worker", *options)

    def executors(self) -> list[int]:
        """Return the pids of all executors."""
        parents = {self._services[name].pid for name in self.workers}
        return [pid for pid, parent in _processes() if parent in parents]

    def pythons(self) -> list[int]:
        """Return the pids of the executors' Python processes."""
        executors, processes = set(self.executors()), list(_processes())
        daemons = {pid for pid, parent in processes if parent in executors}
        return [*daemons, *(pid for pid, parent in processes if parent in daemons)]

    @property
    def workers(self) -> list[str]:
        """Return the names of the running workers, the oldest first."""
        return [name for name in self._services if name != "master"]

    def state(self) -> dict[str, Any]:
        """Return what the master says of itself; nothing if it does not answer."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{LOCALHOST}:{self._page_port}/json/", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return found


def _processes() -> Iterator[tuple[int, int]]:
    """Yield the pids of all processes with those of their parents."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it has ended
            yield int(status.parent.name), int(status.read_text().rpartition(")")[2].split()[1])


class ConnectServer(_Services):
    """A server of Spark Connect.

    Args:
        directory: for its log.
        java_home: of a Java for Spark.
        master: URL of the cluster that it uses, or `local[2]`.
        environ: more environment variables, such as `PYSPARK_PYTHON`.
    """

    def __init__(self, directory: Path, java_home: Path, master: str, environ: Mapping[str, str]) -> None:
        super().__init__(directory, java_home)
        self._port, self._master, self._environ = free_port(), master, environ

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"sc://{LOCALHOST}:{self._port}"

    def start(self) -> Self:
        """Start it, and wait until it listens. Raises DevstackError."""
        settings = {
            "spark.connect.grpc.binding.address": LOCALHOST,
            "spark.connect.grpc.binding.port": str(self._port),
            "spark.driver.host": LOCALHOST,
            "spark.ui.enabled": "false",
        }
        options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        main = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", self._master)
        # Spark takes this server for a daemon, whatever its driver's memory is set to.
        environ = {"SPARK_DAEMON_MEMORY": "1g", **self._environ}
        self._start("connect", "spark-submit", *main, *options, environ=environ)
        listens = wait_until(
            lambda: "Spark Connect server started" in self.log("connect").read_text(), _SECONDS_TO_START
        )
        self._must_run("connect", listens)
        return self
