"""The services of a chaos run: Postgres and Kafka of its own, quick to notice faults, with proxies that cut them off.

Every harvester is on a *side*, and has the links of that side: to the brokers, one or three, through the side's
proxies, and to the database through a proxy for its outbox and side. By default there are two sides, which all outboxes
share.
"""

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from devstack.cluster import KafkaCluster, ProxyGroup
from devstack.errors import DevstackError
from devstack.frame_proxy import FrameProxy
from devstack.kafka import KafkaBroker
from devstack.links import Links
from devstack.ports import LOCALHOST
from devstack.postgres import Postgres
from devstack.proxy import TcpProxy
from outbox_core.kafka.clients import NewTopic, make_admin
from tests.services import QUICK

SIDES = 2
_SKIPS = "these partitions are likely deleted already and hence can be skipped"


class Services:
    """Both services with their proxies, in a temporary directory. A context manager.

    Args:
        brokers: 1 or 3.
        cluster: three brokers that run already, with as many sides, and belong to somebody else.
        sides: number of sides.
    """

    def __init__(self, brokers: int = 1, cluster: KafkaCluster | None = None, *, sides: int = SIDES) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kafka-outbox-chaos-"))
        self._directory.chmod(0o711)  # Postgres may run as another user
        self.postgres = Postgres(self._directory / "postgres")
        self._is_borrowed = cluster is not None
        self._sides = sides
        place, options = self._directory / "kafka", {"extra_properties": QUICK, "sides": sides}
        self.kafka: KafkaBroker | KafkaCluster
        if cluster is not None or brokers > 1:
            self.kafka = cluster or KafkaCluster(place, links=True, heap="448m", **options)
        else:
            self.kafka = KafkaBroker(place, heap="640m", small=True, **options)
        self.brokers: list[ProxyGroup] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.callback(shutil.rmtree, self._directory, ignore_errors=True)
            opening.callback(self.postgres.remove)
            opening.callback(self.postgres.stop)
            self.postgres.start()
            if not self._is_borrowed:
                opening.callback(self.kafka.stop)
                self.kafka.start()
            self.brokers = [opening.enter_context(self._proxies(number + 1)) for number in range(self._sides)]
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def has_cluster(self) -> bool:
        """Tell whether there are three brokers."""
        return isinstance(self.kafka, KafkaCluster)

    @property
    def cluster(self) -> KafkaCluster:
        """Return the three brokers."""
        if not isinstance(self.kafka, KafkaCluster):
            raise DevstackError("there is one broker only")
        return self.kafka

    def forgotten_ends(self) -> int:
        """Count how often a broker has ended a transaction without telling its partitions, which had no leader then.

        So does Kafka 4.3 (KAFKA-20734), for example when the only broker was killed and comes back. The records stay
        open, and the next end of a transaction of that producer decides about them, too.
        """
        logs = self.kafka.directory.rglob("kafka.log")
        return sum(log.read_text(errors="replace").count(_SKIPS) for log in logs)

    def frame_proxies(self) -> list[FrameProxy]:
        """Return the frame proxies of all sides."""
        return [proxy for side in self.brokers for proxy in side.of.values()]

    def _proxies(self, number: int) -> ProxyGroup:
        if isinstance(self.kafka, KafkaCluster):
            return self.kafka.proxied(number)
        return ProxyGroup({1: self.kafka.frame_proxied(number)})

    def links(self, sides: Sequence[int]) -> list[Links]:
        """Return the links of an outbox's harvesters, on these sides; the ways to the database are not started yet."""
        return [Links(self.brokers[side], TcpProxy(LOCALHOST, self.postgres.port)) for side in sides]

    def through(self, proxy: TcpProxy) -> str:
        """Return the database's URL through a proxy."""
        return self.postgres.dsn.replace(f":{self.postgres.port}/", f":{proxy.port}/")

    def make_topics(self, names: list[str], partitions: int, config: dict[str, str] | None = None) -> None:
        """Create topics."""
        admin = make_admin({"bootstrap.servers": self.kafka.bootstrap})
        factor = 3 if self.has_cluster else 1
        asked = [
            NewTopic(name, num_partitions=partitions, replication_factor=factor, config=config or {}) for name in names
        ]
        for future in admin.create_topics(asked, operation_timeout=10).values():
            future.result(timeout=30)
