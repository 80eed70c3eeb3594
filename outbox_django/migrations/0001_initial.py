"""The outbox table, under the name that OUTBOX["TABLE"] gives it."""

from django.db import migrations, models
from django.db.models.expressions import RawSQL

from outbox_django.fields import PostgresArrayField
from outbox_django.operations import SetStorageParameters
from outbox_django.settings import model_table


class Migration(migrations.Migration):
    """The table, with the storage parameters of a queue."""

    initial = True

    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="Outbox",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("create_time", models.DateTimeField(db_default=models.Func(function="now"))),
                ("kafka_topic", models.CharField(max_length=249)),
                ("kafka_key", models.TextField(null=True)),
                ("kafka_value", models.BinaryField(null=True)),
                ("kafka_header_keys", PostgresArrayField(element="text", db_default=RawSQL("'{}'", ()))),
                ("kafka_header_values", PostgresArrayField(element="bytea", db_default=RawSQL("'{}'", ()))),
                ("kafka_partition", models.IntegerField(null=True)),
                ("leader_id", models.UUIDField(null=True)),
            ],
            options={
                "db_table": model_table(),
                "required_db_vendor": "postgresql",
                "verbose_name": "outbox record",
                "verbose_name_plural": "outbox records",
            },
        ),
        SetStorageParameters("Outbox"),
    )
