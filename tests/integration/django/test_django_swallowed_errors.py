"""Success is what the database says, in Django: `consume` and `idempotent` behind handlers that swallow errors."""

import json
from contextlib import suppress

import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction
from django.http import JsonResponse
from django.test import RequestFactory

import outbox_django as outbox
from outbox_core import Stasher
from outbox_core.consuming import Consumed
from outbox_core.testing import in_memory_outbox
from outbox_core.testing.kafka import InProcessKafka
from outbox_django.models import Inbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db(transaction=True)


def execute(sql):
    """Run a statement past Django's own book of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute(sql)


def caught():
    Group.objects.create(name="before")
    with suppress(Exception):
        Group.objects.create(name="taken")


def caught_in_a_cursor():
    Group.objects.create(name="before")
    with suppress(Exception):
        execute("INSERT INTO auth_group (name) VALUES ('taken')")


def caught_and_went_on():
    caught_in_a_cursor()
    with suppress(Exception):
        Group.objects.create(name="after")


def set_rollback():
    Group.objects.create(name="before")
    transaction.set_rollback(True)


def inner_block_without_savepoint():
    Group.objects.create(name="before")
    with suppress(Exception), transaction.atomic(savepoint=False):
        Group.objects.create(name="taken")


def raw_rollback():
    Group.objects.create(name="before")
    execute("ROLLBACK")


def raw_rollback_and_more():
    raw_rollback()
    Group.objects.create(name="after")


def raw_commit_and_more():
    Group.objects.create(name="before")
    execute("COMMIT")
    Group.objects.create(name="after")


def aborted_savepoint():
    execute("SAVEPOINT inner_one")
    caught_in_a_cursor()


def savepoint():
    Group.objects.create(name="before")
    with suppress(Exception), transaction.atomic():
        Group.objects.create(name="taken")
    Group.objects.create(name="after")


_kept = []


def groups_in_a_block():
    with transaction.atomic():
        yield from Group.objects.select_for_update()


def suspended_generator():
    """Keep a generator that is inside a block."""
    _kept.append(groups_in_a_block())
    next(_kept[-1])
    Group.objects.create(name="before")


WRONG = [
    suspended_generator,
    caught,
    caught_in_a_cursor,
    caught_and_went_on,
    set_rollback,
    inner_block_without_savepoint,
    raw_rollback,
    raw_rollback_and_more,
    raw_commit_and_more,
    aborted_savepoint,
]


@pytest.fixture(autouse=True)
def taken():
    """A group whose name is taken."""
    Group.objects.create(name="taken")
    yield
    _kept.clear()


def found():
    """Return the groups that a handler has left, and the number of acceptances; a transaction is over."""
    assert not connection.in_atomic_block
    groups = Group.objects.exclude(name="taken").order_by("name")
    return list(groups.values_list("name", flat=True)), Inbox.objects.count()


@pytest.mark.parametrize("handle", [*WRONG, savepoint])
def test_consume(handle):
    """A record whose handler swallows an error is not handled; with a savepoint it is."""
    with in_memory_outbox(require_transaction=False) as stashed:
        Stasher().stash(None, outbox.OutboxRecord("groups", "k", "v"))
        kafka = InProcessKafka(stashed)
        consumer = kafka.consumer("groups")
        run = lambda: outbox.consume(consumer, lambda _: handle(), stop=consumer.drained)  # noqa: E731
        if handle is savepoint:
            assert run() == Consumed(handled=1, repeats=0)
            assert (found(), kafka.position("test")) == ((["after", "before"], 1), 1)
            return
        with pytest.raises(outbox.AcceptanceLost, match="savepoint") as raised:
            run()
        assert raised.value.__notes__ == ["while handling groups[0] at offset 0, attempt 1"]
        assert kafka.position("test") == 0
        assert found() == ((["before"], 1) if handle is raw_commit_and_more else ([], 0))


def test_consume_after_an_error_inside_a_generator():
    """An error whose traceback keeps a generator inside a block is rolled back, and is handled again."""
    with in_memory_outbox(require_transaction=False) as stashed:
        Stasher().stash(None, outbox.OutboxRecord("groups", "k", "v"))
        kafka = InProcessKafka(stashed)
        consumer, failures = kafka.consumer("groups"), [1]

        def handle(_):
            groups = groups_in_a_block()
            for _group in groups:
                Group.objects.create(name="before")
                if failures:
                    raise LookupError(failures.pop())

        with pytest.raises(LookupError) as raised:  # kept, as a log or a debugger keeps it
            outbox.consume(consumer, handle, stop=consumer.drained)
        assert found() == ([], 0)
        assert raised.value.__notes__
        assert outbox.consume(consumer, handle, stop=consumer.drained) == Consumed(handled=1, repeats=0)
        assert (found(), kafka.position("test")) == ((["before"], 1), 1)


@pytest.mark.parametrize("surrounding", ["autocommit", "ATOMIC_REQUESTS"])
@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("handle", [*WRONG, savepoint])
def test_idempotent(handle, key, surrounding):
    """A view that swallows an error answers 500 instead of 201, with a key or without, and nothing is kept."""

    @outbox.idempotent("groups-api", repeated=lambda _: JsonResponse({}, status=500))
    def view(_):
        handle()
        return JsonResponse({}, status=201)

    asks = transaction.atomic(view) if surrounding == "ATOMIC_REQUESTS" else view
    headers = {} if key is None else {"Idempotency-Key": key}
    request = RequestFactory().post("/", headers=headers)
    if handle is savepoint:
        assert asks(request).status_code == 201
        assert found() == (["after", "before"], int(key is not None))
        return
    with pytest.raises(outbox.AcceptanceLost, match="savepoint"):
        asks(request)
    is_kept = handle is raw_commit_and_more
    assert found() == (["before"] * is_kept, int(is_kept and key is not None))


@pytest.mark.parametrize("key", ["k", None])
def test_a_refusal_keeps_nothing(key):
    """An answer of 400 or more rolls back, with a key or without, and the stash of the view with the rest."""

    @outbox.idempotent("groups-api", repeated=lambda _: JsonResponse({}, status=500))
    def view(request):
        Group.objects.create(name="before")
        outbox.stash(outbox.OutboxRecord("groups", "k", "v"))
        return JsonResponse({}, status=json.loads(request.body))

    def post(status):
        headers = {} if key is None else {"Idempotency-Key": key}
        return view(RequestFactory().post("/", status, content_type="application/json", headers=headers)).status_code

    assert post(422) == 422
    assert found() == ([], 0)
    assert post(201) == 201
    assert found() == (["before"], int(key is not None))
