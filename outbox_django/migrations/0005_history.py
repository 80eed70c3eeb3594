"""The tables of the outbox's history, beside the outbox."""

from django.db import migrations, models

from outbox_django.settings import event_model_table, statistics_model_table


class Migration(migrations.Migration):
    """The tables."""

    dependencies = (("outbox_django", "0004_checks"),)

    operations = (
        migrations.CreateModel(
            name="Statistics",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("create_time", models.DateTimeField(db_default=models.Func(function="now"))),
                ("outbox", models.TextField()),
                ("instance", models.TextField()),
                ("interval_seconds", models.FloatField()),
                ("published", models.BigIntegerField()),
                ("failed", models.BigIntegerField()),
                ("published_bytes", models.BigIntegerField()),
                ("deliverable", models.BigIntegerField(null=True)),
                ("deliverable_age", models.FloatField(null=True)),
                ("held", models.BigIntegerField(null=True)),
                ("held_age", models.FloatField(null=True)),
                ("latency_p50", models.FloatField(null=True)),
                ("latency_p99", models.FloatField(null=True)),
            ],
            options={
                "db_table": statistics_model_table(),
                "required_db_vendor": "postgresql",
                "verbose_name": "statistics",
                "verbose_name_plural": "statistics",
            },
        ),
        migrations.CreateModel(
            name="Event",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("create_time", models.DateTimeField(db_default=models.Func(function="now"))),
                ("outbox", models.TextField()),
                ("kind", models.TextField()),
                ("actor", models.TextField()),
                ("reason", models.TextField(db_default="")),
                ("leader_id", models.UUIDField(null=True)),
                ("term", models.BigIntegerField(null=True)),
                ("kafka_topic", models.TextField(null=True, verbose_name="topic")),
                ("kafka_key", models.TextField(null=True, verbose_name="key")),
                ("record_id", models.BigIntegerField(null=True, verbose_name="record")),
            ],
            options={
                "db_table": event_model_table(),
                "required_db_vendor": "postgresql",
                "verbose_name": "event",
                "verbose_name_plural": "events",
            },
        ),
    )
