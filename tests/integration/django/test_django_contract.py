"""The contract of stash adapters, on Django."""

from contextlib import contextmanager

import pytest
from django.db import connections, transaction

import outbox_django
from outbox_core.schema import TEXT_LAYOUT
from tests.contract.stash_contract import CaptureContract, StashContract, TextStashContract
from tests.integration.django.django_fixtures import alias, django_db_modify_db_settings

__all__ = ["alias", "django_db_modify_db_settings"]

_ALIAS = "contract"


class _Writer:
    def __init__(self, table):
        self._table = table

    def stash(self, record):
        self._table.stash(record, using=_ALIAS)

    def stash_many(self, records):
        self._table.stash_many(records, using=_ALIAS)

    def savepoint(self):
        return transaction.atomic(using=_ALIAS)

    def execute(self, sql):
        with connections[_ALIAS].cursor() as cursor:
            cursor.execute(sql)


class _Django:
    def __init__(self, table):
        self._writer = _Writer(table)

    @contextmanager
    def transaction(self):
        with transaction.atomic(using=_ALIAS):
            yield self._writer

    @contextmanager
    def autocommit(self):
        yield self._writer


class TestConfiguredTable(StashContract, CaptureContract):
    """`outbox_django.stash` and `stash_many`, on the table of the OUTBOX setting."""

    @pytest.fixture
    def adapter(self, alias):
        """The functions themselves."""
        del alias
        return _Django(outbox_django)


class TestConfiguredTextTable(TextStashContract):
    """The same functions with LAYOUT "text"."""

    @pytest.fixture
    def adapter(self, alias, settings):
        """The functions themselves."""
        del alias
        settings.OUTBOX = {"LAYOUT": "text"}
        return _Django(outbox_django)


class TestOutboxTable(StashContract):
    """An OutboxTable on a binary table."""

    @pytest.fixture
    def adapter(self, alias):
        """A handle on the table."""
        del alias
        return _Django(outbox_django.OutboxTable("public.outbox"))


class TestTextOutboxTable(TextStashContract):
    """An OutboxTable on goharvest's table."""

    @pytest.fixture
    def adapter(self, alias):
        """A handle on the table."""
        del alias
        return _Django(outbox_django.OutboxTable("outbox", layout=TEXT_LAYOUT))
