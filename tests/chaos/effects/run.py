"""A run: tasks and records, workers and consumers that suffer faults, and the verdict on every effect.

What happens to single tries is drawn in the processes (`misfortunes`); what happens to processes and connections, here:
kinds of faults are dealt like cards, all of them before any comes again, and are spread over the work.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

from devstack.ports import LOCALHOST
from devstack.processes import wait_until
from devstack.proxy import TcpProxy
from outbox_queue import QueueConfig
from outbox_queue.operations.stats import queue_stats
from tests.chaos.effects.consumer import GROUP
from tests.chaos.effects.crew import Crew, Role
from tests.chaos.effects.misfortunes import Place, happened, read_journals
from tests.chaos.effects.project import AGES
from tests.chaos.effects.report import Report
from tests.chaos.effects.verdict import Call, Evidence, Run, judge
from tests.chaos.process import CHECKOUT
from tests.chaos.services import Services

PROJECT = "tests.chaos.effects.project"
QUEUE = "default"
CONCURRENCY = 8
_PARTITIONS = 12
_GIVEN_BACK = "the attempt does not count"
_SENT_TWICE, _WITHOUT_ID = 0.01, 0.1
_LONGEST_GAP_SECONDS = 60.0
_QUIET_SECONDS = 120.0
_DECK = (
    *("kill worker", "kill consumer", "kill harvester", "leave worker", "leave consumer"),
    *("end a session",) * 4,
    *("end all sessions", "cut", "reset") * 2,
)
_SESSIONS = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND application_name IN ('effects-worker', 'effects-consumer')
"""
_IS_OPEN = "state LIKE 'idle in transaction%'"
_TABLES = """
    CREATE TABLE effect (value text, origin text);
    CREATE TABLE orders (number int PRIMARY KEY); INSERT INTO orders VALUES (1);
    CREATE TABLE committed (number int PRIMARY KEY, id text)
"""


class EffectsRun:
    """One run. A context manager; `run` may be called once.

    Args:
        services: its services, which no other run uses meanwhile.
        name: of its database and topics.
        seed: of faults and misfortunes.
        tasks: number of tasks.
        records: number of records.
        directory: for journals, logs and the report.
        say: called with a line of progress.
    """

    def __init__(
        self,
        services: Services,
        *,
        name: str,
        seed: int,
        tasks: int,
        records: int,
        directory: Path,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._services = services
        self._name, self._seed, self._tasks, self._records = name, seed, tasks, records
        self._directory, self._say = directory, say
        self._random = random.Random(seed)
        self._faults: Counter[str] = Counter()
        self._topic = f"{name}-records"
        self._queue = {
            "bootstrap_servers": services.kafka.bootstrap,
            "message_topic": f"{name}-messages",
            "message_partitions": 8,
            "marker_topic": f"{name}-markers",
            "dead_letter_topic": f"{name}-dead-letters",
            "redelivery_timeout": "10s",
            "max_attempts": 10,
            "kafka": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1500},
        }
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self._make_topics()
            self._url = self._services.postgres.create_database(self._name)
            opening.callback(self._services.postgres.drop_database, self._name)
            self._proxy = opening.enter_context(TcpProxy(LOCALHOST, self._services.postgres.port))
            self._looker = Consumer({"bootstrap.servers": self._services.kafka.bootstrap, "group.id": GROUP})
            opening.callback(self._looker.close)
            self._place = Place("", str(self._directory), self._seed, self._url)
            self._command("migrate", "--verbosity=0").check_returncode()
            self._execute(_TABLES)
            self._crew = Crew(list(self._roles()), self._place)
            opening.callback(self._crew.kill_all)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, faults: int, patience: float) -> Report:
        """Send and enqueue, let faults happen until all is done, and judge.

        Args:
            faults: their number, spread over the work; those that are left when it is done follow at once.
            patience: seconds, after which the rest is left, and told as such.
        """
        begun = time.monotonic()
        sent = self._send()
        self._crew.fill()
        enqueuing = threading.Thread(target=self._enqueue, daemon=True)
        enqueuing.start()
        self._let_faults_happen(faults, begun, begun + patience, enqueuing)
        enqueuing.join(_QUIET_SECONDS)
        wait_until(lambda: not any(self._left().values()), timeout=_QUIET_SECONDS, interval=1)
        left = self._left()
        self._crew.end()
        left["tasks that were not enqueued"] = self._tasks - self._number("SELECT count(*) FROM committed")
        return self._report(time.monotonic() - begun, sent, left)

    # -- load

    def _send(self) -> set[str]:
        """Send all records, a few of them twice, and some without an id; return their names."""
        producer = Producer({"bootstrap.servers": self._services.kafka.bootstrap, "linger.ms": 50})
        for number in range(self._records):
            is_nameless = self._random.random() < _WITHOUT_ID
            headers = None if is_nameless else [("outbox-id", f"effects.public.outbox:{number}")]
            times = 1 + (not is_nameless and self._random.random() < _SENT_TWICE)
            for _ in range(times):
                partition = self._random.randrange(_PARTITIONS)  # two consumers may get the same id at once
                producer.produce(self._topic, f"record-{number}", partition=partition, headers=headers)
            producer.poll(0)
            if number % 10_000 == 0:
                producer.flush(60)
        if producer.flush(60):
            raise AssertionError("records were not delivered")
        return {f"record-{number}" for number in range(self._records)}

    def _enqueue(self) -> None:
        self._command("enqueue", str(self._tasks), name="enqueuing").check_returncode()

    # -- faults

    def _let_faults_happen(self, number: int, begun: float, until: float, enqueuing: threading.Thread) -> None:
        """Do so many, each when its share of the work is done, or after a while; return when all work is done."""
        left = self._unfinished()
        whole = sum(left.values())
        since = told = begun
        for done, kind in zip(range(1, number + 1), self._kinds(), strict=False):
            while sum(left.values()) > whole * (1 - done / (number + 1)):
                if time.monotonic() > min(until, since + _LONGEST_GAP_SECONDS):
                    break
                time.sleep(self._random.uniform(0.2, 1))
                self._crew.fill()
                left = self._unfinished()
            if time.monotonic() > until:
                return
            self._suffer(kind)
            self._crew.fill()
            since = time.monotonic()
            if since - told > 10:
                told = since
                self._say(f"{told - begun:5.0f} s  {self._faults.total():4d} faults  {left}")
        while time.monotonic() < until and (enqueuing.is_alive() or any(self._unfinished().values())):
            self._crew.fill()
            time.sleep(1)

    def _kinds(self) -> Iterator[str]:
        while True:
            yield from self._random.sample(_DECK, len(_DECK))

    def _suffer(self, kind: str) -> None:
        what, _, whom = kind.partition(" ")
        draw = self._random.randrange(1000)
        if what == "kill":
            self._crew.kill(whom, draw)
        elif what == "leave":
            self._crew.leave(whom, draw)
        elif what == "end":
            limit = "" if whom == "all sessions" else "ORDER BY random() LIMIT 1"
            self._execute(f"SELECT pg_terminate_backend(pid) FROM ({_SESSIONS} {limit}) AS session")
        elif what == "cut":
            self._proxy.cut()
            time.sleep(self._random.uniform(0.1, 2))
            self._proxy.restore()
        else:
            self._proxy.reset()
            time.sleep(self._random.uniform(0, 2))
            self._proxy.resume()
        self._faults[kind] += 1

    # -- what is left

    def _unfinished(self) -> dict[str, int]:
        """Count what is to be done: an upper bound of the records, the tasks."""
        done = self._number("SELECT count(*) FROM outbox_task_result WHERE status IN ('SUCCESSFUL', 'FAILED')")
        return {"records": self._behind(), "tasks": self._tasks - done}

    def _left(self) -> dict[str, int]:
        (stats,) = queue_stats(QueueConfig(**self._queue), QUEUE)
        return {
            "records behind the group's offsets": self._behind(),
            "rows in the outbox": self._number("SELECT count(*) FROM outbox"),
            "messages that wait": stats.waiting,
            "messages in progress": stats.in_progress,
            "dead letters": stats.dead_letters,
            "open transactions": self._number(f"SELECT count(*) FROM ({_SESSIONS} AND {_IS_OPEN}) AS session"),
        }

    def _behind(self) -> int:
        """Count the records behind the offsets that the group has committed."""
        partitions = [TopicPartition(self._topic, number) for number in range(_PARTITIONS)]
        behind = 0
        for partition in self._looker.committed(partitions, timeout=30):
            _, end = self._looker.get_watermark_offsets(partition, timeout=30)
            behind += end - max(0, partition.offset)
        return behind

    # -- the verdict

    def _report(self, seconds: float, sent: set[str], left: dict[str, int]) -> Report:
        notes = read_journals(self._directory)
        of_kind = {kind: [] for kind in ("run", "done", "call", "error", "unexpected")}
        for process, (kind, *words) in notes:
            of_kind[kind].append((process, words))
        left["errors that nothing explains"] = len(of_kind["unexpected"])
        calls = [Call(name, int(handled), int(repeats)) for _, (name, _, handled, repeats) in of_kind["call"]]
        done = {(process, number) for process, (number,) in of_kind["done"]}
        runs = [
            Run(task, worker, process, is_done=(process, number) in done)
            for process, (number, task, worker) in of_kind["run"]
        ]
        logs = {path.stem: path.read_text(errors="replace") for path in self._directory.glob("worker-*.log")}
        evidence = Evidence(
            records=sent,
            committed=dict(self._rows("SELECT number, id FROM committed")),
            effects=self._rows("SELECT value, origin FROM effect"),
            accepted=dict(self._rows("SELECT source, count(*) FROM inbox GROUP BY source")),
            results={
                key: (status, workers)
                for key, status, workers in self._rows("SELECT id, status, worker_ids FROM outbox_task_result")
            },
            runs=runs,
            calls=calls,
            killed=self._crew.killed,
            given_back={name: text.count(_GIVEN_BACK) for name, text in logs.items()},
            left=left,
        )
        problems = judge(evidence, GROUP, CONCURRENCY)
        if self._crew.failures:
            problems["processes that ended by themselves"] = self._crew.failures
        times = Counter(run.task for run in runs)
        return Report(
            seed=self._seed,
            seconds=seconds,
            tasks=len(evidence.committed),
            records=len(sent),
            runs=len(runs),
            retried=sum(number > 1 for number in times.values()),
            calls=len(calls),
            handled=sum(call.handled for call in calls),
            repeats=sum(call.repeats for call in calls),
            errors=dict(Counter(f"{form} {error}" for _, (_, form, error) in of_kind["error"])),
            given_back=sum(evidence.given_back.values()),
            misfortunes=dict(happened(self._directory)),
            faults=dict(self._faults),
            problems=problems,
        )

    # -- parts

    def _roles(self) -> Iterator[Role]:
        through = self._services.through(self._proxy).rpartition("/")[0] + f"/{self._name}"
        of_worker = self._environment(through, "effects-worker")
        of_consumer = self._environment(through, "effects-consumer")
        assignor = ("range", "cooperative-sticky")[self._seed % 2]
        ages = [of_worker | {"TEST_AGE": age} for age in AGES]
        yield Role("harvester", 2, [PROJECT, "run_harvester"], [self._environment(self._url, "effects-harvester")])
        worker = [PROJECT, "run_tasks", f"--queue={QUEUE}", "--tracker", f"--concurrency={CONCURRENCY}"]
        yield Role("worker", 2, worker, ages)
        yield Role("consumer", 3, ["tests.chaos.effects.consumer", self._topic, assignor], [of_consumer])

    def _environment(self, url: str, application: str) -> dict[str, str]:
        return {
            "TEST_DATABASE": url,
            "TEST_KAFKA": self._services.kafka.bootstrap,
            "TEST_LEADER_TOPIC": f"{self._name}-leaders",
            "TEST_QUEUE": json.dumps(self._queue),
            "PGAPPNAME": application,
        }

    def _command(self, *arguments: str, name: str = "command") -> subprocess.CompletedProcess[bytes]:
        place = Place(name, str(self._directory), self._seed, self._url).environment()
        with (self._directory / f"{name}.log").open("ab") as output:
            return subprocess.run(
                [sys.executable, "-m", PROJECT, *arguments],
                cwd=CHECKOUT,
                env={**os.environ} | self._environment(self._url, "effects-command") | place,
                stdout=output,
                stderr=output,
                check=False,
            )

    def _make_topics(self) -> None:
        self._services.make_topics([self._topic], _PARTITIONS)
        self._services.make_topics([self._queue["message_topic"]], 8)
        by_broker = {"message.timestamp.type": "LogAppendTime"}
        self._services.make_topics([self._queue["marker_topic"]], 8, by_broker)
        self._services.make_topics([self._queue["dead_letter_topic"]], 2, {"cleanup.policy": "compact"})

    def _rows(self, sql: str) -> list[tuple]:
        with psycopg.connect(self._url) as connection:
            return connection.execute(sql).fetchall()

    def _number(self, sql: str) -> int:
        return self._rows(sql)[0][0]

    def _execute(self, sql: str) -> None:
        with psycopg.connect(self._url) as connection:
            connection.execute(sql)
