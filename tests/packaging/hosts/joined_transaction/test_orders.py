"""The service's own suite."""

import pytest
from orders import Base, Bill, bill, place
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import outbox_sqlalchemy as outbox
from outbox_core.consuming import Consumed
from outbox_core.testing.kafka import InProcessKafka


def count(session, model):
    """Count the rows of a table."""
    return session.scalar(select(func.count()).select_from(model))


def test_an_order_is_announced(session, outbox_records):
    """A commit of the code is one of its savepoint, and what it stashed counts."""
    place(session, 7)
    outbox_records.assert_stashed("orders", key=7, value={"order": 7})
    assert count(session, Base.metadata.tables["outbox"]) == 1


def test_an_order_that_is_refused(session, outbox_records):
    """A flush that fails rolls the savepoint back, with the announcement."""
    place(session, 7)
    with pytest.raises(IntegrityError):
        place(session, 7)
    session.rollback()
    outbox_records.assert_stashed("orders", key=7, count=1)
    assert count(session, Base.metadata.tables["outbox"]) == 1


def test_a_request_is_accepted_once(session):
    """The inbox works in the joined transaction: a repeat is told, and a rollback frees the id."""
    assert outbox.accept(session, "orders-api", "k")
    session.rollback()
    assert outbox.accept(session, "orders-api", "k")
    outbox.confirm(session, "orders-api", "k")
    session.commit()
    assert not outbox.accept(session, "orders-api", "k")


def test_the_consumer_bills_once(connection, session, outbox_records):
    """`consume` runs in sessions that join the same transaction, and drops repeats."""
    place(session, 7)
    kafka = InProcessKafka(outbox_records)

    def sessions():
        return Session(connection, join_transaction_mode="create_savepoint")

    for done in (Consumed(handled=1, repeats=0), Consumed(handled=0, repeats=1)):
        consumer = kafka.consumer("orders", group="billing")
        assert outbox.consume(consumer, bill, sessions, stop=consumer.drained) == done
        kafka.rewind("billing")
    assert count(session, Bill) == 1


def test_nothing_is_left(engine):
    """Whatever the tests before committed is gone."""
    with Session(engine) as session:
        assert [count(session, table) for table in Base.metadata.sorted_tables] == [0, 0, 0, 0]
