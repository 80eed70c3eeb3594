"""`manage.py outbox_restash` and `outbox_claims`: the archive and the claim store of a Django project."""

import io

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

import outbox_django as outbox
from outbox_core.retention.archive import RESTASH_HEADER, archive_statements
from outbox_core.schema import TableName
from outbox_django.models import Outbox
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db


def command(*arguments, **options):
    """Return the output of a command."""
    told = io.StringIO()
    call_command(*arguments, **options, stdout=told)
    return told.getvalue()


@pytest.fixture
def archive():
    """Make the archive, with two records of orders."""
    with connection.cursor() as cursor:
        for statement in archive_statements(TableName("outbox")):
            cursor.execute(statement)
        for key in ("a", "b"):
            outbox.stash(outbox.OutboxRecord("orders", key=key, value=b"v"))
        cursor.execute("INSERT INTO outbox_archive SELECT *, now(), false FROM outbox")
    Outbox.objects.all().delete()


@pytest.mark.usefixtures("archive")
def test_restash():
    """It counts with --dry-run, stashes what the options name, and takes keyword arguments of call_command."""
    assert "would stash 2 records" in command("outbox_restash", "--topic", "orders", "--since", "1h", "--dry-run")
    assert Outbox.objects.count() == 0
    assert command("outbox_restash", "--topic", "orders", "--key", "b") == "stashed 1 record of topic orders anew\n"
    record = Outbox.objects.get()
    assert (record.kafka_key, record.headers[0].key) == ("b", RESTASH_HEADER)
    assert "would stash 2 records" in command("outbox_restash", topic="orders", since="1h", dry_run=True)
    with pytest.raises(CommandError, match="is neither a time"):
        command("outbox_restash", topic="orders", until="yesterday")


def test_restash_without_an_archive():
    """Without an archive the error names what makes one in Django."""
    with pytest.raises(CommandError, match=r"no table \S*outbox_archive.* ArchivePublished\(\)") as raised:
        command("outbox_restash", "--topic", "orders")
    assert raised.value.returncode == 2


@pytest.mark.django_db(transaction=True)
def test_claims(kafka_bootstrap, make_topic, tmp_path):
    """Old payloads that no record names are listed, and deleted."""
    name = f"{make_topic()}/20200101T000000Z-{'0' * 32}"
    payload = tmp_path / name
    payload.parent.mkdir()
    payload.write_bytes(b"large")
    options = ("--store", str(tmp_path), "--older-than", "2d", "--bootstrap-servers", kafka_bootstrap)
    assert command("outbox_claims", "list", *options) == f"{name}\n"
    assert payload.exists()
    assert command("outbox_claims", "delete", *options) == f"{name}\n"
    assert not payload.exists()
