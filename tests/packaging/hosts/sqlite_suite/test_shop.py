"""The shop's own suite, which knows nothing of an outbox but for one test of each kind."""

import pytest
from django.core.management import call_command
from django.db import transaction
from django.test import TestCase
from ledger import Base, Entry, write
from shop.models import Stock
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox_sqlalchemy.testing import application_tables


class StockTests(TestCase):
    """Tests of unittest's kind, whose preparation saves, and so announces."""

    def setUp(self):
        """Save before each test."""
        Stock.objects.create(product="pen", number=1)

    def test_a_change(self):
        """A receiver that stashes does not need PostgreSQL."""
        Stock.objects.get().save()
        assert Stock.objects.get().number == 1


@pytest.mark.django_db
def test_an_announcement(in_memory_outbox):
    """Stashed records can be asked for, and those that were rolled back do not count."""
    Stock.objects.create(product="pen", number=7)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        Stock.objects.create(product="ink", number=1 / 0)
    in_memory_outbox.assert_stashed("stock", key="pen", value={"number": 7}, count=1)
    in_memory_outbox.assert_not_stashed("stock", key="ink")


def test_checks():
    """Django's checks find nothing, with the one silenced that is about SQLite."""
    call_command("check", databases=["default"], fail_level="WARNING")


def test_the_ledger(in_memory_outbox):
    """The schema leaves out the outbox's tables."""
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine, tables=application_tables(Base.metadata))
    with Session(engine) as session:
        write(session, 7)
        assert session.get(Entry, 7)
    in_memory_outbox.assert_stashed("entries", key=7)
    engine.dispose()
