"""The table of task results."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The table, with its index for pruning."""

    initial = True

    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="Result",
            fields=[
                ("id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("task_path", models.TextField(verbose_name="task")),
                ("queue_name", models.TextField(verbose_name="queue")),
                ("backend", models.TextField()),
                ("status", models.CharField(max_length=10)),
                ("args", models.JSONField(default=list)),
                ("kwargs", models.JSONField(default=dict)),
                ("run_after", models.DateTimeField(null=True)),
                ("enqueued_at", models.DateTimeField(null=True)),
                ("started_at", models.DateTimeField(null=True)),
                ("last_attempted_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("return_value", models.JSONField(null=True)),
                ("errors", models.JSONField(default=list)),
                ("worker_ids", models.JSONField(default=list)),
            ],
            options={
                "db_table": "outbox_task_result",
                "required_db_vendor": "postgresql",
                "verbose_name": "task result",
                "verbose_name_plural": "task results",
                "indexes": [
                    models.Index(
                        fields=["finished_at"],
                        condition=models.Q(finished_at__isnull=False),
                        name="outbox_task_result_finished",
                    )
                ],
            },
        ),
    )
