"""The services of a chaos run: Postgres and Kafka of its own, quick to notice faults, with proxies that cut them off.

Every harvester is on one of two *sides*. The sides reach the broker through a proxy each, and every outbox reaches the
database through one for each side.
"""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from devstack.kafka import KafkaBroker
from devstack.ports import LOCALHOST
from devstack.postgres import Postgres
from devstack.proxy import TcpProxy
from outbox_core.kafka import NewTopic, make_admin

SIDES = 2
_QUICK = {
    # Later than a broker needs to come back: while it is fenced, its coordinator takes the partitions of a transaction
    # that has timed out for deleted, skips their markers and leaves the transaction open for ever ("Couldn't find
    # leader endpoint for partitions"; Kafka 4.3.1). No client can mend that.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "3000",
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
}


class Services:
    """Both services with their proxies, in a temporary directory. A context manager."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kafka-outbox-chaos-"))
        self._directory.chmod(0o711)  # Postgres may run as another user
        self.postgres = Postgres(self._directory / "postgres")
        self.kafka = KafkaBroker(self._directory / "kafka", extra_properties=_QUICK, heap="640m")
        self.brokers: list[TcpProxy] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.callback(shutil.rmtree, self._directory, ignore_errors=True)
            opening.callback(self.postgres.remove)
            opening.callback(self.postgres.stop)
            opening.callback(self.kafka.stop)
            self.postgres.start()
            self.kafka.start()
            self.brokers = [opening.enter_context(self.kafka.proxied(number + 1)) for number in range(SIDES)]
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def database_proxies(self) -> list[TcpProxy]:
        """One for each side, for one outbox; to be started."""
        return [TcpProxy(LOCALHOST, self.postgres.port) for _ in range(SIDES)]

    def through(self, proxy: TcpProxy) -> str:
        """The database's URL through a proxy."""
        return self.postgres.dsn.replace(f":{self.postgres.port}/", f":{proxy.port}/")

    def make_topics(self, names: list[str], partitions: int) -> None:
        """Create topics."""
        admin = make_admin({"bootstrap.servers": self.kafka.bootstrap})
        asked = [NewTopic(name, num_partitions=partitions, replication_factor=1) for name in names]
        for future in admin.create_topics(asked, operation_timeout=10).values():
            future.result(timeout=30)
