"""Orders have addresses, and customers keys, with which their addresses are encrypted in messages."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Add the column, and the table of keys."""

    dependencies = (("shop", "0002_idempotency_key"),)

    operations = (
        migrations.CreateModel(
            name="CustomerKey",
            fields=[
                ("customer", models.CharField(max_length=80, primary_key=True, serialize=False)),
                ("key", models.BinaryField()),
            ],
        ),
        migrations.AddField(
            model_name="order",
            name="address",
            field=models.CharField(blank=True, default="", max_length=200),
        ),
    )
