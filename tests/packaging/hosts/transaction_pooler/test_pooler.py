"""The project's own suite."""

import os
from io import StringIO

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections, transaction

import outbox_django as outbox
from outbox_django.models import Inbox, Outbox

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "direct"])

COMMANDS = ["outbox_hold list", "outbox_peek", "prune_inbox --older-than 1d", "run_harvester --drain"]


def stash(number):
    """Stash some records."""
    with transaction.atomic():
        outbox.stash_many(
            outbox.OutboxRecord(os.environ["HOST_TOPIC"], key=str(key), value=b"v") for key in range(number)
        )


def test_applications_go_through_the_pooler():
    """Records are stashed and requests accepted in transactions of the pooler's."""
    with connections["default"].cursor() as cursor:
        assert cursor.connection.info.port != connections["direct"].settings_dict["PORT"]
    stash(3)
    for is_new in (True, False):
        with transaction.atomic():
            assert outbox.accept("api", "k") == is_new
            if is_new:
                outbox.confirm("api", "k")
    assert (Outbox.objects.count(), Inbox.objects.count()) == (3, 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_the_direct_way(command):
    """Commands, the harvester among them, work without an option."""
    stash(1)
    call_command(*command.split(), stdout=StringIO())
    assert Outbox.objects.count() == (0 if "harvester" in command else 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_the_pooler(command, settings):
    """Without the setting they are refused, and told why."""
    settings.OUTBOX = {name: value for name, value in settings.OUTBOX.items() if name != "DIRECT_DATABASE"}
    with pytest.raises((CommandError, SystemExit)) as refused:
        call_command(*command.split())
    if isinstance(refused.value, CommandError):
        assert "pool_mode=transaction" in str(refused.value)
    else:
        assert refused.value.code == 2


def test_the_console_takes_the_direct_way(admin_client):
    """The console in the admin shows the table and its records."""
    stash(1)
    console = "/admin/outbox_django/console/api/outboxes/outbox"
    (record,) = admin_client.get(f"{console}/records").json()["data"]["records"]
    assert record["topic"] == os.environ["HOST_TOPIC"]
    assert "unknown" not in str(admin_client.get(console).json())


def test_checks():
    """Django's checks find nothing."""
    call_command("check", databases=list(settings.DATABASES), fail_level="WARNING")
