"""A process that joins the group again and again, for some records each time, with each form of `consume` in turn.

A record's handler writes one effect, and the call of `consume` that it ran in. What a swallowing handler writes has no
record's name, and must never be found. Each call that returns notes its numbers.
"""

import os
import random
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import django.db
import psycopg
from confluent_kafka import Consumer
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import sessionmaker

import outbox_django
import outbox_sqlalchemy
from outbox_core import AcceptanceLost
from outbox_core.consuming import backoff, consume
from tests.acceptance.task_project import configure
from tests.chaos.effects.misfortunes import Journal, Misfortune, Misfortunes, Place
from tests.chaos.effects.project import AGES
from tests.integration.consuming.swallowing import COMMITS, WRONG, Handler

GROUP = "effects"
FORMS = ("psycopg", "sqlalchemy", "django")
_SHARES = {
    "swallows an error": 0.01,
    "raises": 0.005,
    "cut before": 0.001,
    "cut in": 0.001,
    "cut in and swallows that": 0.001,
    "cut late": 0.002,
    "dies in": 0.00005,
    "dies late": 0.00005,
}
_EXPECTED = (AcceptanceLost, Misfortune, psycopg.Error, SQLAlchemyError, django.db.Error)
_WAYS = tuple(way for way in WRONG if way not in COMMITS)
_SETTINGS = {
    "group.id": GROUP,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "session.timeout.ms": 6000,
    "heartbeat.interval.ms": 1500,
    "auto.commit.interval.ms": 500,
    "fetch.wait.max.ms": 50,
}


def set_rollback():
    """Let Django's transaction end with a rollback."""
    django.db.transaction.set_rollback(True)


class Work:
    """The handler of a call, for each form of transactions."""

    def __init__(self, misfortunes, call):
        self._misfortunes, self._call = misfortunes, call

    def on_psycopg(self, connection, message):
        """Work on a bare connection."""
        self._on(connection.execute, message, Handler(connection.execute, connection), _WAYS)

    def on_session(self, session, message):
        """Work in a session."""

        def run(sql):
            return session.execute(text(sql))

        self._on(run, message, Handler(run, session), (*_WAYS, "flush"))

    def on_django(self, message):
        """Work on Django's connection."""
        with django.db.connection.cursor() as cursor:
            handler = Handler(cursor.execute, None)
            handler.set_rollback = set_rollback
            ways = [way for way in _WAYS if not way.startswith("rollback")]
            self._on(lambda sql: cursor.execute(sql) and cursor, message, handler, (*ways, "set_rollback"))

    def _on(self, run, message, swallowing, ways):
        name = message.value().decode()
        what = self._misfortunes.of(name, _SHARES)
        if what == "swallows an error":
            getattr(swallowing, random.choice(ways))()
            return
        if what == "cut before":
            _cut(run)
        run(f"INSERT INTO effect VALUES ('{name}', '{self._call}')")
        if what == "raises":
            raise Misfortune
        if what == "cut in":
            _cut(run)
        elif what == "cut in and swallows that":
            with suppress(Exception):
                _cut(run)
        elif what == "cut late":
            self._misfortunes.cut_soon(run("SELECT pg_backend_pid()").fetchone()[0])
        elif what == "dies in":
            self._misfortunes.die()
        elif what == "dies late":
            self._misfortunes.die_soon()


def _cut(run):
    run("SELECT pg_terminate_backend(pg_backend_pid())")


class Connected:
    """One connection of psycopg, kept until it breaks: what a form of its own does without a framework."""

    def __init__(self, url):
        self._url = url
        self._connection = None

    @contextmanager
    def transaction(self):
        """Yield the connection in a transaction."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._url)
        connection = self._connection
        try:
            yield connection
            connection.commit()
        except BaseException:
            with suppress(psycopg.Error):
                connection.rollback()
            raise


@dataclass
class Forms:
    """The forms of `consume`, on the database of this process."""

    url: str

    def __post_init__(self):
        self._connected = Connected(self.url)
        self._sessions = sessionmaker(create_engine(self.url.replace("postgresql:", "postgresql+psycopg:")))

    def run(self, form, consumer, work, **options):
        """Consume in a form."""
        if form == "psycopg":
            return consume(consumer, work.on_psycopg, self._connected.transaction, **options)
        if form == "sqlalchemy":
            return outbox_sqlalchemy.consume(consumer, work.on_session, self._sessions, **options)
        return outbox_django.consume(consumer, work.on_django, **options)


class Member:
    """A member of the group, which leaves and joins again with each form in turn.

    Args:
        topic: the topic.
        assignor: the group's way to share partitions.
    """

    def __init__(self, topic, assignor):
        place = Place.of_this_process()
        self.stop = threading.Event()
        self._name, self._topic, self._assignor = place.name, topic, assignor
        self._journal, self._misfortunes = Journal(place), Misfortunes(place)
        self._forms = Forms(os.environ["TEST_DATABASE"])

    def run(self):
        """Consume until told to stop, or until an error that nothing here explains."""
        first = random.randrange(len(FORMS))
        for turn in count():
            if self.stop.is_set():
                return
            self._join(f"{self._name}.{turn}", FORMS[(first + turn) % len(FORMS)])

    def _join(self, name, form):
        """Be a member for some records."""
        commit, left = random.choice(("sync", "stored")), random.randint(500, 4000)
        servers = {"bootstrap.servers": os.environ["TEST_KAFKA"], "partition.assignment.strategy": self._assignor}
        consumer = Consumer({**_SETTINGS, **servers, "enable.auto.commit": commit == "stored"})
        consumer.subscribe([self._topic])
        try:
            for call in count():
                if self._call(f"{name}.{call}", form, consumer, commit=commit, max_records=left):
                    return
        finally:
            consumer.close()

    def _call(self, name, form, consumer, **options):
        """Call `consume` once; return whether it has returned, and not raised."""
        retry = random.choice((None, backoff(6, first=0.01)))
        work = Work(self._misfortunes, name)
        try:
            done = self._forms.run(form, consumer, work, retry=retry, stop=self.stop, **options)
        except _EXPECTED as error:
            self._journal.note("error", name, form, type(error).__name__)
            return self.stop.wait(0.05)
        except Exception:
            self._journal.note("unexpected", name, form)
            raise
        self._journal.note("call", name, form, done.handled, done.repeats)
        return True


def main():
    """Consume until SIGTERM."""
    configure(**AGES[random.choice(list(AGES))])
    member = Member(*sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: member.stop.set())
    member.run()


if __name__ == "__main__":
    main()
