"""The outbox's CHECK constraints: NOT VALID on a table that was in use, until `VALIDATE CONSTRAINT` is run."""

from django.db import migrations

from outbox_django.operations import AddChecks


class Migration(migrations.Migration):
    """The constraints, added under a short lock."""

    dependencies = (("outbox_django", "0003_hold"),)

    operations = (
        AddChecks(
            "Outbox",
            checks={
                "outbox_id_in_range": "id > 0 AND id < 9223372036854775807",
                "outbox_create_time_in_range": (
                    "create_time >= '1970-01-01 00:00:00+00' AND create_time < '9999-01-01 00:00:00+00'"
                ),
                "outbox_headers_in_pairs": "cardinality(kafka_header_keys) = cardinality(kafka_header_values)",
                "outbox_partition_in_range": "kafka_partition >= 0",
            },
        ),
    )
