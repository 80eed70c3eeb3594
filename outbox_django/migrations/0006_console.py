"""The console in the admin, and the permission to stash dead letters anew. It has no table."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The model without a table."""

    dependencies = (("outbox_django", "0005_history"),)

    operations = (
        migrations.CreateModel(
            name="Console",
            fields=[("id", models.BigAutoField(primary_key=True, serialize=False))],
            options={
                "managed": False,
                "default_permissions": (),
                "permissions": (("restash_dead_letter", "Can stash dead letters anew"),),
                "verbose_name": "console",
                "verbose_name_plural": "console",
            },
        ),
    )
