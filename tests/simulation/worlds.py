"""Two worlds in which a scenario runs: the simulated Kafka, and a real broker behind a proxy that understands frames.

Both offer the names of confluent-kafka's clients. A scenario uses these, and a few things that only a world can do:
hold a request, cut the network, wait.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic

from devstack.frame_proxy import Api, FrameProxy, Match, Request
from devstack.proxy import Direction
from outbox_core.kafka.clients import discard, make_admin, make_consumer, make_producer
from tests.simulation import clients
from tests.simulation.brokers import Cluster
from tests.simulation.network import Connection, Cut, Network
from tests.simulation.network import Request as SimulatedRequest
from tests.simulation.scheduling import Process, Scheduler, current

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_RUN_SECONDS = 600.0
_SHOWN = 20
_READER = {"enable.auto.commit": False, "enable.partition.eof": True, "fetch.wait.max.ms": 50}
_PRODUCER = {"linger.ms": 0, "retry.backoff.ms": 500, "retry.backoff.max.ms": 3000}


class Held:
    """A request that a world has caught, or will catch."""

    def wait(self) -> None:
        """Wait until it is caught."""
        raise NotImplementedError

    def deliver(self) -> None:
        """Let it arrive, and wait until the broker has answered; nobody gets the answer."""
        raise NotImplementedError


class World:
    """Topics, clients and faults of one scenario; its topics and IDs are those of no other."""

    def __init__(self) -> None:
        self._clients: list[Any] = []

    def name(self, what: str) -> str:
        """Return a name that no other scenario uses."""
        return what

    def topic(self, partitions: int = 1, **config: str) -> str:
        """Create a topic."""
        name = self.name(f"topic{len(self._clients)}")
        admin = self.admin()
        admin.create_topics([NewTopic(name, partitions, 1, config=config)], request_timeout=30.0)[name].result(60)
        return name

    def producer(self, name: str = "", transactional_id: str = "", **settings: Any) -> Any:
        """Return a producer behind the faults. Dots of settings are written as underscores."""
        ids = {"transactional.id": transactional_id} if transactional_id else {}
        named = {"client.id": name} if name else {}
        return self._kept(self._make("Producer", _PRODUCER | named | ids | _dotted(settings)))

    def consumer(self, **settings: Any) -> Any:
        """Return a consumer behind the faults."""
        settings.setdefault("group_id", self.name("readers"))
        return self._kept(self._make("Consumer", _READER | _dotted(settings)))

    def admin(self) -> Any:
        """Return an admin client."""
        return self._kept(self._make("AdminClient", {}))

    def read(self, topic: str, isolation: str = "committed", partition: int = 0) -> list[tuple[int, str]]:
        """Return offsets and values of a partition's records, from its beginning to the end that a reader sees."""
        reader = self.consumer(isolation_level=f"read_{isolation}")
        reader.assign([TopicPartition(topic, partition, 0)])
        found: list[tuple[int, str]] = []
        end = self.time() + PATIENCE_SECONDS
        while self.time() < end:
            message = reader.poll(1.0)
            if message is None:
                continue
            if message.error() is None:
                found.append((message.offset(), str(message.value()[:_SHOWN], "utf-8")))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                reader.close()
                return found
        raise TimeoutError(f"{topic}: its end was not reached")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is sure to come."""
        end = self.time() + PATIENCE_SECONDS
        while not condition():
            if self.time() > end:
                raise TimeoutError("what is sure to come did not")
            self.sleep(_POLL_SECONDS)

    def _kept(self, client: Any) -> Any:
        self._clients.append(client)
        return client

    def _make(self, kind: str, settings: dict[str, Any]) -> Any:
        raise NotImplementedError

    def hold(self, request: str, client: str = "", *, nth: int = 1) -> Held:
        """Catch the next such request, and reset its connection, so that the client repeats it on another one.

        Args:
            request: "PRODUCE", "END_TXN commit", ...
            client: Only of the client with this name.
            nth: Its number among such requests, counted from 1.
        """
        raise NotImplementedError

    def cut(self, passes: str = "") -> None:
        """Let nothing pass between clients and brokers, or only "requests" on connections that stand."""
        raise NotImplementedError

    def hang(self) -> None:
        """Have the broker take what it is sent, and do nothing about it."""
        raise NotImplementedError

    def go_on(self) -> None:
        """End `hang`: the broker does all that it was sent meanwhile."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Break all connections, and refuse new ones."""
        raise NotImplementedError

    def mend(self) -> None:
        """End `cut` and `refuse`: connections begin anew, and requests that were held are lost."""
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        """Wait."""
        raise NotImplementedError

    def time(self) -> float:
        """Return the time, in seconds."""
        raise NotImplementedError


def _dotted(settings: dict[str, Any]) -> dict[str, Any]:
    return {name if name == "error_cb" else name.replace("_", "."): value for name, value in settings.items()}


# -- the simulated one


class _SimulatedHeld(Held):
    def __init__(self, world: SimulatedWorld, request: str, client: str, nth: int) -> None:
        self._world = world
        self.request, self.client, self.left = request, client, nth
        self.caught: SimulatedRequest | None = None
        self.is_told = False
        self.is_answered = False

    def fires(self, connection: Connection, request: SimulatedRequest) -> bool:
        if self.caught is not None or not request.name.startswith(self.request) or not self.left:
            return False
        if self.client and connection.client != self.client:
            return False
        self.left -= 1
        return not self.left

    def wait(self) -> None:
        self._world.wait_until(lambda: self.caught is not None)

    def deliver(self) -> None:
        self.is_told = True
        self.pass_on()
        if self.caught is not None:
            self._world.wait_until(lambda: self.is_answered)

    def pass_on(self) -> None:
        if self.caught is None or not self.is_told:
            return
        request = self.caught

        def answered(_: object) -> None:
            self.is_answered = True

        self._world.scheduler.soon(lambda: request.handler(answered))


class SimulatedWorld(World):
    """One simulated broker; the scenario is a task of a process."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        self.network.on_arrival = self._on_arrival
        self.cluster = Cluster(self.scheduler, brokers=1)
        self._held: list[_SimulatedHeld] = []
        self._process: Any = Process(self.scheduler, "application")
        self._process.world = self

    def run(self, scenario: Callable[[World], Any]) -> Any:
        """Return a scenario's outcome."""
        result: list[Any] = []

        def work() -> None:
            try:
                result.append((scenario(self), None))
            except Exception as error:
                result.append((None, error))

        self._process.spawn(work, "scenario")
        self.scheduler.run(_RUN_SECONDS, lambda: bool(result))
        if not result:
            raise TimeoutError("the scenario did not end")
        outcome, error = result[0]
        if error is not None:
            raise error
        return outcome

    def _make(self, kind: str, settings: dict[str, Any]) -> Any:
        return getattr(clients, kind)(settings)

    def hold(self, request: str, client: str = "", *, nth: int = 1) -> Held:
        held = _SimulatedHeld(self, request, client, nth)
        self._held.append(held)
        return held

    def _on_arrival(self, connection: Connection, request: SimulatedRequest) -> bool:
        held = next((each for each in self._held if each.fires(connection, request)), None)
        if held is None:
            return False
        held.caught = request
        self.network.break_connection(connection)
        held.pass_on()
        return True

    def cut(self, passes: str = "") -> None:
        self.network.sever(self._process, self.cluster.brokers[0], Cut(passes))

    def hang(self) -> None:
        self.network.sever(self._process, self.cluster.brokers[0], Cut(is_hung=True))

    def go_on(self) -> None:
        self.network.mend(self._process, self.cluster.brokers[0])

    def refuse(self) -> None:
        self.cluster.brokers[0].is_up = False
        self.network.break_some(lambda _: True)

    def mend(self) -> None:
        self.cluster.brokers[0].is_up = True
        self.network.break_some(lambda _: True)
        self.network.mend(self._process, self.cluster.brokers[0])

    def sleep(self, seconds: float) -> None:
        current().wait(seconds)

    def time(self) -> float:
        return self.scheduler.now


# -- the real one


class _RealHeld(Held):
    def __init__(self, trap: Any) -> None:
        self._trap = trap

    def wait(self) -> None:
        assert self._trap.wait_until_held(PATIENCE_SECONDS), "no such request came"

    def deliver(self) -> None:
        self._trap.deliver()
        if self._trap.request is not None:
            assert self._trap.wait_until_answered(PATIENCE_SECONDS), "no answer came"


class RealWorld(World):
    """A real broker, reached through a proxy."""

    def __init__(self, proxy: FrameProxy) -> None:
        super().__init__()
        self._proxy = proxy
        self._suffix = uuid.uuid4().hex[:8]

    def run(self, scenario: Callable[[World], Any]) -> Any:
        """Return a scenario's outcome."""
        try:
            return scenario(self)
        finally:
            self.close()

    def name(self, what: str) -> str:
        return f"{what}-{self._suffix}"

    def producer(self, name: str = "", transactional_id: str = "", **settings: Any) -> Any:
        return super().producer(name, self.name(transactional_id) if transactional_id else "", **settings)

    def _make(self, kind: str, settings: dict[str, Any]) -> Any:
        makes = {"Producer": make_producer, "Consumer": make_consumer, "AdminClient": make_admin}
        return makes[kind]({"bootstrap.servers": self._proxy.bootstrap, **settings})

    def close(self) -> None:
        """End all clients."""
        for client in self._clients:
            if isinstance(client, Producer):
                discard(client)
            elif isinstance(client, Consumer):
                with suppress(RuntimeError):  # it is closed
                    client.close()
        self._clients.clear()

    def hold(self, request: str, client: str = "", *, nth: int = 1) -> Held:
        kind, _, end = request.partition(" ")
        commits = {"commit": True, "abort": False, "": None}[end]

        def is_of(each: Request) -> bool:
            return not client or each.client_id == client

        return _RealHeld(self._proxy.hold(Match(Api[kind], commits=commits, where=is_of, nth=nth)))

    def cut(self, passes: str = "") -> None:
        self._proxy.cut(drop=True, only=Direction.ANSWERS if passes else None)

    def hang(self) -> None:
        self._proxy.cut()

    def go_on(self) -> None:
        self._proxy.restore()

    def refuse(self) -> None:
        self._proxy.reset()

    def mend(self) -> None:
        self._proxy.reset()
        self._proxy.restore()
        self._proxy.resume()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def time(self) -> float:
        return time.monotonic()
