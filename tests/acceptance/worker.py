"""A harvester process for the fault tests: `python -m tests.acceptance.worker SETTINGS`, with `Settings` as JSON.

It runs the real `Harvester` and keeps a journal, JSON lines stamped on the clock of leases, which all processes of a
machine share. Lines are written at once, so a process that is killed leaves a complete journal:

    LeaderAcquired   {leader_id, deadline}          LeaderRefreshed, LeaderRevoked, LeaderFenced   {leader_id}
    lease            {leader_id, deadline}          the lease was renewed (looked up often, not at every renewal)
    sent, delivered  {}                             the first record of a leadership was sent, was acknowledged
    stray            {lease}                        a record was sent without a valid lease

Faults on demand: some `produce` calls raise, some delivery reports of delivered records say that they failed, all
of them come late, and the elector may let every process lead.
"""

import json
import logging
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException

from outbox_core.cli.signals import stop_on_signals
from outbox_core.config import HarvestConfig
from outbox_core.election import Leadership, now
from outbox_core.events import Event, LeaderAcquired, LeaderRevoked, MeterRead
from outbox_core.harvest import Harvester
from outbox_core.kafka.clients import make_producer

_LEASE_LOOKUP_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a worker.

    Attributes:
        name: of the process; its database sessions are called `kafka-outbox <name>`.
        dsn: the database.
        bootstrap: the broker.
        table: the outbox table.
        journal: path of its journal.
        always_leads: whether the elector lets it lead without an election.
        refused: share of `produce` calls that raise.
        misreported: share of delivery reports that say failed although the record was delivered.
        report_delay: seconds by which delivery reports come late.
        limits: as in `HarvestConfig.limits`.
    """

    name: str
    dsn: str
    bootstrap: str
    table: str
    journal: str
    always_leads: bool = False
    refused: float = 0.0
    misreported: float = 0.0
    report_delay: float = 0.0
    limits: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def harvest_config(self) -> HarvestConfig:
        return HarvestConfig(
            data_source=self.dsn,
            outbox_table=self.table,
            base_kafka_config={"bootstrap.servers": self.bootstrap},
            name=self.name,
            limits=self.limits,
        )


class Journal:
    """An append-only file of JSON lines, written from any thread without a buffer."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, event: str, **more: object) -> None:
        os.write(self._file, (json.dumps({"at": now(), "event": event, **more}) + "\n").encode())


class AlwaysLeads:
    """An elector that lets every process lead until it stops."""

    failure = None

    def __init__(self, on_event: Any) -> None:
        self._on_event = on_event
        self._leader_id = uuid4()
        self._stopped = False

    @property
    def leadership(self) -> Leadership | None:
        return None if self._stopped else Leadership(self._leader_id, 1, now() + 60)

    def start(self) -> None:
        self._on_event(LeaderAcquired(self._leader_id, 1))

    def stop(self) -> None:
        if not self._stopped:
            self._on_event(LeaderRevoked(self._leader_id))
            self._stopped = True


class Worker:
    """The harvester with its journal. Its parts read each other's `is_fresh` only for the first-record notes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.journal = Journal(settings.journal)
        self._config = settings.harvest_config()
        self.harvester = Harvester(
            self._config,
            self._on_event,
            elector_factory=AlwaysLeads if settings.always_leads else None,
            producer_factory=self._make_producer,
        )
        self.awaits_send = self.awaits_delivery = False

    @property
    def lease(self) -> Leadership | None:
        ctx = self.harvester._ctx
        return ctx.elector.leadership if ctx is not None else None

    @property
    def refuses(self) -> bool:
        return random.random() < self._settings.refused

    @property
    def misreports(self) -> bool:
        return random.random() < self._settings.misreported

    def run(self) -> None:
        with stop_on_signals(self.harvester.stop):
            threading.Thread(target=self._watch_lease, daemon=True).start()
            self.harvester.start()
            self.harvester.join()
        self.journal.note("end")

    def _make_producer(self) -> Any:
        return WatchedProducer(self, make_producer(self._config.producer_settings()), self._settings.report_delay)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MeterRead):
            return
        details: dict[str, Any] = {"leader_id": str(event.leader_id)}
        if isinstance(event, LeaderAcquired):
            lease = self.lease
            details["deadline"] = lease.deadline if lease is not None else 0.0
            self.awaits_send = self.awaits_delivery = True
        self.journal.note(type(event).__name__, **details)

    def _watch_lease(self) -> None:
        noted = 0.0
        while True:
            lease = self.lease
            if lease is not None and lease.deadline != noted:
                noted = lease.deadline
                if not self._settings.always_leads:
                    self.journal.note("lease", leader_id=str(lease.leader_id), deadline=noted)
            threading.Event().wait(_LEASE_LOOKUP_SECONDS)


class WatchedProducer:
    """A producer that notes records sent without a lease, lets some records fail, and may report late."""

    def __init__(self, worker: Worker, producer: Any, report_delay: float) -> None:
        self._worker = worker
        self._producer = producer
        self._report_delay = report_delay
        self._late: deque[tuple[float, Callable[[], None]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def poll(self, timeout: float) -> None:
        self._producer.poll(0 if self._late else timeout)
        self._report_late(timeout)

    def flush(self, timeout: float) -> None:
        self._producer.flush(timeout)
        self._report_late(timeout)

    def _report_late(self, timeout: float) -> None:
        if self._late and self._late[0][0] > now():
            time.sleep(min(timeout, max(0.0, self._late[0][0] - now())))
        while self._late and self._late[0][0] <= now():
            _, report = self._late.popleft()
            report()

    def produce(self, *arguments: Any, on_delivery: Any, **more: Any) -> None:
        worker = self._worker
        lease = worker.lease
        if lease is None or now() >= lease.deadline:
            worker.journal.note("stray", lease=lease.deadline if lease else None)
        if worker.refuses:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "injected: refused"))

        def report(error: Any, message: Any) -> None:
            if error is None and worker.awaits_delivery:
                worker.awaits_delivery = False
                worker.journal.note("delivered")
            if error is None and worker.misreports:
                error = KafkaError(KafkaError._TIMED_OUT, "injected: misreported")
            if self._report_delay:
                self._late.append((now() + self._report_delay, partial(on_delivery, error, message)))
            else:
                on_delivery(error, message)

        self._producer.produce(*arguments, on_delivery=report, **more)
        if worker.awaits_send:
            worker.awaits_send = False
            worker.journal.note("sent")


def main() -> None:
    """Harvest until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("outbox_core.election").setLevel(logging.DEBUG)
    Worker(Settings.from_json(sys.argv[1])).run()


if __name__ == "__main__":
    main()
