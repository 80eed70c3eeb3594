"""The shop's own suite."""

import pytest
from django.core.management import call_command
from shop.models import Stock

from outbox_django import TransactionRequired
from outbox_django.models import Inbox, Outbox

pytestmark = pytest.mark.django_db(transaction=True)

KEY = {"Idempotency-Key": "k"}


def kept():
    """Count stocks, records and acceptances."""
    return [model.objects.count() for model in (Stock, Outbox, Inbox)]


def test_a_change_is_announced(client, outbox_records):
    """The request's transaction is the stash's."""
    assert client.post("/change/pen/7").status_code == 201
    outbox_records.assert_stashed("stock", key="pen", value={"number": 7})
    assert kept() == [1, 1, 0]


def test_a_view_that_raises(client, outbox_records):
    """Nothing is kept, and nothing announced."""
    client.raise_request_exception = False
    assert client.post("/change/pen/700").status_code == 500
    outbox_records.assert_not_stashed()
    assert kept() == [0, 0, 0]


@pytest.mark.parametrize("headers", [KEY, {}], ids=["key", "no key"])
def test_an_answer_that_refuses(client, headers):
    """A refused request keeps and announces nothing, with a key or without."""
    assert client.post("/once/pen/700", headers=headers).status_code == 422
    assert kept() == [0, 0, 0]


def test_a_repeat(client):
    """A request with the key of an earlier one is answered from that."""
    for number in (7, 8):
        answer = client.post(f"/once/pen/{number}", headers=KEY)
        assert (answer.status_code, answer.json()) == (201, {"number": 7})
    assert kept() == [1, 1, 1]


def test_outside_of_requests():
    """A command or a shell needs a transaction of its own, and is told so."""
    with pytest.raises(TransactionRequired, match=r"atomic\(\)"):
        Stock.objects.create(product="pen", number=1)


def test_migrations_and_checks():
    """The host's migrations are complete, and Django's checks find nothing."""
    call_command("makemigrations", "outbox_django", check=True, dry_run=True)
    call_command("check", databases=["default"], fail_level="WARNING")
