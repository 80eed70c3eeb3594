"""Captures on Django: an outbox in memory beside a database on SQLite."""

import unittest
from contextlib import suppress

import pytest
from django.db import connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.test import SimpleTestCase

import outbox_django as outbox
from outbox_core.testing import in_memory_outbox as in_memory
from outbox_django import InvalidRecord, OutboxRecord, TransactionRequired
from outbox_django.testing import OutboxTestMixin
from outbox_queue import QueueConfig, QueueService


class _Undo(Exception):
    """An error that rolls back."""


@pytest.fixture
def lite(django_db_blocker):
    """Return the alias of a database on SQLite, in memory."""
    settings = connections.settings["default"] | {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    with django_db_blocker.unblock():
        connections["lite"] = DatabaseWrapper(settings, "lite")
        yield "lite"
        connections["lite"].connection.close()
        del connections["lite"]


def _keys(records):
    return [record.key for record in records]


def _stash(key, using):
    outbox.stash(OutboxRecord("t", key), using=using)


def test_transactions_on_sqlite(lite, in_memory_outbox):
    """Records are kept without an outbox table; those of a rolled-back transaction are not stashed."""
    with transaction.atomic(using=lite):
        _stash(1, lite)
        outbox.stash_many((OutboxRecord("t", n) for n in (2, 3)), using=lite)
        QueueService(QueueConfig(bootstrap_servers="none:1")).queue("q").stash(connections[lite], {"order": 1})
        assert in_memory_outbox.committed == []
    assert _keys(in_memory_outbox.committed) == ["1", "2", "3", "q"]
    with suppress(_Undo), transaction.atomic(using=lite):
        _stash(4, lite)
        raise _Undo
    with transaction.atomic(using=lite):
        _stash(5, lite)
        transaction.set_rollback(True, using=lite)
    assert _keys(in_memory_outbox) == ["1", "2", "3", "q"]
    assert _keys(in_memory_outbox.rolled_back) == ["4", "5"]


def test_savepoints(lite, in_memory_outbox):
    """A block that fails takes its own records along, those of blocks in it included, and no others."""
    with transaction.atomic(using=lite):
        _stash("before", lite)
        with suppress(_Undo), transaction.atomic(using=lite):
            _stash("outer", lite)
            with transaction.atomic(using=lite):
                _stash("inner", lite)
            raise _Undo
        with transaction.atomic(using=lite):
            _stash("released", lite)
        _stash("after", lite)
    assert _keys(in_memory_outbox) == ["before", "released", "after"]
    assert _keys(in_memory_outbox.rolled_back) == ["outer", "inner"]


def test_the_tests_own_transaction(lite):
    """In `TestCase`'s transaction, blocks of the code under test commit and roll back as they do outside of it."""
    with transaction.atomic(using=lite), in_memory() as stashed:
        with suppress(_Undo), transaction.atomic(using=lite):
            _stash("gone", lite)  # the first stash: its savepoint is older than the capture knows
            raise _Undo
        with transaction.atomic(using=lite):
            _stash("kept", lite)
        assert _keys(stashed) == ["kept"]
        transaction.set_rollback(True, using=lite)
    assert _keys(stashed) == ["kept"], "what happens after the capture does not change it"


def test_outside_a_transaction(lite, in_memory_outbox):
    """Stashing in autocommit is refused as on PostgreSQL, and so is a bad record, unless a test says otherwise."""
    for connected in (False, True):
        with pytest.raises(TransactionRequired, match="require_transaction=False"):
            _stash(1, lite)
        if not connected:
            connections[lite].ensure_connection()
    with transaction.atomic(using=lite), pytest.raises(InvalidRecord):
        outbox.stash({"topic": "t"}, using=lite)
    assert in_memory_outbox == []
    with in_memory(require_transaction=False) as stashed:
        _stash(2, lite)
        with suppress(_Undo), transaction.atomic(using=lite):
            _stash(3, lite)
            raise _Undo
    assert _keys(stashed) == ["2"], "it was stashed before the transaction that was rolled back"


def test_nothing_is_left_of_a_capture(lite):
    """After its end a connection has its own methods again."""
    followed = {"savepoint", "savepoint_rollback", "commit", "rollback", "close", "set_autocommit"}
    with in_memory(), transaction.atomic(using=lite):
        _stash(1, lite)
        assert followed <= vars(connections[lite]).keys()
    assert followed.isdisjoint(vars(connections[lite]))


def test_the_mix_in():
    """A test case has the records of each of its tests, its `setUp` included, and no database is asked."""

    class Tests(OutboxTestMixin, SimpleTestCase):
        outbox_in_memory = True
        outbox_requires_transaction = False

        def setUp(self):
            outbox.stash(OutboxRecord("t", "from setUp"))

        def test_one(self):
            outbox.stash(OutboxRecord("t", 1))
            self.outbox_records.assert_stashed("t", key=1)
            self.outbox_records.assert_stashed("t", count=2)

        def test_other(self):
            self.outbox_records.assert_stashed("t", key=2)

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Tests).run(result)
    assert (result.testsRun, result.errors) == (2, [])
    ((failed, text),) = result.failures
    assert failed.id().endswith("test_other")
    assert "nearest miss: t  key='from setUp'" in text
