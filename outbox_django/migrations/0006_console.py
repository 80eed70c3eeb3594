"""The console in the admin, and the permission to stash dead letters anew. It has no table."""

from django.db import migrations


class Migration(migrations.Migration):
    """The model without a table."""

    dependencies = (("outbox_django", "0005_history"),)

    operations = (
        migrations.CreateModel(
            name="Console",
            fields=[],
            bases=("outbox_django.outbox",),
            options={
                "proxy": True,
                "default_permissions": (),
                "permissions": (("restash_dead_letter", "Can stash dead letters anew"),),
                "verbose_name": "console",
                "verbose_name_plural": "console",
            },
        ),
    )
