"""The inbox table, under the name that OUTBOX["INBOX_TABLE"] gives it."""

from django.db import migrations, models

from outbox_django.settings import inbox_model_table


class Migration(migrations.Migration):
    """The table, with its index for pruning."""

    dependencies = (("outbox_django", "0001_initial"),)

    operations = (
        migrations.CreateModel(
            name="Inbox",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "source", "message_id", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("source", models.TextField()),
                ("message_id", models.TextField()),
                ("accept_time", models.DateTimeField(db_default=models.Func(function="now"), db_index=True)),
            ],
            options={
                "db_table": inbox_model_table(),
                "required_db_vendor": "postgresql",
                "verbose_name": "accepted message",
                "verbose_name_plural": "accepted messages",
            },
        ),
    )
