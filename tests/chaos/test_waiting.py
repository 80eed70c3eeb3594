"""Tests of the observer: it finds the oldest row that consumers have not seen, and tells of waits that are too long."""

import time

import psycopg
import pytest

from outbox_core.schema import TableName, create_table_sql
from tests.chaos.waiting import LONGEST_SECONDS, Waiting

_SOON = 20


@pytest.fixture
def url(database):
    """A database with an empty outbox."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(TableName.parse("outbox")))
    return database


@pytest.fixture
def outbox(url):
    """A connection to it."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def told():
    """Waits that the observer has told of."""
    return []


@pytest.fixture
def waiting(url, told):
    """An observer of that outbox."""
    observer = Waiting(url, ["outbox"], lambda name, wait: told.append((name, wait.row)))
    observer.start()
    yield observer
    observer.stop()


def _stash(connection, *ages):
    """Write a row for each age in seconds; return their ids."""
    statement = """
        INSERT INTO outbox (create_time, kafka_topic, kafka_value)
        VALUES (now() - %s * interval '1 second', 't', '1') RETURNING id
    """
    return [connection.execute(statement, [age]).fetchone()[0] for age in ages]


def test_a_row_waits_until_consumers_have_seen_it(outbox, waiting, told):
    """A row that is published does not wait, although it is still in the table; the one after it does."""
    first, *_ = _stash(outbox, 40, 30, 20)
    assert not waiting.catch_up("outbox", 3)
    assert 40 <= waiting.longest("outbox", 0).seconds < LONGEST_SECONDS
    assert waiting.longest("outbox", 0).row == first
    since = time.time() + 1  # a look may be under way
    waiting.see("outbox", first)
    assert not waiting.catch_up("outbox", 3)
    assert 30 <= waiting.longest("outbox", since).seconds < 40
    assert not told


def test_nothing_waits_behind_many_rows_that_are_seen(outbox, waiting, told):
    """An outbox whose rows are published has caught up, however many of them are still there."""
    for row in _stash(outbox, *[60] * 2500):
        waiting.see("outbox", row)
    told.clear()  # of those that it saw before
    assert waiting.catch_up("outbox", _SOON)
    _stash(outbox, 1)
    assert waiting.catch_up("outbox", 4)
    assert not told


def test_a_wait_that_is_too_long_is_told_once(outbox, waiting, told):
    """A wait that is too long is told once, and the next one once all has been published."""
    (first,) = _stash(outbox, LONGEST_SECONDS + 1)
    assert not waiting.catch_up("outbox", 4)
    assert told == [("outbox", first)]
    waiting.see("outbox", first)
    assert waiting.catch_up("outbox", _SOON)
    (second,) = _stash(outbox, LONGEST_SECONDS + 1)
    assert not waiting.catch_up("outbox", 4)
    assert told == [("outbox", first), ("outbox", second)]


def test_an_observer_that_cannot_look_fails_the_run(outbox, waiting):
    """An observer that can see nothing says so at the end: no run is clean by blindness."""
    outbox.execute("DROP TABLE outbox")
    time.sleep(2)
    with pytest.raises(psycopg.errors.UndefinedTable):
        waiting.stop()
    waiting.failure = None
