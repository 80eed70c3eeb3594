"""The contract of every way of accepting, in any framework.

A suite derives from `AcceptContract`, opens its framework's transactions in the fixture `adapter`, and inherits
the tests. The inbox is read back over a connection of its own.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol
from uuid import UUID

import psycopg
import pytest

from outbox_core.errors import InvalidMessageId, TransactionRequired
from outbox_core.schema import TableName, create_inbox_sql

_AWKWARD = '\'{"a"},NULL\\n\\\\ %s %(x)s :y \u00e9\u4e2d\U0001f600\u202e'
_UUID = UUID("12345678-1234-5678-1234-567812345678")
_RANDOM = random.Random(7)
_LONGEST = "".join(chr(_RANDOM.randrange(33, 127)) for _ in range(1000))


class Receiver(Protocol):
    """An open transaction (or an autocommit connection) of the framework."""

    def accept(self, source: object, message_id: object) -> bool: ...

    def savepoint(self) -> AbstractContextManager[object]:
        """Open a savepoint: released at the end of the block, rolled back when an exception leaves it."""

    def execute(self, sql: str) -> None:
        """Run a statement of the application in the same transaction."""


class Adapter(Protocol):
    """A framework's way of working on the database of the test. Used from any thread."""

    def transaction(self) -> AbstractContextManager[Receiver]:
        """Open a transaction: committed at the end of the block, rolled back when an exception leaves it."""

    def autocommit(self) -> AbstractContextManager[Receiver]:
        """Open a connection outside any transaction, in autocommit mode."""


class _Undo(Exception):
    """An error that leaves a block to roll it back."""


@contextmanager
def _undone(block: AbstractContextManager[Receiver]):
    with suppress(_Undo), block as receiver:
        yield receiver
        raise _Undo


def accepted(database: str, table: str = "inbox"):
    """Return source and id of every row of an inbox, in order."""
    with psycopg.connect(database) as connection:
        return connection.execute(
            f"SELECT source, message_id FROM {TableName.parse(table).quoted} ORDER BY source, message_id"
        ).fetchall()


def wait_for_a_blocked_session(database: str) -> None:
    """Return once a session of this database waits for another's lock."""
    with psycopg.connect(database, autocommit=True) as connection:
        for _ in range(1200):
            waiting = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).fetchone()
            if waiting[0]:
                return
            connection.execute("SELECT pg_sleep(0.02)")
    raise TimeoutError("no session waits for a lock")


class AcceptContract:
    """The behaviours of every accept, on a table called `inbox`."""

    threads = 4
    ids = 100

    @pytest.fixture
    def inbox_database(self, database):
        """Return a fresh database with an inbox and a table of the application."""
        with psycopg.connect(database) as connection:
            connection.execute(create_inbox_sql(TableName("inbox")))
            connection.execute("CREATE TABLE business (id int)")
        return database

    @pytest.fixture
    def adapter(self, inbox_database) -> Adapter:
        """Return this framework's adapter for `inbox_database`."""
        raise NotImplementedError

    def test_first_and_repeat(self, adapter, inbox_database):
        """The first acceptance returns True, each later one False, in any transaction; sources are independent."""
        with adapter.transaction() as receiver:
            assert receiver.accept("api", "a") is True
            assert receiver.accept("api", "a") is False
            assert receiver.accept("other", "a") is True
            assert receiver.accept("api", "A") is True
        with adapter.transaction() as receiver:
            assert receiver.accept("api", "a") is False
            assert receiver.accept("api", "b") is True
        assert accepted(inbox_database) == [("api", "A"), ("api", "a"), ("api", "b"), ("other", "a")]

    def test_rollback_frees_the_id(self, adapter, inbox_database):
        """A message whose acceptance was rolled back is accepted when it comes again."""
        with _undone(adapter.transaction()) as receiver:
            assert receiver.accept("api", "a")
            receiver.execute("INSERT INTO business VALUES (1)")
        assert accepted(inbox_database) == []
        with adapter.transaction() as receiver:
            assert receiver.accept("api", "a")

    def test_savepoint(self, adapter, inbox_database):
        """Rolling back to a savepoint frees the ids accepted after it, and no others."""
        with adapter.transaction() as receiver:
            assert receiver.accept("api", "before")
            with _undone(receiver.savepoint()):
                assert receiver.accept("api", "freed")
                assert not receiver.accept("api", "before")
            assert receiver.accept("api", "freed")
            assert not receiver.accept("api", "before")
        assert accepted(inbox_database) == [("api", "before"), ("api", "freed")]

    def test_autocommit_is_refused(self, adapter, inbox_database):
        """Outside a transaction `accept` is refused."""
        with adapter.autocommit() as receiver, pytest.raises(TransactionRequired, match="acceptance would not be"):
            receiver.accept("api", "a")
        assert accepted(inbox_database) == []

    def test_ids_become_text(self, adapter, inbox_database):
        """Numbers, UUIDs and UTF-8 bytes become their text; any text is kept exactly, to the last byte."""
        with adapter.transaction() as receiver:
            for message_id in (42, _UUID, b"bytes \xc3\xa9", _AWKWARD, " "):
                assert receiver.accept(7, message_id)
            for repeat in ("42", str(_UUID), "bytes \u00e9", _AWKWARD.encode(), b" "):
                assert not receiver.accept("7", repeat)
            assert receiver.accept(_LONGEST, _LONGEST[::-1])
            assert not receiver.accept(_LONGEST, _LONGEST[::-1])
        assert ("7", _AWKWARD) in accepted(inbox_database)

    def test_bad_ids_send_nothing(self, adapter, inbox_database):
        """An id that the table cannot hold is refused by the name of its argument, and the transaction goes on."""
        refused = [
            ("api", "", "message_id: is empty"),
            ("", "a", "source: is empty"),
            ("api", None, "message_id: expected str, bytes, int or UUID, got NoneType"),
            (b"api", "a", "source: expected str, int or UUID, got bytes"),
            ("api", True, "message_id: expected .* got bool"),
            ("api", "a\0", "message_id: contains a NUL"),
            ("api", b"\xff", "message_id: bytes that are not UTF-8"),
            ("api", "\ud800", "message_id: cannot be encoded"),
            ("api", "\u00e9" * 501, "message_id: 1002 bytes are more than the 1000"),
            ("a" * 1001, "a", "source: 1001 bytes"),
        ]
        with adapter.transaction() as receiver:
            for source, message_id, complaint in refused:
                with pytest.raises(InvalidMessageId, match=complaint):
                    receiver.accept(source, message_id)
            receiver.execute("INSERT INTO business VALUES (1)")
            assert receiver.accept("api", "good")
        assert accepted(inbox_database) == [("api", "good")]

    @pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls-back"])
    def test_a_concurrent_repeat_waits_for_the_outcome(self, adapter, inbox_database, commits):
        """While another transaction has accepted the id, `accept` waits: False if it commits, True if it rolls back."""
        answers = []

        def repeat():
            with adapter.transaction() as receiver:
                answers.append(receiver.accept("api", "a"))

        second = threading.Thread(target=repeat)
        first = adapter.transaction() if commits else _undone(adapter.transaction())
        with first as receiver:
            assert receiver.accept("api", "a")
            second.start()
            wait_for_a_blocked_session(inbox_database)
            assert answers == []
        second.join(60)
        assert answers == [not commits]
        assert accepted(inbox_database) == [("api", "a")]

    def test_many_threads_accept_each_id_once(self, adapter, inbox_database):
        """Of many threads that accept the same ids, each in an order of its own, exactly one gets each id."""

        def accept_all(seed):
            numbers = list(range(self.ids))
            random.Random(seed).shuffle(numbers)
            won = []
            for number in numbers:
                with adapter.transaction() as receiver:
                    if receiver.accept("api", number):
                        receiver.execute(f"INSERT INTO business VALUES ({number})")
                        won.append(number)
            return won

        with ThreadPoolExecutor(self.threads) as pool:
            winners = [number for won in pool.map(accept_all, range(self.threads)) for number in won]
        assert sorted(winners) == list(range(self.ids))
        with psycopg.connect(inbox_database) as connection:
            effects = connection.execute("SELECT id FROM business ORDER BY id").fetchall()
        assert [number for (number,) in effects] == list(range(self.ids))
