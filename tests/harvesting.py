"""Harvesters inside a test: outbox tables, rows, electors and producers that misbehave, and records of their events."""

import os
import random
import signal
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from itertools import groupby
from uuid import UUID, uuid4

import psycopg
from confluent_kafka import KafkaError, KafkaException, Producer
from psycopg.rows import namedtuple_row

from outbox_core.config import HarvestConfig, Limits
from outbox_core.election import Leadership
from outbox_core.events import LeaderAcquired, LeaderRefreshed, LeaderRevoked
from outbox_core.harvest import Harvester
from outbox_core.holds import Holds
from outbox_core.schema import BINARY_LAYOUT, TEXT_LAYOUT, TableName, create_hold_sql, create_table_sql, drop_checks_sql
from outbox_core.stasher import Stasher
from tests.kafka_reader import read_topic

ID_HEADER = "outbox-id"
GENEROUS_SECONDS = 60.0
"""Longer than anything takes here on a machine that does seven other things."""


class AlwaysLeader:
    """An `ElectorFactory` whose electors all lead."""

    failure = None
    trouble = None
    silent_seconds = 0.0

    def __init__(self, on_event):
        self._on_event = on_event
        self.leadership = None

    def start(self):
        self.acquire()

    def acquire(self):
        """Lead from now on, for ever."""
        lease = Leadership(uuid4(), 0, float("inf"))
        self.leadership = lease
        self._on_event(LeaderAcquired(lease.leader_id, lease.term))

    def revoke(self):
        """Hand over as NELI does: the lease lasts until the handler has returned."""
        if self.leadership is not None:
            self._on_event(LeaderRevoked(self.leadership.leader_id))
            self.leadership = None

    def stop(self):
        self.revoke()


class RecordingHarvester(Harvester):
    """A harvester that keeps its events in `events`; the elector it made, if it is an `AlwaysLeader`, in `elector`."""

    def __init__(self, config, on_event=None, **options):
        self.events = []
        self.elector = None
        make_elector = options.pop("elector_factory", AlwaysLeader)

        def note(event):
            self.events.append(event)
            if on_event is not None:
                on_event(event)

        def make(handler):
            self.elector = make_elector(handler)
            return self.elector

        super().__init__(config, note, elector_factory=make if make_elector is not None else None, **options)

    @property
    def leader_ids(self) -> list[UUID]:
        """Return every leader ID that it ever had, in order."""
        return [event.leader_id for event in self.events if isinstance(event, LeaderAcquired | LeaderRefreshed)]

    def kinds(self, *, without=()) -> list[str]:
        """Return the names of its events, in order."""
        return [type(event).__name__ for event in self.events if not isinstance(event, without)]


class FaultyProducer:
    """A producer that refuses some calls, and reports failure for some records that arrived.

    Args:
        settings: of the real producer.
        refused: share of `produce` calls that raise.
        misreported: share of deliveries that are reported as failed.
        fatal: number of records after which it reports, once, that it has failed for good; None for never.
        seed: makes the choice repeatable.

    Attributes:
        faults: number of calls and reports that it has falsified.
        longest_queue: most records that were ever between `produce` and the end of their report.
    """

    def __init__(self, settings, *, refused=0.0, misreported=0.0, fatal=None, seed=0):
        self._producer = Producer(settings)
        self._random = random.Random(seed)
        self._refused = refused
        self._misreported = misreported
        self._records_before_fatal = fatal
        self.faults = 0
        self.longest_queue = 0
        self._queue = 0

    def produce(self, topic, value, key, partition, *, on_delivery, headers):
        if self._random.random() < self._refused:
            self.faults += 1
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, "injected refusal"))
        misreported = self._random.random() < self._misreported
        fatal = self._records_before_fatal == 0
        if self._records_before_fatal is not None:
            self._records_before_fatal -= 1
        self.faults += misreported + fatal

        def report(error, message):
            self._queue -= 1
            if fatal:
                error = KafkaError(KafkaError._FATAL, "injected failure")
            elif misreported:
                error = KafkaError(KafkaError.REQUEST_TIMED_OUT, "injected report")
            on_delivery(error, message)

        self._producer.produce(topic, value, key, partition, on_delivery=report, headers=headers)
        self._queue += 1
        self.longest_queue = max(self.longest_queue, self._queue)

    def __len__(self):
        return len(self._producer)

    def __getattr__(self, name):
        return getattr(self._producer, name)


class Scene:
    """A database with one outbox, a broker, and the harvesters of one test.

    Args:
        database: URL of the database.
        bootstrap: address of the broker.
        table: name of the outbox; made unless `layout` is None.
        layout: "binary", "text" or None.
        holds: whether to make the table of its holds, too.
        constrained: whether it has its CHECK constraints; without them it is one of an older release.
    """

    def __init__(self, database, bootstrap, *, table="outbox", layout="binary", holds=True, constrained=True):
        self.database = database
        self.bootstrap = bootstrap
        self.table = TableName.parse(table)
        self.stasher = Stasher(self.table, TEXT_LAYOUT if layout == "text" else BINARY_LAYOUT)
        self.harvesters = []
        self._session_of_execute = None
        if layout is not None:
            self.execute(create_table_sql(self.table, layout))
        if layout is not None and not constrained:
            self.execute(drop_checks_sql(self.table))
        if layout is not None and holds:
            self.execute(create_hold_sql(self.table))
        self.holds = Holds(self.table)

    # -- the table

    def connect(self, **options):
        """Open a connection outside autocommit."""
        return psycopg.connect(self.database, **options)

    def execute(self, statement, parameters=None):
        """Run one statement in a transaction of its own; rows as named tuples, if it has any."""
        try:
            cursor = self._session().execute(statement, parameters)
        except psycopg.OperationalError:
            if not self._session_of_execute.closed:
                raise
            cursor = self._session().execute(statement, parameters)  # the server was restarted since the last one
        return cursor.fetchall() if cursor.description else []

    def _session(self):
        """Return a connection in autocommit, made once: tests that wait for something ask very often."""
        if self._session_of_execute is None or self._session_of_execute.closed:
            # Nothing is prepared: tests change tables between two equal statements.
            options = {"autocommit": True, "row_factory": namedtuple_row, "prepare_threshold": None}
            self._session_of_execute = psycopg.connect(self.database, **options)
        return self._session_of_execute

    def stash(self, *records):
        """Write records in one transaction."""
        with self.connect() as connection:
            self.stasher.stash_many(connection, records)

    def fill(self, topic, count, *, keys=100, prefix="k"):
        """Write rows the fast way: the value is the row's number, keys take turns; `keys=None` for none."""
        key = "NULL" if keys is None else f"'{prefix}' || n %% {keys}"
        self.execute(
            f"INSERT INTO {self.table.quoted} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            f" kafka_header_values) SELECT now(), %s, {key}, n::text::{self._value_type()}, '{{}}', '{{}}'"
            " FROM generate_series(1, %s) AS n",
            [topic, count],
        )

    def _value_type(self):
        return "text" if self.stasher.layout is TEXT_LAYOUT else "bytea"

    def rows(self):
        """Return all rows by ascending id."""
        return self.execute(f"SELECT * FROM {self.table.quoted} ORDER BY id")

    def count(self, condition="true"):
        """Count the rows that fulfil the condition."""
        return self.execute(f"SELECT count(*) FROM {self.table.quoted} WHERE {condition}")[0].count

    @contextmanager
    def role(self, grants):
        """Make a role that may log in, and owns nothing; `grants` are statements with `{role}`. Yield its name."""
        name = f"harvests {uuid4()}"
        quoted = f'"{name}"'
        self.execute(f"CREATE ROLE {quoted} LOGIN; {grants.format(role=quoted)}")
        try:
            yield name
        finally:
            self.close()  # the harvesters that use it
            self.execute(f"DROP OWNED BY {quoted}; DROP ROLE {quoted}")

    # -- its holds

    def held(self, **which):
        """Return the holds."""
        with self.connect() as connection:
            return self.holds.list(connection, **which)

    def hold(self, action, *arguments, **which):
        """Call a method of `Holds` in a transaction of its own."""
        with self.connect() as connection:
            return getattr(self.holds, action)(connection, *arguments, **which)

    # -- harvesters

    def config(self, *, name="harvester", limits=None, **settings):
        """Return the settings of a harvester of this outbox."""
        defaults = {
            "data_source": self.database,
            "outbox_table": self.table.quoted,
            "base_kafka_config": {"bootstrap.servers": self.bootstrap},
            "name": name,
            "limits": Limits(**(limits or {})),
        }
        return HarvestConfig(**(defaults | settings))

    def harvester(self, *, on_event=None, name="harvester", limits=None, config=None, **options):
        """Make a harvester that always leads unless `elector_factory=None` asks for NELI; it is not started."""
        made = RecordingHarvester(self.config(name=name, limits=limits, **(config or {})), on_event=on_event, **options)
        self.harvesters.append(made)
        return made

    @contextmanager
    def running(self, **options):
        """Run a harvester within the context, and check that it ends well."""
        harvester = self.harvester(**options)
        harvester.start()
        yield harvester
        harvester.stop()
        assert harvester.join(GENEROUS_SECONDS), "the harvester did not stop"

    def drain(self, **options):
        """Harvest until the table is empty."""
        harvester = self.harvester(drain=True, **options)
        harvester.start()
        assert harvester.join(GENEROUS_SECONDS), f"not drained: {self.count()} rows are left"
        return harvester

    def read(self, topic, **options):
        """Return all messages of a topic."""
        return read_topic(self.bootstrap, topic, **options)

    def close(self):
        """Stop all that still run."""
        started = [harvester for harvester in self.harvesters if harvester._thread is not None]
        for harvester in started:
            harvester.stop()
        for harvester in started:
            harvester._ended.wait(GENEROUS_SECONDS)
        if self._session_of_execute is not None:
            self._session_of_execute.close()


@contextmanager
def standing_still(pids):
    """Stop processes (SIGSTOP), and let those go on that are still there."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended with its connection
                os.kill(pid, signal.SIGCONT)


def wait_until(condition, what, timeout=GENEROUS_SECONDS):
    """Wait until a condition holds, and return its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain: {what}"
        time.sleep(0.02)
    return value


def identity_of(message):
    """Return the row's id in a message's id header."""
    return int(dict(message.headers)[ID_HEADER].rpartition(b":")[2])


def by_key(messages):
    """Return values by key, in the order of each partition; a key is in one partition."""
    values = defaultdict(list)
    for message in messages:
        values[message.key].append(message.value)
    return dict(values)


def assert_only_adjacent_repeats(messages, count):
    """Assert that rows 1 to `count` are there, those of a key in order, except that one may follow itself.

    So a reader that drops an immediate repeat gets each record once, in order.
    """
    of_key = defaultdict(list)
    for message in messages:
        of_key[message.topic, message.key].append(identity_of(message))
    for key, identities in of_key.items():
        once = [identity for identity, _ in groupby(identities)]
        assert once == sorted(set(once)), f"{key}: reversed or repeated later: {identities}"
    assert {identity for identities in of_key.values() for identity in identities} == set(range(1, count + 1))


def harvest_threads(*, besides=()):
    """Return the names of this process's threads that belong to a harvester or its elector, besides these."""
    names = [thread.name for thread in threading.enumerate() if thread.is_alive() and thread not in besides]
    # A console's threads live as long as its application, which an earlier test may have left to the collector.
    return sorted(name for name in names if name.startswith(("outbox-", "neli-")) and "outbox-console" not in name)
