"""A harvester process for the chaos suite: `python -m tests.chaos.worker SETTINGS`, with `WorkerSettings` as JSON.

It runs the real `Harvester` and keeps a journal (`tests.acceptance.worker.Journal`):

    LeaderAcquired, LeaderRefreshed, LeaderRevoked, LeaderFenced   {leader_id}
    committed    {count}     transactions committed so far, now and then
    failpoint    {what}      a failpoint springs
    unavailable  {error}     it could not start, as a service is away; it tries again
    failed       {error}     the harvester ended by itself: exit code 1

Its stdin arms failpoints (`tests.chaos.failpoints`), `off` disarms; at the end of stdin, when the test that started it
is gone, the process ends itself. At SIGUSR1 it prints the stacks of its threads.
"""

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, Self

from outbox_core.cli.signals import stop_on_signals
from outbox_core.config import HarvestConfig
from outbox_core.election import now
from outbox_core.errors import OutboxError
from outbox_core.events import Event, MeterRead
from outbox_core.harvest import Harvester
from outbox_core.kafka.clients import make_producer
from outbox_core.kafka.identity import Failpoint
from outbox_core.stores.postgres.store import PostgresStore
from tests.acceptance.worker import AlwaysLeads, Journal
from tests.chaos import breaches
from tests.chaos.failpoints import VARIABLE, ArmedFailpoint, Trap

_START_AGAIN_SECONDS = 0.5
_COUNT_NOTED_SECONDS = 0.25

_NO_NEW_EPOCH = ("outbox_core.kafka.identity", "RecordProducer", "TrustsItsEpoch")
_NO_OPENING = ("outbox_core.harvest.exactly_once.terms", "Term", "TakesTransactionsForWhole")
BREACHES = {
    "rule-7": [_NO_NEW_EPOCH],
    "rule-8": [_NO_OPENING],
    "rules-7-and-8": [_NO_NEW_EPOCH, _NO_OPENING],
}
"""Rules that a run can switch off: (module, name there, class of `tests.chaos.breaches`).

Rule 7 is R13 of docs/explanation-exactly-once.md, rule 8 is R14 with the order of R1.
"""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker.

    Attributes:
        name: of the process.
        dsn: the database.
        bootstrap: the broker.
        table: the outbox table.
        journal: path of its journal.
        delivery: as in `HarvestConfig`.
        always_leads: whether the elector lets it lead without an election.
        kafka: more librdkafka settings.
        limits: as in `HarvestConfig.limits`.
        traps: whether it has failpoints; without them store and producer are those that the product makes.
        breach: a rule that it breaks, one of `BREACHES`; '' for none.
    """

    name: str
    dsn: str
    bootstrap: str
    table: str
    journal: str
    delivery: str
    always_leads: bool = False
    kafka: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    traps: bool = True
    breach: str = ""

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def harvest_config(self) -> HarvestConfig:
        return HarvestConfig(
            data_source=self.dsn,
            outbox_table=self.table,
            base_kafka_config={"bootstrap.servers": self.bootstrap, **self.kafka},
            name=self.name,
            delivery=self.delivery,
            notify=True,
            limits=self.limits,
        )


class Worker:
    """The harvester with its journal and its failpoints."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._config = settings.harvest_config()
        self._journal = Journal(settings.journal)
        self._trap = Trap(lambda failpoint: self._journal.note("failpoint", what=str(failpoint)))
        self._stopping = threading.Event()
        self._harvester: Harvester | None = None
        self._committed = 0
        self._noted_at = 0.0
        if os.environ.get(VARIABLE):
            self._trap.arm(ArmedFailpoint.parse(os.environ[VARIABLE]))

    def run(self) -> None:
        threading.Thread(target=self._obey, daemon=True).start()
        with stop_on_signals(self._stop):
            try:
                self._start()
                if self._harvester is not None:
                    self._harvester.join()
            except OutboxError as error:
                self._journal.note("failed", error=f"{type(error).__name__}: {error}")
                raise
        self._note_committed()
        self._journal.note("end")

    def _start(self) -> None:
        """Start a harvester, again and again while Kafka or the database is away, as a supervisor would."""
        while not self._stopping.is_set():
            harvester = self._make_harvester()
            try:
                harvester.start()
            except OutboxError as error:
                self._journal.note("unavailable", error=f"{type(error).__name__}: {error}")
                self._stopping.wait(_START_AGAIN_SECONDS)
                continue
            self._harvester = harvester
            if self._stopping.is_set():
                harvester.stop()
            return

    def _stop(self) -> None:
        self._stopping.set()
        if self._harvester is not None:
            self._harvester.stop()

    def _make_harvester(self) -> Harvester:
        config, trap, traps = self._config, self._trap, self._settings.traps
        at_least_once = config.delivery == "at-least-once"
        return Harvester(
            config,
            self._on_event,
            elector_factory=AlwaysLeads if self._settings.always_leads else None,
            store_factory=(lambda: TrappedStore(trap, config)) if traps and at_least_once else None,
            producer_factory=(lambda: TrappedProducer(trap, config)) if traps else None,
            reached=self._reached,
        )

    def _reached(self, step: Failpoint) -> None:
        if step is Failpoint.COMMITTED:
            self._committed += 1
            if now() - self._noted_at > _COUNT_NOTED_SECONDS:
                self._note_committed()
        self._trap.reached(step.value)

    def _note_committed(self) -> None:
        self._noted_at = now()
        self._journal.note("committed", count=self._committed)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, MeterRead):
            self._journal.note(type(event).__name__, leader_id=str(event.leader_id))

    def _obey(self) -> None:
        for line in sys.stdin:
            self._trap.arm(ArmedFailpoint.parse(line) if line.strip() != "off" else None)
        while not self._stopping.is_set():  # our test is gone
            os.kill(os.getpid(), signal.SIGKILL)


class TrappedStore(PostgresStore):
    """A store whose marks and purges are steps."""

    def __init__(self, trap: Trap, config: HarvestConfig) -> None:
        super().__init__(config.data_source, config.outbox_table, application_name=f"kafka-outbox {config.name}"[:63])
        self._trap = trap

    def mark(self, *arguments: Any, **limits: Any) -> Any:
        batch = super().mark(*arguments, **limits)
        if batch.records:
            self._trap.reached("after-mark")
        return batch

    def purge(self, *arguments: Any) -> int:
        self._trap.reached("before-purge")
        count = super().purge(*arguments)
        self._trap.reached("after-purge")
        return count


class TrappedProducer:
    """A producer of which every send is a step."""

    def __init__(self, trap: Trap, config: HarvestConfig) -> None:
        self._trap = trap
        self._producer = make_producer(config.producer_settings())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def produce(self, *arguments: Any, **more: Any) -> None:
        self._producer.produce(*arguments, **more)
        self._trap.reached("after-send")


def commit_breach(name: str) -> None:
    """Put the class that breaks a rule in the product's place, in this process."""
    for module, attribute, replacement in BREACHES[name]:
        setattr(import_module(module), attribute, getattr(breaches, replacement))


def main() -> None:
    """Harvest until SIGTERM."""
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = WorkerSettings.from_json(sys.argv[1])
    if settings.breach:
        commit_breach(settings.breach)
    Worker(settings).run()


if __name__ == "__main__":
    main()
