"""The table of the outbox's holds, beside the outbox."""

from django.db import migrations, models

from outbox_django.settings import hold_model_table


class Migration(migrations.Migration):
    """The table."""

    dependencies = (("outbox_django", "0002_inbox"),)

    operations = (
        migrations.CreateModel(
            name="Hold",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("outbox", models.TextField()),
                ("kafka_topic", models.TextField(verbose_name="topic")),
                ("kafka_key", models.TextField(null=True, verbose_name="key")),
                ("record_id", models.BigIntegerField(null=True, verbose_name="record")),
                ("reason", models.TextField(db_default="")),
                ("error", models.TextField(null=True)),
                ("dead_letter", models.BooleanField(db_default=False)),
                ("create_time", models.DateTimeField(db_default=models.Func(function="now"))),
            ],
            options={
                "db_table": hold_model_table(),
                "required_db_vendor": "postgresql",
                "verbose_name": "hold",
                "verbose_name_plural": "holds",
            },
        ),
    )
