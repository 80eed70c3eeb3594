"""In the transaction of a test, as of TestCase and the fixture `db`, `consume` leaves the connection alone."""

import pytest
from django.contrib.auth.models import Group
from django.db import connection

import outbox_django as outbox
from outbox_core import Stasher
from outbox_core.consuming import Consumed
from outbox_core.testing import in_memory_outbox
from outbox_core.testing.kafka import InProcessKafka
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]


@pytest.mark.django_db
@pytest.mark.parametrize("age", [0, 600, None])
def test_consume(monkeypatch, age):
    """Whatever CONN_MAX_AGE is, the rows of the test and of the handler are there."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", age)
    Group.objects.create(name="of the test")
    with in_memory_outbox(require_transaction=False) as stashed:
        Stasher().stash(None, outbox.OutboxRecord("groups", "k", "v"))
        consumer = InProcessKafka(stashed).consumer("groups")
        handle = lambda _: Group.objects.create(name="of the handler")  # noqa: E731
        assert outbox.consume(consumer, handle, stop=consumer.drained) == Consumed(handled=1, repeats=0)
    assert Group.objects.count() == 2
