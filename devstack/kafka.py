"""A real Kafka broker: KRaft, one node that is both broker and controller, Kafka's main class started from its jars.

Besides the plain listener it has two more whose *advertised* ports belong to a `TcpProxy`: a client that bootstraps
through the proxy is sent back to the proxy and can be cut off, while others reach the broker undisturbed.
"""

import base64
import json
import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from devstack.broker import BrokerProbe
from devstack.errors import DevstackError, log_tail
from devstack.frame_proxy import FrameProxy
from devstack.jars import KAFKA_VERSION, Report, kafka_jars
from devstack.java import find_java
from devstack.ports import LOCALHOST, free_ports, is_free
from devstack.processes import ServiceProcess, wait_until
from devstack.proxy import TcpProxy

_PROXIES = (1, 2)
_LISTENING = ("plain", "controller", "proxied1", "proxied2")
_ADVERTISED = ("advertised1", "advertised2")
_SECONDS_TO_START = 90
_SECONDS_FOR_PROXY = 60

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "true",
    "num.partitions": "4",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Everybody may do everything, but with a topic for which a test sets ACLs.
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    # A single consumer need not wait for others to join its group.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # After a SIGKILL the controller believes the last incarnation of the broker to be alive for this long.
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
    # Sparing a small machine: one log cleaner with a small buffer.
    "log.cleaner.dedupe.buffer.size": "16777216",
}
_LOGGING = {
    "defaultLogLevel": "info",
    "showDateTime": "true",
    "dateTimeFormat": "HH:mm:ss.SSS",
    "log.org.apache.kafka.common.config": "warn",  # prints all 350 settings, twice
}


class KafkaBroker:
    """A broker of Kafka's own code, with its data and log in `directory`.

    Args:
        directory: May belong to a broker that already runs, which `start` then reuses.
        extra_properties: Settings that override ours, for example an authorizer.
        heap: Maximum Java heap, as in `-Xmx`.
        report: Told what takes long.
    """

    is_embedded = False
    description = f"real broker, Kafka {KAFKA_VERSION}"

    def __init__(
        self,
        directory: Path | str,
        *,
        extra_properties: Mapping[str, str] | None = None,
        heap: str = "512m",
        report: Report = lambda _: None,
    ) -> None:
        self._directory = Path(directory).absolute()
        self._properties = self._directory / "server.properties"
        self._log = self._directory / "kafka.log"
        self._ports_file = self._directory / "ports.json"
        self._process = ServiceProcess(self._directory / "broker.pid", str(self._properties))
        self._extra = dict(extra_properties or {})
        self._heap = heap
        self._report = report

    @property
    def bootstrap(self) -> str:
        """Host and port of the plain listener, the same across restarts."""
        return f"{LOCALHOST}:{self._ports['plain']}"

    @property
    def pid(self) -> int | None:
        """The pid of the broker, or None if it does not run."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the broker's process is alive."""
        return self._process.pid is not None

    def start(self) -> None:
        """Start the broker and wait until it takes records and forms a consumer group.

        Raises:
            BrokerUnavailableError: There is no Java, or Kafka's jars cannot be had.
            DevstackError: It did not start; the message ends with the tail of its log.
        """
        if self.is_running:
            self._wait_until_ready()
            return
        try:
            self._launch()
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Shut down in an orderly way; does nothing if it does not run."""
        self._process.terminate()

    def kill(self) -> None:
        """End the broker as a crash would (SIGKILL)."""
        self._process.kill()

    def restart(self) -> None:
        """Shut it down if it runs, and start it again on the same ports and data."""
        self.stop()
        self.start()

    def proxied(self, number: int) -> TcpProxy:
        """A proxy before listener PROXIED1 or PROXIED2; its `bootstrap` keeps clients behind it.

        Args:
            number: 1 or 2; each can have one proxy at a time.
        """
        return TcpProxy(LOCALHOST, *self._proxied_ports(number))

    def frame_proxied(self, number: int) -> FrameProxy:
        """The same, by a proxy that can pick out single requests."""
        return FrameProxy(LOCALHOST, *self._proxied_ports(number))

    def _proxied_ports(self, number: int) -> tuple[int, int]:
        if number not in _PROXIES:
            raise DevstackError(f"there are proxied listeners {_PROXIES}, not {number}")
        ports = self._ports
        # The shared broker's may be in use by another run of the tests.
        wait_until(lambda: is_free(ports[f"advertised{number}"]), timeout=_SECONDS_FOR_PROXY)
        return ports[f"proxied{number}"], ports[f"advertised{number}"]

    @property
    def _ports(self) -> dict[str, int]:
        try:
            ports: dict[str, int] = json.loads(self._ports_file.read_text())
        except OSError as error:
            raise DevstackError(f"the broker in {self._directory} was never started") from error
        return ports

    def _launch(self) -> None:
        java = find_java()
        classpath = f"{kafka_jars(java, self._report)}/*"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._settle_ports()
        self._write_properties()
        if not (self._directory / "data" / "meta.properties").exists():
            self._format_storage(java, classpath)
        self._process.spawn(
            [
                *(java, f"-Xmx{self._heap}"),
                *(f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in _LOGGING.items()),
                *("-cp", classpath, "kafka.Kafka", self._properties),
            ],
            log=self._log,
            env=_quiet_environment(),
        )

    def _settle_ports(self) -> None:
        """Keep the ports of an earlier start, unless something else listens there by now."""
        if self._ports_file.exists() and all(is_free(self._ports[name]) for name in _LISTENING):
            return
        names = _LISTENING + _ADVERTISED
        self._ports_file.write_text(json.dumps(dict(zip(names, free_ports(len(names)), strict=True))))

    def _write_properties(self) -> None:
        ports = self._ports
        listeners = {"PLAINTEXT": ports["plain"], "PROXIED1": ports["proxied1"], "PROXIED2": ports["proxied2"]}
        advertised = listeners | {"PROXIED1": ports["advertised1"], "PROXIED2": ports["advertised2"]}
        names = (*listeners, "CONTROLLER")
        settings = {
            **_SETTINGS,
            "log.dirs": str(self._directory / "data"),
            "controller.quorum.voters": f"1@{LOCALHOST}:{ports['controller']}",
            "listeners": _endpoints({**listeners, "CONTROLLER": ports["controller"]}),
            "advertised.listeners": _endpoints(advertised),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in names),
            **self._extra,
        }
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def _format_storage(self, java: Path, classpath: str) -> None:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        ran = subprocess.run(
            [
                *(java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
                *("-cp", classpath, "kafka.tools.StorageTool", "format", "--ignore-formatted"),
                # In one word: a cluster ID may begin with a dash.
                *(f"--cluster-id={cluster_id}", "--config", self._properties),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=_quiet_environment(),
        )
        if ran.returncode != 0:
            raise DevstackError(f"Kafka: formatting its storage failed: {(ran.stderr or ran.stdout).strip()}")

    def _wait_until_ready(self) -> None:
        probe = BrokerProbe(self.bootstrap)
        wait_until(lambda: not self.is_running or probe.answers(), timeout=_SECONDS_TO_START, interval=0.1)
        if not self.is_running:
            raise DevstackError(f"Kafka: the broker ended while starting; end of {self._log}:{log_tail(self._log)}")
        try:
            probe.round_trip()
        except DevstackError as error:
            raise DevstackError(f"Kafka: {error}; end of {self._log}:{log_tail(self._log)}") from error


def _endpoints(ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://{LOCALHOST}:{port}" for name, port in ports.items())


def _quiet_environment() -> dict[str, str]:
    """Our environment without JAVA_TOOL_OPTIONS and its like, which are meant for other Java programs."""
    return {name: value for name, value in os.environ.items() if name not in {"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"}}
