"""The outbox table as a Django model: for migrations, the admin, and looking at it in tests.

Write with `outbox_django.stash`, which validates and insists on a transaction; read with the model.
"""

from __future__ import annotations

from django.db import models
from django.db.models.expressions import RawSQL

from outbox_core.record import Header
from outbox_django.fields import PostgresArrayField
from outbox_django.settings import model_table


class Outbox(models.Model):
    """A record that waits to be published. The columns are those of `outbox_core.schema`."""

    id = models.BigAutoField(primary_key=True)
    # Written as now(), not as CURRENT_TIMESTAMP, so that the catalog equals that of the other schema routes.
    create_time = models.DateTimeField(db_default=models.Func(function="now"))
    kafka_topic = models.CharField(max_length=249)
    kafka_key = models.TextField(null=True)  # noqa: DJ001  NULL: no key, no order
    kafka_value = models.BinaryField(null=True)  # NULL: a tombstone
    kafka_header_keys = PostgresArrayField(element="text", db_default=RawSQL("'{}'", ()))
    kafka_header_values = PostgresArrayField(element="bytea", db_default=RawSQL("'{}'", ()))
    kafka_partition = models.IntegerField(null=True)  # NULL: the partitioner decides
    leader_id = models.UUIDField(null=True)  # NULL: not in flight

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
        pairs = zip(self.kafka_header_keys, self.kafka_header_values, strict=True)
        return tuple(Header(key, _as_bytes(value)) for key, value in pairs)


def _as_bytes(value: memoryview | bytes | str | None) -> bytes | str | None:
    """The value as psycopg 3 gives it; psycopg2 gives memory views."""
    return bytes(value) if isinstance(value, memoryview) else value
