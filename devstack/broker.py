"""The common interface of the real and the embedded broker, and the proof that one of them works."""

import logging
import time
from typing import Any, Protocol, Self

from confluent_kafka import Consumer, KafkaException, Producer

from devstack.errors import DevstackError
from devstack.proxy import Direction

PROBE_TOPIC = "devstack-probe"


class Proxy(Protocol):
    """A proxy between clients and a broker, or all brokers of a cluster."""

    @property
    def bootstrap(self) -> str:
        """Return host and port to connect to."""
        ...

    def start(self) -> Self:
        """Begin to accept connections."""
        ...

    def stop(self) -> None:
        """Close everything."""
        ...

    def cut(self, *, drop: bool = False, only: Direction | None = None) -> None:
        """Become a black hole, in both directions or one."""
        ...

    def slow(self, seconds: float) -> None:
        """Become slow."""
        ...

    def restore(self) -> None:
        """End `cut` and `slow`."""
        ...

    def reset(self) -> None:
        """Break connections and refuse new ones."""
        ...

    def resume(self) -> None:
        """End `reset`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Broker(Protocol):
    """A Kafka broker that can be started, found and ended."""

    @property
    def is_embedded(self) -> bool:
        """Tell whether this is the mock cluster, which has no transactions, no admin requests and no memory."""
        ...

    @property
    def is_running(self) -> bool:
        """Tell whether the broker's process is alive."""
        ...

    @property
    def pid(self) -> int | None:
        """Return the pid of that process, or None."""
        ...

    @property
    def bootstrap(self) -> str:
        """Return host and port to connect to."""
        ...

    @property
    def description(self) -> str:
        """Describe it, for a header line."""
        ...

    def start(self) -> None:
        """Start it and wait until it works."""
        ...

    def stop(self) -> None:
        """End it; does nothing if it does not run."""
        ...

    def kill(self) -> None:
        """End it with SIGKILL."""
        ...

    def restart(self) -> None:
        """Start it again on the same ports and data."""
        ...

    def proxied(self, number: int) -> Proxy:
        """Return a proxy through which clients reach the broker and stay behind it."""
        ...


class BrokerProbe:
    """A test whether a broker answers, takes records and can form a consumer group.

    Args:
        bootstrap: The broker.
    """

    def __init__(self, bootstrap: str) -> None:
        self._config: dict[str, Any] = {"bootstrap.servers": bootstrap, "logger": silent_logger(), "log_level": 0}

    def answers(self) -> bool:
        """Tell whether the broker answers a request for metadata within two seconds."""
        try:
            Producer(self._config).list_topics(timeout=2)
        except KafkaException:
            return False
        return True

    def round_trip(self, timeout: float = 30) -> None:
        """Produce a record and receive it as a member of a group.

        Raises:
            DevstackError: That did not work within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        producer = Producer(self._config | {"linger.ms": 0})
        producer.list_topics(PROBE_TOPIC, timeout=timeout)
        producer.produce(PROBE_TOPIC, b"ready?")
        if producer.flush(timeout):
            raise DevstackError(f"the broker answers but took no record within {timeout:.0f} s")
        consumer = Consumer(self._config | {"group.id": PROBE_TOPIC, "auto.offset.reset": "earliest"})
        try:
            consumer.subscribe([PROBE_TOPIC])
            while True:
                message = consumer.poll(0.2)
                if message is not None and message.error() is None:
                    return
                if time.monotonic() > deadline:
                    raise DevstackError(f"the broker formed no consumer group within {timeout:.0f} s")
        finally:
            consumer.close()


def silent_logger() -> logging.Logger:
    """Return a logger without output: while a broker starts, refused connections are normal."""
    logger = logging.getLogger("devstack.probe")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return logger
