"""The outbox, its holds, its history and the inbox as Django models: for migrations, the admin, and tests.

Write with `outbox_django.stash` and `accept`, which validate and insist on a transaction.
"""

from __future__ import annotations

from django.db import models
from django.db.models.expressions import RawSQL

from outbox_core.record import Header
from outbox_django.fields import KeyField, PostgresArrayField, TimeField
from outbox_django.settings import (
    event_model_table,
    hold_model_table,
    inbox_model_table,
    model_table,
    statistics_model_table,
)

__all__ = [
    "Console",
    "Event",
    "Hold",
    "Inbox",
    "Outbox",
    "Statistics",
]


class Outbox(models.Model):
    """A record that waits to be published. The columns are those of `outbox_core.schema`."""

    id = models.BigAutoField(primary_key=True)
    # Written as now(), not as CURRENT_TIMESTAMP, so that the catalog equals that of the other schema routes.
    create_time = TimeField(db_default=models.Func(function="now"))
    kafka_topic = models.CharField(max_length=249)
    kafka_key = KeyField(null=True)  # NULL: no key, no order
    kafka_value = models.BinaryField(null=True)  # NULL: a tombstone
    kafka_header_keys = PostgresArrayField(element="text", db_default=RawSQL("'{}'", ()))
    kafka_header_values = PostgresArrayField(element="bytea", db_default=RawSQL("'{}'", ()))
    kafka_partition = models.IntegerField(null=True)  # NULL: the partitioner decides
    leader_id = models.UUIDField(null=True)  # NULL: not in flight

    value_begin: bytes | None = None
    """The beginning of its value, for its page in the admin."""

    class Meta:
        """Only PostgreSQL has the table; other databases are left alone by `migrate`."""

        db_table = model_table()
        required_db_vendor = "postgresql"
        verbose_name = "outbox record"
        verbose_name_plural = "outbox records"

    def __str__(self) -> str:
        return f"{self.kafka_topic} #{self.pk}"

    @property
    def headers(self) -> tuple[Header, ...]:
        """The record's headers, in order."""
        # Not strict: a row that is held for its numbers of names and values has to be shown.
        pairs = zip(self.kafka_header_keys, self.kafka_header_values, strict=False)
        return tuple(Header(key, _as_bytes(value)) for key, value in pairs)


class Hold(models.Model):
    """A topic, key or record that the harvester does not publish. The columns are those of `outbox_core.schema`."""

    id = models.BigAutoField(primary_key=True)
    outbox = models.TextField()
    kafka_topic = models.TextField("topic")
    kafka_key = KeyField("key", null=True)  # NULL: no key is named
    record_id = models.BigIntegerField("record", null=True)
    reason = models.TextField(db_default="")
    error = models.TextField(null=True)  # noqa: DJ001  NULL: Kafka said nothing
    dead_letter = models.BooleanField(db_default=False)
    create_time = TimeField(db_default=models.Func(function="now"))

    was_held = False
    """True for one that the admin added although it was there."""

    class Meta:
        """Only PostgreSQL has the table; other databases are left alone by `migrate`."""

        db_table = hold_model_table()
        required_db_vendor = "postgresql"
        verbose_name = "hold"
        verbose_name_plural = "holds"

    def __str__(self) -> str:
        if self.record_id is not None:
            return f"record {self.record_id} of {self.kafka_topic}"
        if self.kafka_key is None:
            return f"topic {self.kafka_topic}"
        return f"key {self.kafka_key} of {self.kafka_topic}"


class Statistics(models.Model):
    """Ten seconds of the leader's work. The columns are those of `outbox_core.schema`."""

    id = models.BigAutoField(primary_key=True)
    create_time = TimeField(db_default=models.Func(function="now"))
    outbox = models.TextField()
    instance = models.TextField()
    interval_seconds = models.FloatField()
    published = models.BigIntegerField()
    failed = models.BigIntegerField()
    published_bytes = models.BigIntegerField()
    deliverable = models.BigIntegerField(null=True)
    deliverable_age = models.FloatField(null=True)
    held = models.BigIntegerField(null=True)
    held_age = models.FloatField(null=True)
    latency_p50 = models.FloatField(null=True)
    latency_p99 = models.FloatField(null=True)

    class Meta:
        """Only PostgreSQL has the table; other databases are left alone by `migrate`."""

        db_table = statistics_model_table()
        required_db_vendor = "postgresql"
        verbose_name = "statistics"
        verbose_name_plural = "statistics"

    def __str__(self) -> str:
        return f"{self.create_time}: {self.published} published"


class Event(models.Model):
    """A change of leadership or of a hold. The columns are those of `outbox_core.schema`."""

    id = models.BigAutoField(primary_key=True)
    create_time = TimeField(db_default=models.Func(function="now"))
    outbox = models.TextField()
    kind = models.TextField()
    actor = models.TextField()
    reason = models.TextField(db_default="")
    leader_id = models.UUIDField(null=True)
    term = models.BigIntegerField(null=True)
    kafka_topic = models.TextField("topic", null=True)  # noqa: DJ001  NULL: about no topic
    kafka_key = KeyField("key", null=True)  # NULL: about no key
    record_id = models.BigIntegerField("record", null=True)

    class Meta:
        """Only PostgreSQL has the table; other databases are left alone by `migrate`."""

        db_table = event_model_table()
        required_db_vendor = "postgresql"
        verbose_name = "event"
        verbose_name_plural = "events"

    def __str__(self) -> str:
        return f"{self.kind} by {self.actor}"


class Console(Outbox):
    """The console in the admin. It has no table of its own: Django's admin and permissions are about models."""

    class Meta:
        """Nothing is migrated but the permission. A proxy, as `dumpdata` would read the table of any other model."""

        proxy = True
        default_permissions = ()
        permissions = (("restash_dead_letter", "Can stash dead letters anew"),)
        verbose_name = "console"
        verbose_name_plural = "console"

    def __str__(self) -> str:
        return "console"


class Inbox(models.Model):
    """A message that was accepted. The columns are those of `outbox_core.schema`."""

    pk = models.CompositePrimaryKey("source", "message_id")
    source = models.TextField()
    message_id = models.TextField()
    accept_time = models.DateTimeField(db_default=models.Func(function="now"), db_index=True)

    class Meta:
        """Only PostgreSQL has the table; other databases are left alone by `migrate`."""

        db_table = inbox_model_table()
        required_db_vendor = "postgresql"
        verbose_name = "accepted message"
        verbose_name_plural = "accepted messages"

    def __str__(self) -> str:
        return f"{self.message_id} of {self.source}"


def _as_bytes(value: memoryview | bytes | str | None) -> bytes | str | None:
    """Return the value as psycopg 3 gives it; psycopg2 gives memory views."""
    return bytes(value) if isinstance(value, memoryview) else value
