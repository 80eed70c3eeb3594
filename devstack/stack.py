"""Postgres and Kafka together, in one directory."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from devstack.broker import Broker
from devstack.cluster import KafkaCluster
from devstack.embedded import EmbeddedBroker
from devstack.errors import BrokerUnavailableError, DevstackError
from devstack.jars import Report, kafka_jars
from devstack.java import find_java
from devstack.kafka import KafkaBroker
from devstack.postgres import Postgres

FORCE_EMBEDDED = "OUTBOX_DEVSTACK_EMBEDDED"
_MEMORY = Path("/dev/shm")  # noqa: S108  # where making and dropping a database takes a quarter of the time
_MEMORY_BYTES = 4 << 30  # several times what all tests need


class DevStack:
    """A Postgres server and a Kafka broker. As a context manager, started and stopped.

    Its processes do not belong to ours: another `DevStack` of the same directory finds them running and takes them
    over. `start` leaves running services alone.

    Args:
        directory: Data, logs and pids; kept by `stop`. None: a temporary one, removed by `stop`.
        embedded: True for the embedded broker; False for the real one or an error; None for the real one if Java and
            the jars can be had and `OUTBOX_DEVSTACK_EMBEDDED=1` is not set, else the embedded one.
        brokers: 1, or 3 for a cluster with replication factor 3, which is always of real brokers; None for as many as
            run, else 1.
        small: Spare the machine, for tests: see `Postgres` and `KafkaBroker`. A temporary directory is in memory if
            there is room.
        report: Called with each step that takes long, and with the choice of the broker.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        embedded: bool | None = None,
        *,
        brokers: Literal[1, 3] | None = None,
        small: bool = False,
        report: Report = lambda _: None,
    ) -> None:
        self._temporary = directory is None
        self.directory = _temporary_directory(small) if directory is None else Path(directory).absolute()
        self._embedded = embedded
        self._report = report
        self.postgres = Postgres(self.directory / "postgres", small=small)
        self._real = KafkaBroker(self.directory / "kafka", small=small, report=report)
        self._cluster = KafkaCluster(self.directory / "cluster", report=report)
        self._mock = EmbeddedBroker(self.directory / "embedded")
        self._brokers = brokers
        self._kafka: Broker | None = self._running_broker()

    @property
    def kafka(self) -> Broker:
        """Return the broker that `start_kafka` has chosen or found running."""
        if self._kafka is None:
            raise DevstackError(f"no broker was started in {self.directory}")
        return self._kafka

    @property
    def is_running(self) -> bool:
        """Tell whether both services run."""
        return self.postgres.is_running and self.is_broker_running

    @property
    def is_broker_running(self) -> bool:
        """Tell whether a broker runs, real or embedded."""
        return self._running_broker() is not None

    def start(self) -> None:
        """Start both services and wait until both answer; stop them if one fails, or on Ctrl-C."""
        with self._lock():
            had_postgres = self.postgres.is_running
            try:
                self._start_postgres()
                self._start_kafka()
            except BaseException:
                if not had_postgres:
                    self.postgres.stop()
                raise

    def start_postgres(self) -> None:
        """Start Postgres alone."""
        with self._lock():
            self._start_postgres()

    def start_kafka(self) -> None:
        """Choose a broker and start it alone."""
        with self._lock():
            self._start_kafka()

    def real_broker_problem(self) -> str | None:
        """Return the obstacle to a real broker, or None; downloads Kafka's jars the first time."""
        running = self._running_broker()
        if running is not None:
            return f"in {self.directory} runs the {running.description}" if running.is_embedded else None
        if self._embedded is None and os.environ.get(FORCE_EMBEDDED) == "1":
            return f"{FORCE_EMBEDDED}=1 asks for the embedded one"
        try:
            kafka_jars(find_java(), self._report)
        except BrokerUnavailableError as missing:
            return str(missing)
        return None

    def stop(self) -> None:
        """Stop the services, and remove a temporary directory."""
        with self._lock():
            self._real.stop()
            self._cluster.stop()
            self._mock.stop()
            self.postgres.stop()
        if self._temporary:
            self.postgres.remove()
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_postgres(self) -> None:
        if not self.postgres.is_running:
            self._report("starting Postgres")
        self.postgres.start()

    def _start_kafka(self) -> None:
        broker = self._running_broker()
        if broker is not None and not self._is_wanted(broker):
            raise DevstackError(f"in {self.directory} runs the {broker.description}; stop it first")
        self._kafka = broker or self._choose_broker()
        if broker is None:
            self._report("starting Kafka")
        self._kafka.start()

    def _running_broker(self) -> Broker | None:
        brokers: tuple[Broker, ...] = (self._real, self._cluster, self._mock)
        return next((broker for broker in brokers if broker.is_running), None)

    def _is_wanted(self, broker: Broker) -> bool:
        is_cluster = broker is self._cluster
        return self._embedded in (None, broker.is_embedded) and self._brokers in (None, 3 if is_cluster else 1)

    def _choose_broker(self) -> Broker:
        if self._brokers == len(self._cluster.brokers):
            self._report(f"Kafka: {self._cluster.description}, on {find_java()}")
            return self._cluster
        problem = None if self._embedded else self.real_broker_problem()
        if problem and self._embedded is False:
            raise BrokerUnavailableError(problem)
        if self._embedded or problem:
            self._report(f"Kafka: {self._mock.description}, because: {problem or 'asked for'}")
            return self._mock
        self._report(f"Kafka: {self._real.description}, on {find_java()}")
        return self._real

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let two starts of one directory wait for each other."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def _temporary_directory(small: bool) -> Path:
    in_memory = small and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES
    directory = Path(tempfile.mkdtemp(prefix="kafka-outbox-", dir=_MEMORY if in_memory else None))
    directory.chmod(0o711)  # Postgres may run as another user
    return directory
