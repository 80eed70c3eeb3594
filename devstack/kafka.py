"""A real Kafka broker: KRaft, one node that is both broker and controller, Kafka's main class started from its jars.

Besides the plain listener it has more, two by default, one for each *side* of a network, whose *advertised* ports
belong to a `TcpProxy`: a client that bootstraps through the proxy is sent back to the proxy and can be cut off, while
others reach the broker undisturbed.
"""

import base64
import json
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devstack.broker import BrokerProbe
from devstack.errors import DevstackError, log_tail
from devstack.frame_proxy import FrameProxy
from devstack.jars import KAFKA_VERSION, Report, kafka_jars
from devstack.java import SharedClasses, find_java
from devstack.ports import LOCALHOST, free_ports, is_free
from devstack.processes import ServiceProcess, wait_until
from devstack.proxy import TcpProxy

_SIDES = 2
_NODE_ID = 1
_SECONDS_TO_START = 90
_SECONDS_FOR_PROXY = 60
META = "meta.properties"
"""The file that says which node's data a directory holds."""

SETTINGS = {
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
    "broker.heartbeat.interval.ms": "500",  # which starts it earlier
    # Sparing a small machine: one log cleaner with a small buffer.
    "log.cleaner.dedupe.buffer.size": "16777216",
}
_LOGGING = {
    "defaultLogLevel": "info",
    "showDateTime": "true",
    "dateTimeFormat": "HH:mm:ss.SSS",
    "log.org.apache.kafka.common.config": "warn",  # prints all 350 settings, twice
}


_SMALL_JAVA = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class KafkaNode:
    """A process of Kafka's own code, with its data and log in `directory`; subclasses give it its role.

    Args:
        directory: May belong to a node that already runs, which `start` then reuses.
        extra_properties: Settings that override ours, for example an authorizer.
        heap: Maximum Java heap, as in `-Xmx`.
        small: Java for brokers that start often or beside each other: half the time to start, and slower after minutes.
        report: Called with each step that takes long.
    """

    listening: tuple[str, ...]
    """Names of the ports on which it listens."""
    advertised: tuple[str, ...]
    """Names of the ports that it only tells others."""

    def __init__(
        self,
        directory: Path | str,
        *,
        extra_properties: Mapping[str, str] | None = None,
        heap: str = "512m",
        small: bool = False,
        report: Report = lambda _: None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.data = self.directory / "data"
        self._properties = self.directory / "server.properties"
        self._log = self.directory / "kafka.log"
        self._ports_file = self.directory / "ports.json"
        self._process = ServiceProcess(self.directory / "broker.pid", str(self._properties))
        self._extra = dict(extra_properties or {})
        self._java_options = (f"-Xmx{heap}", *(_SMALL_JAVA if small else ()))
        self._report = report

    @property
    def pid(self) -> int | None:
        """Return the pid of the process, or None if it does not run."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Tell whether the process is alive."""
        return self._process.pid is not None

    @property
    def has_free_ports(self) -> bool:
        """Tell whether it has ports of an earlier start, on which nothing listens."""
        if not self._ports_file.exists():
            return False
        ports = self.ports
        has_all = ports.keys() >= {*self.listening, *self.advertised}
        return has_all and all(is_free(ports[name]) for name in self.listening)

    @property
    def ports(self) -> dict[str, int]:
        """Return its ports, the same across restarts."""
        try:
            ports: dict[str, int] = json.loads(self._ports_file.read_text())
        except OSError as error:
            raise DevstackError(f"the Kafka node in {self.directory} was never started") from error
        return ports

    def start(self) -> None:
        """Start it and wait until it works.

        Raises:
            BrokerUnavailableError: There is no Java, or Kafka's jars cannot be had.
            DevstackError: It did not start; the message ends with the tail of its log.
        """
        if self.is_running:
            self.wait_until_ready()
            return
        try:
            self.launch()
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self, patience: float = 15) -> None:
        """Shut down in an orderly way; does nothing if it does not run.

        Args:
            patience: Seconds after which it is killed.
        """
        self._process.terminate(patience)

    def ask_to_stop(self) -> None:
        """Send SIGTERM and do not wait, so that several end at the same time; `stop` waits."""
        self._process.send(signal.SIGTERM)

    def freeze(self) -> None:
        """Let it stand still (SIGSTOP), as a long pause of its Java would."""
        self._process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """End `freeze`."""
        self._process.send(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        self._process.kill()

    def restart(self) -> None:
        """Shut it down if it runs, and start it again on the same ports and data."""
        self.stop()
        self.start()

    def launch(self) -> None:
        """Start its process and return at once."""
        java = find_java()
        jars = kafka_jars(java, self._report)
        classpath, classes = f"{jars}/*", SharedClasses(java, jars)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.settle_ports()
        settings = {**SETTINGS, "log.dirs": str(self.data), **self._settings(self.ports), **self._extra}
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        if not (self.data / META).exists():
            self._format_storage(java, classpath, classes)
        self._process.spawn(
            [
                java,
                *self._java_options,
                *classes.options,
                *(f"-Dorg.slf4j.simpleLogger.{name}={value}" for name, value in _LOGGING.items()),
                *("-cp", classpath, "kafka.Kafka", self._properties),
            ],
            log=self._log,
            env=_quiet_environment(),
        )

    def settle_ports(self) -> None:
        """Keep the ports of an earlier start, unless something else listens there by now."""
        if self.has_free_ports:
            return
        names = (*self.listening, *self.advertised)
        self.take_ports(dict(zip(names, free_ports(len(names)), strict=True)))

    def take_ports(self, ports: Mapping[str, int]) -> None:
        """Use these from the next start on."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._ports_file.write_text(json.dumps(ports))

    def wait_until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            DevstackError: It ended, or does not answer in time; the message ends with the tail of its log.
        """
        raise NotImplementedError

    def _settings(self, ports: dict[str, int]) -> dict[str, str]:
        """Return the settings of its role."""
        raise NotImplementedError

    def _format_storage(self, java: Path, classpath: str, classes: SharedClasses) -> None:
        with classes.kept_at_exit() as options:
            ran = subprocess.run(
                [
                    java,
                    *("-Xmx256m", *_SMALL_JAVA, *options, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"),
                    *("-cp", classpath, "kafka.tools.StorageTool", "format", "--ignore-formatted"),
                    # In one word: a cluster ID may begin with a dash.
                    *(f"--cluster-id={random_id()}", "--config", self._properties),
                ],
                capture_output=True,
                text=True,
                check=False,
                env=_quiet_environment(),
            )
        if ran.returncode != 0:
            raise DevstackError(f"Kafka: formatting its storage failed: {(ran.stderr or ran.stdout).strip()}")

    def _with_log(self, problem: object) -> DevstackError:
        return DevstackError(f"Kafka: {problem}; end of {self._log}:{log_tail(self._log)}")


class BrokerNode(KafkaNode):
    """A node that clients talk to.

    Args:
        directory: As of a `KafkaNode`.
        sides: Number of listeners behind proxies.
        options: As of a `KafkaNode`.
    """

    own_ports: tuple[str, ...]
    """Names of the ports on which it listens without a proxy."""

    def __init__(self, directory: Path | str, *, sides: int = _SIDES, **options: Any) -> None:
        super().__init__(directory, **options)
        self._sides = range(1, sides + 1)
        self.listening = (*self.own_ports, *(f"proxied{side}" for side in self._sides))
        self.advertised = tuple(f"advertised{side}" for side in self._sides)

    @property
    def bootstrap(self) -> str:
        """Return host and port of the plain listener, the same across restarts."""
        return f"{LOCALHOST}:{self.ports['plain']}"

    def proxied(self, number: int) -> TcpProxy:
        """Return a proxy before a listener; its `bootstrap` keeps clients behind it.

        Args:
            number: The side, from 1 on; each can have one proxy at a time.
        """
        return TcpProxy(LOCALHOST, *self._proxied_ports(number))

    def frame_proxied(self, number: int) -> FrameProxy:
        """Return such a proxy that can pick out single requests."""
        return FrameProxy(LOCALHOST, *self._proxied_ports(number))

    def wait_until_ready(self) -> None:
        """Wait until it answers requests for metadata."""
        probe = BrokerProbe(self.bootstrap)
        answers = wait_until(lambda: not self.is_running or probe.answers(), timeout=_SECONDS_TO_START, interval=0.1)
        if not self.is_running:
            raise self._with_log("the broker ended while starting")
        if not answers:
            raise self._with_log(f"the broker does not answer after {_SECONDS_TO_START} s")

    def _listener_settings(self, ports: dict[str, int], *, controller: bool) -> dict[str, str]:
        plain = {"PLAINTEXT": ports["plain"]}
        listeners = plain | {f"PROXIED{side}": ports[f"proxied{side}"] for side in self._sides}
        advertised = plain | {f"PROXIED{side}": ports[f"advertised{side}"] for side in self._sides}
        bound = listeners | ({"CONTROLLER": ports["controller"]} if controller else {})
        return {
            "listeners": endpoints(bound),
            "advertised.listeners": endpoints(advertised),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in (*listeners, "CONTROLLER")),
        }

    def _proxied_ports(self, number: int) -> tuple[int, int]:
        if number not in self._sides:
            raise DevstackError(f"there are proxied listeners 1 to {len(self._sides)}, not {number}")
        ports = self.ports
        # The shared broker's may be in use by another run of the tests.
        wait_until(lambda: is_free(ports[f"advertised{number}"]), timeout=_SECONDS_FOR_PROXY)
        return ports[f"proxied{number}"], ports[f"advertised{number}"]


class KafkaBroker(BrokerNode):
    """A broker that is its own controller."""

    own_ports = ("plain", "controller")
    is_embedded = False
    description = f"real broker, Kafka {KAFKA_VERSION}"

    def wait_until_ready(self) -> None:
        """Wait until it takes records and forms a consumer group."""
        super().wait_until_ready()
        try:
            BrokerProbe(self.bootstrap).round_trip()
        except DevstackError as error:
            raise self._with_log(error) from error

    def _settings(self, ports: dict[str, int]) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": str(_NODE_ID),
            "controller.quorum.voters": f"{_NODE_ID}@{LOCALHOST}:{ports['controller']}",
            **self._listener_settings(ports, controller=True),
        }


def endpoints(ports: Mapping[str, int]) -> str:
    """Format listeners for Kafka's settings."""
    return ",".join(f"{name}://{LOCALHOST}:{port}" for name, port in ports.items())


def random_id() -> str:
    """Return an id of a cluster or a directory, in Kafka's spelling."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _quiet_environment() -> dict[str, str]:
    """Return our environment without JAVA_TOOL_OPTIONS and its like, meant for other Java programs."""
    return {name: value for name, value in os.environ.items() if name not in {"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"}}
