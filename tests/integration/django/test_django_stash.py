"""`outbox_django.stash` on a real Postgres: a record commits and rolls back with its transaction."""

import threading
from contextlib import contextmanager, suppress

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

import outbox_django as outbox
from outbox_core import commit_signal
from outbox_core.claims import TableStore
from outbox_core.errors import InvalidConfig
from outbox_core.schema import TEXT_LAYOUT, TableName, create_table_sql
from outbox_django.models import Outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db(transaction=True)


class _BillingRouter:
    def db_for_write(self, model, **_):
        return "other" if model is Outbox else None


class _Undo(Exception):
    """The exception that rolls a block back."""


@contextmanager
def _failing_atomic():
    """Open an atomic block that is rolled back at its end."""
    with suppress(_Undo), transaction.atomic():
        yield
        raise _Undo


def _record(key="k", **fields):
    return outbox.OutboxRecord(**{"topic": "orders", "key": key, "value": b"v", **fields})


def _keys(using="default"):
    """Return the keys that another session can see."""
    seen = []

    def look():
        seen.extend(Outbox.objects.using(using).order_by("id").values_list("kafka_key", flat=True))
        connections[using].close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen


def test_set_rollback_takes_the_record_along():
    """`transaction.set_rollback` counts as a rollback."""
    with transaction.atomic():
        outbox.stash(_record())
        transaction.set_rollback(True)
    assert _keys() == []


def test_durable_atomic():
    """`atomic(durable=True)` is a transaction like any other."""
    with transaction.atomic(durable=True):
        outbox.stash(_record())
    assert _keys() == ["k"]


def test_autocommit_is_refused():
    """Outside a transaction no record is written, and the message shows the remedy."""
    with pytest.raises(outbox.TransactionRequired, match=r"with transaction\.atomic\(\):"):
        outbox.stash(_record())
    with pytest.raises(outbox.TransactionRequired):
        outbox.stash_many([_record()])
    assert _keys() == []


def test_autocommit_is_refused_on_a_connection_that_was_never_opened():
    """A stash as a thread's first statement is refused: the connection is in autocommit mode, although not yet open."""
    refused = []

    def stash_first():
        try:
            outbox.stash(_record())
        except outbox.TransactionRequired as error:
            refused.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=stash_first)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert _keys() == []


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_transaction_on_another_database_does_not_count():
    """A block on `default` is no transaction of `other`; the message names the alias."""
    with transaction.atomic(), pytest.raises(outbox.TransactionRequired, match="using='other'"):
        outbox.stash(_record(), using="other")


def test_autocommit_turned_off_is_a_transaction():
    """After `set_autocommit(False)` the record waits for the commit."""
    transaction.set_autocommit(False)
    try:
        outbox.stash(_record())
        assert _keys() == []
        transaction.commit()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert _keys() == ["k"]


def test_on_commit_is_too_late():
    """An `on_commit` callback runs after the transaction: a stash there is refused and writes no record."""
    refused = []

    def late():
        with pytest.raises(outbox.TransactionRequired) as raised:
            outbox.stash(_record("late"))
        refused.append(raised)

    with transaction.atomic():
        outbox.stash(_record())
        transaction.on_commit(late)
    assert len(refused) == 1
    assert _keys() == ["k"]


def test_a_broken_transaction_stays_broken():
    """After a failed statement further statements are refused, a stash included."""
    with transaction.atomic():
        with pytest.raises(DatabaseError):
            connection.cursor().execute("SELECT 1/0")
        with pytest.raises(DatabaseError):
            outbox.stash(_record())
    assert _keys() == []


def test_atomic_requests(client, monkeypatch):
    """With ATOMIC_REQUESTS a view stashes without a block of its own, and a view that fails leaves no record."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    client.raise_request_exception = False
    assert client.get("/orders/1/").status_code == 200
    assert client.get("/orders/2/?fail=1").status_code == 500
    assert _keys() == ["1"]


def test_a_view_without_a_transaction_fails(client):
    """Without ATOMIC_REQUESTS the same view is refused, so the mistake shows at the first request."""
    with pytest.raises(outbox.TransactionRequired):
        client.get("/orders/1/")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_using_names_the_database():
    """`using=` writes to that database, in that database's transaction, and nowhere else."""
    with transaction.atomic(), transaction.atomic(using="other"):
        outbox.stash(_record("here"))
        outbox.stash(_record("there"), using="other")
        outbox.stash_many([_record("there too")], using="other")
    assert _keys() == ["here"]
    assert _keys("other") == ["there", "there too"]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_setting_names_the_database(settings):
    """Without `using=`, OUTBOX["DATABASE"] decides, before the routers."""
    settings.DATABASE_ROUTERS = [_BillingRouter()]
    settings.OUTBOX = {"DATABASE": "default"}
    with transaction.atomic(using="default"):
        outbox.stash(_record())
    assert (_keys(), _keys("other")) == (["k"], [])


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_router_names_the_database(settings):
    """Without `using=` and OUTBOX["DATABASE"], the routers decide where the Outbox model is written."""
    settings.DATABASE_ROUTERS = [_BillingRouter()]
    with transaction.atomic(using="other"):
        outbox.stash(_record())
    assert (_keys(), _keys("other")) == ([], ["k"])


def test_an_unknown_alias_is_named():
    """An alias that DATABASES lacks is an error of the library, which lists the known aliases."""
    with pytest.raises(InvalidConfig, match="'nowhere' is not in DATABASES; it has 'default', 'other'"):
        outbox.stash(_record(), using="nowhere")


@pytest.mark.django_db
def test_stash_works_in_a_test_case():
    """A test that runs inside a transaction, as TestCase does, can stash and read the result."""
    outbox.stash(_record())
    assert Outbox.objects.count() == 1


@pytest.mark.django_db
def test_one_record_is_one_query(django_assert_num_queries):
    """A stash costs one statement."""
    with django_assert_num_queries(1):
        outbox.stash(_record())


@pytest.mark.django_db
def test_ten_thousand_records_are_one_batch():
    """stash_many of 10,000 records is one statement batch and keeps their order."""
    with CaptureQueriesContext(connection) as queries:
        outbox.stash_many(_record(str(number), headers={"n": str(number)}) for number in range(10_000))
    assert len(queries) == 1
    assert list(Outbox.objects.order_by("id").values_list("kafka_key", flat=True)) == list(map(str, range(10_000)))


@pytest.mark.django_db
def test_no_records_are_no_query(django_assert_num_queries):
    """An empty stash_many sends no statement."""
    with django_assert_num_queries(0):
        outbox.stash_many([])


@pytest.mark.django_db
def test_every_field_is_stored_as_given():
    """Values and header values are kept byte for byte, text as UTF-8; the database sets the time."""
    every_byte = bytes(range(256))
    headers = [("trace", every_byte), ("name", "Zoë ☃"), ("empty", b""), ("none", None), ("trace", b"again")]
    outbox.stash(_record("Schlüssel %s", value=every_byte, headers=headers, partition=3))
    row = Outbox.objects.get()
    assert (row.kafka_topic, row.kafka_key, row.kafka_value) == ("orders", "Schlüssel %s", every_byte)
    assert row.headers == tuple(
        outbox.Header(name, text.encode() if isinstance(text, str) else text) for name, text in headers
    )
    assert (row.kafka_partition, row.leader_id) == (3, None)
    assert row.create_time is not None


def _text_table():
    connection.cursor().execute(create_table_sql(TableName("text_outbox"), "text"))
    return outbox.OutboxTable("text_outbox", layout=TEXT_LAYOUT)


@pytest.mark.django_db
def test_a_further_table():
    """An OutboxTable writes to its own table, goharvest's layout included, with the same rules."""
    table = _text_table()
    table.stash(_record("a", value="text", headers={"h": "v"}))
    table.stash_many([_record("b", value=None)])
    with connection.cursor() as cursor:
        cursor.execute("SELECT kafka_key, kafka_value, kafka_header_values FROM text_outbox ORDER BY id")
        assert cursor.fetchall() == [("a", "text", ["v"]), ("b", None, [])]
    assert Outbox.objects.count() == 0


@pytest.mark.django_db
def test_payloads_in_the_same_transaction():
    """A claim store in a table of the same database has the payload in Django's transaction, and loses it with that."""
    store = TableStore(None, with_record=True)
    table = outbox.OutboxTable("outbox", claim_store=store, claim_check_above=3)
    with connection.cursor() as cursor:
        cursor.execute(store.create_sql)
        with _failing_atomic():
            table.stash(_record("a", value=b"large"))
        table.stash_many([_record("b", value=b"large"), _record("c", value=b"abc")])
        cursor.execute("SELECT payload FROM outbox_claim")
        assert [bytes(payload) for (payload,) in cursor.fetchall()] == [b"large"]
    assert list(Outbox.objects.order_by("id").values_list("kafka_value", flat=True)) == [b"", b"abc"]


@pytest.mark.django_db
def test_what_does_not_fit_the_table_is_refused_before_any_sql(django_assert_num_queries):
    """One record that does not fit makes stash_many send no statement at all."""
    table = _text_table()
    with django_assert_num_queries(0), pytest.raises(outbox.InvalidRecord, match="bytes do not fit a text column"):
        table.stash_many([_record("a", value="text"), _record("b", value=b"bytes")])


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_further_table_wants_a_transaction_as_well():
    """An OutboxTable refuses autocommit, and names its database."""
    with pytest.raises(outbox.TransactionRequired, match="'other'"):
        outbox.OutboxTable("billing", using="other").stash(_record())


@pytest.mark.django_db
def test_the_setting_names_table_and_layout(settings):
    """OUTBOX["TABLE"] and ["LAYOUT"] decide the table and layout that `stash` writes."""
    _text_table()
    settings.OUTBOX = {"TABLE": "text_outbox", "LAYOUT": "text"}
    outbox.stash(_record(value="text"))
    with connection.cursor() as cursor:
        cursor.execute("SELECT kafka_value FROM text_outbox")
        assert cursor.fetchall() == [("text",)]


def test_commit_rings_for_an_embedded_harvester():
    """The commit of a transaction that stashed signals once; a rollback does not signal."""
    rings = []
    leave = commit_signal.subscribe(lambda: rings.append(_keys()))
    try:
        with transaction.atomic():
            outbox.stash(_record("a"))
            with transaction.atomic():
                outbox.stash_many([_record("b"), _record("c")])
            assert not rings
        assert rings == [["a", "b", "c"]]
        with _failing_atomic():
            outbox.stash(_record("d"))
        with transaction.atomic():
            with _failing_atomic():
                outbox.stash(_record("e"))
            assert len(rings) == 1
        assert len(rings) == 1
    finally:
        leave()


def test_nobody_to_ring_for():
    """Without a harvester in the process a stash leaves no callback in the transaction."""
    with transaction.atomic():
        outbox.stash(_record())
        assert not connection.run_on_commit
