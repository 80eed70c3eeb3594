"""Three brokers and a controller: replication factor 3, min ISR 2, for topics, offsets and the state of transactions.

One node is controller alone, so that two of three brokers can be killed without taking the quorum along. Every broker
has the proxied listeners of the single one; `proxied(n)` puts a `FrameProxy` before the n-th of each, and a client that
bootstraps through these can be cut off from single brokers: from the leader of a partition, or from a coordinator of
transactions or groups. With `links`, each broker reaches the controller through a proxy as well: `isolate` cuts that
alone, and the broker goes on answering clients for partitions whose leaders the others have moved.
"""

import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from devstack.broker import BrokerProbe, silent_logger
from devstack.errors import DevstackError
from devstack.frame_proxy import FrameProxy
from devstack.jars import KAFKA_VERSION, Report
from devstack.java import SharedClasses
from devstack.kafka import (
    META,
    BrokerNode,
    KafkaNode,
    endpoints,
    random_id,
)
from devstack.ports import LOCALHOST, free_ports, is_free
from devstack.processes import wait_until
from devstack.proxy import Direction, TcpProxy

_BROKERS = (1, 2, 3)
_CONTROLLER = 100
_SETTINGS = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "auto.leader.rebalance.enable": "false",  # leaders stay where a test has moved them
    "controlled.shutdown.enable": "true",
}
_SECONDS_TO_START = 120
_SECONDS_TO_MOVE = 20
TRANSACTION_STATE = "__transaction_state"
"""The topic whose leaders are the coordinators of transactions."""
GROUP_STATE = "__consumer_offsets"
"""The topic whose leaders are the coordinators of groups."""
_KEY_TYPES = {GROUP_STATE: 0, TRANSACTION_STATE: 1}


class ControllerNode(KafkaNode):
    """The controller, which no client talks to.

    It has a listener for each broker that reaches it through a proxy: the controller tells a broker its advertised
    address, to which the broker connects from then on. With one listener that would lead around the proxies.
    """

    listening = ("controller", *(f"linked{number}" for number in _BROKERS))
    advertised = tuple(f"link{number}" for number in _BROKERS)

    def wait_until_ready(self) -> None:
        """Wait until it listens."""
        port = self.ports["controller"]
        if not wait_until(lambda: not self.is_running or not is_free(port), timeout=_SECONDS_TO_START):
            raise self._with_log(f"the controller does not listen after {_SECONDS_TO_START} s")
        if not self.is_running:
            raise self._with_log("the controller ended while starting")

    def _settings(self, ports: dict[str, int]) -> dict[str, str]:
        own = {"CONTROLLER": ports["controller"]}
        linked = {linked_listener(number): ports[f"linked{number}"] for number in _BROKERS}
        links = {linked_listener(number): ports[f"link{number}"] for number in _BROKERS}
        return {
            **_SETTINGS,
            "process.roles": "controller",
            "node.id": str(_CONTROLLER),
            "controller.quorum.voters": f"{_CONTROLLER}@{LOCALHOST}:{ports['controller']}",
            "listeners": endpoints(own | linked),
            "advertised.listeners": endpoints(own | links),
            "controller.listener.names": ",".join(own | linked),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in ("PLAINTEXT", *own, *linked)),
        }


def linked_listener(number: int) -> str:
    """Name the listener of the controller that a broker's proxy leads to."""
    return f"LINK{number}"


class ClusterBroker(BrokerNode):
    """One of the brokers.

    Args:
        directory: Its data and log.
        number: Its node id.
        controller: The controller, which has been formatted when this is launched.
        is_linked: Whether it reaches the controller through a proxy.
        options: As of a `KafkaNode`.
    """

    own_ports = ("plain",)

    def __init__(
        self, directory: Path, number: int, controller: ControllerNode, *, is_linked: bool, **options: Any
    ) -> None:
        super().__init__(directory, **options)
        self.number = number
        self._controller = controller
        self._is_linked = is_linked

    def _settings(self, ports: dict[str, int]) -> dict[str, str]:
        listener = linked_listener(self.number) if self._is_linked else "CONTROLLER"
        controller = self._controller.ports[f"link{self.number}" if self._is_linked else "controller"]
        own = self._listener_settings(ports, controller=False)
        protocols = own["listener.security.protocol.map"]
        return {
            **_SETTINGS,
            "process.roles": "broker",
            "node.id": str(self.number),
            "controller.quorum.voters": f"{_CONTROLLER}@{LOCALHOST}:{controller}",
            **own,
            "controller.listener.names": listener,
            "listener.security.protocol.map": f"{protocols},{linked_listener(self.number)}:PLAINTEXT",
        }

    def _format_storage(self, java: Path, classpath: str, classes: SharedClasses) -> None:
        """Copy the controller's formatting, without a Java of our own."""
        del java, classpath, classes
        formatted = dict(
            line.split("=", 1) for line in (self._controller.data / META).read_text().splitlines() if "=" in line
        )
        ours = formatted | {"node.id": str(self.number), "directory.id": random_id()}
        self.data.mkdir(parents=True, exist_ok=True)
        for checkpoint in self._controller.data.glob("bootstrap.checkpoint"):
            (self.data / checkpoint.name).write_bytes(checkpoint.read_bytes())
        (self.data / META).write_text("".join(f"{name}={value}\n" for name, value in ours.items()))


class ProxyGroup:
    """Proxies before all brokers, for the clients on one side of a network. Also a context manager.

    Attributes:
        of: The proxy of each broker, by its node id.
    """

    def __init__(self, proxies: Mapping[int, FrameProxy]) -> None:
        self.of = dict(proxies)

    @property
    def bootstrap(self) -> str:
        """Return the addresses to connect to."""
        return ",".join(proxy.bootstrap for proxy in self.of.values())

    def start(self) -> Self:
        """Start all."""
        for proxy in self.of.values():
            proxy.start()
        return self

    def stop(self) -> None:
        """Stop all."""
        for proxy in self.of.values():
            proxy.stop()

    def cut(self, *, drop: bool = False, only: Direction | None = None) -> None:
        """Become a black hole, as `TcpProxy.cut`."""
        for proxy in self.of.values():
            proxy.cut(drop=drop, only=only)

    def slow(self, seconds: float) -> None:
        """Become slow, as `TcpProxy.slow`."""
        for proxy in self.of.values():
            proxy.slow(seconds)

    def lose_connections(self) -> None:
        """Carry the connections of now no further, as `TcpProxy.lose_connections`."""
        for proxy in self.of.values():
            proxy.lose_connections()

    def restore(self) -> None:
        """End `cut` and `slow`."""
        for proxy in self.of.values():
            proxy.restore()

    def reset(self) -> None:
        """Refuse, as `TcpProxy.reset`."""
        for proxy in self.of.values():
            proxy.reset()

    def resume(self) -> None:
        """End `reset`."""
        for proxy in self.of.values():
            proxy.resume()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class KafkaCluster:
    """Three brokers that work together.

    Args:
        directory: May belong to a cluster that already runs, which `start` then reuses.
        extra_properties: Settings of all nodes that override ours.
        heap: Maximum Java heap of each broker.
        sides: Number of listeners of each broker behind proxies.
        links: Whether brokers reach the controller through proxies of this process, so that `isolate` works; such a
            cluster lives no longer than this process.
        report: Called with each step that takes long.
    """

    is_embedded = False
    description = f"real cluster of {len(_BROKERS)} brokers, Kafka {KAFKA_VERSION}"

    def __init__(
        self,
        directory: Path | str,
        *,
        extra_properties: Mapping[str, str] | None = None,
        heap: str = "320m",
        sides: int = 2,
        links: bool = False,
        report: Report = lambda _: None,
    ) -> None:
        self.directory = Path(directory).absolute()
        shared: dict[str, Any] = {"extra_properties": extra_properties, "report": report}
        self.controller = ControllerNode(
            self.directory / "controller",
            heap="160m",
            small=True,
            **shared,
        )
        self.brokers = {
            number: ClusterBroker(
                self.directory / f"broker-{number}",
                number,
                self.controller,
                is_linked=links,
                sides=sides,
                heap=heap,
                small=True,
                **shared,
            )
            for number in _BROKERS
        }
        self._has_links = links
        self._admin_client: AdminClient | None = None
        self._links: dict[int, TcpProxy] = {}
        self._open_links = ExitStack()

    @property
    def bootstrap(self) -> str:
        """Return the addresses of the plain listeners, the same across restarts."""
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    @property
    def pid(self) -> int | None:
        """Return the controller's pid, or None if it does not run."""
        return self.controller.pid

    @property
    def pids(self) -> list[int]:
        """Return the pids of all nodes that run, the controller's first."""
        return [node.pid for node in self._nodes if node.pid is not None]

    @property
    def is_running(self) -> bool:
        """Tell whether any node runs."""
        return any(node.is_running for node in self._nodes)

    def start(self) -> None:
        """Start the nodes that do not run, and wait until all take records and every replica is in sync.

        Raises:
            BrokerUnavailableError: There is no Java, or Kafka's jars cannot be had.
            DevstackError: It did not start; the message ends with the tail of a log.
        """
        try:
            if not self.is_running:
                self._settle_ports()
            self._start_links()
            for node in self._nodes:  # the controller first: the brokers' storage is formatted after its
                if not node.is_running:
                    node.launch()
            for node in self._nodes:
                node.wait_until_ready()
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End all nodes; does nothing if none runs."""
        for broker in self.brokers.values():
            broker.ask_to_stop()
        for broker in self.brokers.values():
            broker.stop(patience=8)
        self.controller.stop(patience=5)
        self._close()

    def kill(self) -> None:
        """End all nodes with SIGKILL."""
        for node in self._nodes:
            node.kill()
        self._close()

    def restart(self) -> None:
        """Shut all down and start them again on the same ports and data."""
        self.stop()
        self.start()

    def proxied(self, number: int) -> ProxyGroup:
        """Return proxies before a listener of each broker; their `bootstrap` keeps clients behind them.

        Args:
            number: The side, from 1 on; each can have one group at a time.
        """
        return ProxyGroup({broker.number: broker.frame_proxied(number) for broker in self.brokers.values()})

    # -- leaders and coordinators

    def leader_of(self, topic: str, partition: int) -> int:
        """Return the broker that leads a partition.

        Raises:
            DevstackError: The cluster names no leader.
        """
        found: list[int] = []

        def look() -> bool:
            found[:] = [number for number in [self._described(topic)[partition].leader] if number >= 0]
            return bool(found)

        if not wait_until(_quietly(look), timeout=_SECONDS_TO_MOVE, interval=0.1):
            raise DevstackError(f"{topic}[{partition}] has no leader")
        return found[0]

    def coordinator_of(self, name: str, state: str = TRANSACTION_STATE) -> int:
        """Return the broker that coordinates the transactions of a transactional.id, or with GROUP_STATE a group."""
        return self.leader_of(state, self.coordinating_partition(name, state))

    def coordinating_partition(self, name: str, state: str = TRANSACTION_STATE) -> int:
        """Return the partition of the state to which a transactional.id or a group belongs."""
        found: list[int] = []

        def look() -> bool:
            try:
                found[:] = [_java_hash(name) % len(self._described(state))]
            except KafkaException:  # the topic comes into being when first asked for
                self._ask(_find_coordinator_request(name, _KEY_TYPES[state]))
            return bool(found)

        if not wait_until(look, timeout=_SECONDS_TO_MOVE, interval=0.1):
            raise DevstackError(f"the cluster has no {state}")
        return found[0]

    def move_leader(self, topic: str, partition: int, to: int) -> None:
        """Let another broker lead a partition, by making it the preferred one.

        Raises:
            DevstackError: It does not lead within 20 seconds; it is not in sync, say.
        """
        replicas: list[int] = []

        def known() -> bool:  # by the broker that answers: not yet by all, perhaps, if the topic is new
            replicas[:] = self._described(topic)[partition].replicas
            return True

        if not wait_until(_quietly(known), timeout=_SECONDS_TO_MOVE, interval=0.2):
            raise DevstackError(f"{topic}[{partition}] is not known")
        self._ask(_reassign_request(topic, partition, [to, *(number for number in replicas if number != to)]))

        def moved() -> bool:
            if self._described(topic)[partition].leader == to:
                return True
            self._ask(_elect_request(topic, partition))
            return False

        if not wait_until(_quietly(moved), timeout=_SECONDS_TO_MOVE, interval=0.2):
            raise DevstackError(f"broker {to} does not become the leader of {topic}[{partition}]")

    def move_coordinator(self, name: str, to: int, state: str = TRANSACTION_STATE) -> None:
        """Let another broker coordinate the transactions of an id, or a group (and those beside it)."""
        self.move_leader(state, self.coordinating_partition(name, state), to)

    def wait_until_in_sync(self, timeout: float = 60) -> bool:
        """Wait until every partition has a leader and all its replicas; False if that takes longer.

        Each broker is asked by itself: one that was cut off from the controller believes in its own leadership for
        a moment after it is back, and a client that asked it alone would read an old end.
        """

        def in_sync() -> bool:
            return all(_is_in_sync(_new_admin(broker.bootstrap)) for broker in self.brokers.values())

        return wait_until(_quietly(in_sync), timeout=timeout, interval=0.2)

    def isolate(self, number: int) -> None:
        """Cut a broker off from the controller alone: it still believes that it leads partitions that others lead."""
        self._link(number).cut()

    def rejoin(self, number: int) -> None:
        """End `isolate`."""
        link = self._link(number)
        link.reset()  # the bytes held back are old
        link.restore()
        link.resume()

    @property
    def _nodes(self) -> list[KafkaNode]:
        return [self.controller, *self.brokers.values()]

    def _settle_ports(self) -> None:
        """Keep the ports of an earlier start, or draw all of them at once, so that no two nodes get the same."""
        nodes = self._nodes
        if all(node.has_free_ports for node in nodes):
            return
        wanted = [(node, name) for node in nodes for name in (*node.listening, *node.advertised)]
        drawn = dict(zip(wanted, free_ports(len(wanted)), strict=True))
        for node in nodes:
            node.take_ports({name: port for (owner, name), port in drawn.items() if owner is node})

    def _start_links(self) -> None:
        if not self._has_links or self._links:
            return
        ports = self.controller.ports
        for number in self.brokers:
            link = TcpProxy(LOCALHOST, ports[f"linked{number}"], ports[f"link{number}"])
            self._links[number] = self._open_links.enter_context(link)

    def _close(self) -> None:
        self._admin_client = None  # ports may be others after the next start
        self._open_links.close()
        self._links.clear()

    def _link(self, number: int) -> TcpProxy:
        if number not in self._links:
            raise DevstackError("brokers can be isolated only in a cluster made with links")
        return self._links[number]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        if not wait_until(_quietly(self._all_are_known), timeout=_SECONDS_TO_START, interval=0.2):
            raise DevstackError(f"Kafka: the brokers do not find each other; logs in {self.directory}")
        BrokerProbe(self.bootstrap).round_trip()
        if not self.wait_until_in_sync(deadline - time.monotonic()):
            raise DevstackError(f"Kafka: replicas do not get in sync; logs in {self.directory}")

    def _all_are_known(self) -> bool:
        return set(self._admin.list_topics(timeout=5).brokers) >= set(self.brokers)

    def _described(self, topic: str) -> dict[int, Any]:
        """Return the partitions of a topic, as the cluster knows them now."""
        known = self._admin.list_topics(topic, timeout=5).topics[topic]
        if known.error is not None:
            raise KafkaException(known.error)
        partitions: dict[int, Any] = known.partitions
        return partitions

    @property
    def _admin(self) -> AdminClient:
        if self._admin_client is None:
            self._admin_client = _new_admin(self.bootstrap)
        return self._admin_client

    def _ask(self, request: bytes) -> None:
        """Send a request to the first broker that takes it; callers see its effect elsewhere."""
        failures: list[str] = []
        for broker in self.brokers.values():
            try:
                with socket.create_connection((LOCALHOST, broker.ports["plain"]), timeout=5) as connection:
                    connection.sendall(struct.pack(">i", len(request)) + request)
                    if connection.recv(4):
                        return
            except OSError as error:
                failures.append(str(error))
        raise DevstackError(f"no broker takes a request: {'; '.join(failures)}")


def _new_admin(bootstrap: str) -> AdminClient:
    quick: dict[str, Any] = {"reconnect.backoff.max.ms": 500, "socket.timeout.ms": 5000}
    quiet: dict[str, Any] = {"logger": silent_logger(), "log_level": 0}
    return AdminClient({"bootstrap.servers": bootstrap, **quiet, **quick})


def _is_in_sync(admin: AdminClient) -> bool:
    """Tell whether every partition has a leader and all its replicas, according to the broker that answers."""
    partitions = [one for topic in admin.list_topics(timeout=5).topics.values() for one in topic.partitions.values()]
    return all(one.leader >= 0 and len(one.isrs) == len(one.replicas) for one in partitions)


def _quietly(look: Callable[[], bool]) -> Callable[[], bool]:
    """Make a check False while Kafka does not answer."""

    def quiet() -> bool:
        try:
            return look()
        except (KafkaException, KeyError, TimeoutError):
            return False

    return quiet


def _java_hash(text: str) -> int:
    """Hash a transactional.id as Kafka does: the absolute value of Java's hash."""
    value = 0
    encoded = text.encode("utf-16-be")
    for unit in struct.unpack(f">{len(encoded) // 2}H", encoded):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value if value < 0x80000000 else (0x100000000 - value) % 0x80000000


# Requests that confluent-kafka does not have, or cannot send. Both are flexible: compact strings, tagged fields.


def _reassign_request(topic: str, partition: int, replicas: list[int]) -> bytes:
    """Encode AlterPartitionReassignments, version 0, of one partition."""
    ordered = _varint(len(replicas) + 1) + struct.pack(f">{len(replicas)}i", *replicas)
    one_partition = b"\2" + struct.pack(">i", partition) + ordered + b"\0"
    return _header(45, 0) + struct.pack(">i", 10_000) + b"\2" + _compact(topic) + one_partition + b"\0\0"


def _elect_request(topic: str, partition: int) -> bytes:
    """Encode ElectLeaders, version 2, of one partition: its preferred one."""
    preferred = b"\0"
    one_topic = _compact(topic) + b"\2" + struct.pack(">i", partition) + b"\0"
    return _header(43, 2) + preferred + b"\2" + one_topic + struct.pack(">i", 10_000) + b"\0"


def _find_coordinator_request(name: str, key_type: int) -> bytes:
    """Encode FindCoordinator, version 3."""
    return _header(10, 3) + _compact(name) + bytes([key_type, 0])


def _header(api_key: int, version: int) -> bytes:
    name = b"devstack"
    return struct.pack(">hhih", api_key, version, 1, len(name)) + name + b"\0"


def _compact(text: str) -> bytes:
    return _varint(len(text.encode()) + 1) + text.encode()


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
