"""Orders remember the Idempotency-Key of their request."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Add the column, and the index by which a repeated request finds its order."""

    dependencies = (("shop", "0001_initial"),)

    operations = (
        migrations.AddField(
            model_name="order",
            name="idempotency_key",
            field=models.CharField(blank=True, default="", max_length=1000),
        ),
        migrations.AddIndex(
            model_name="order",
            index=models.Index(
                condition=models.Q(("idempotency_key", ""), _negated=True),
                fields=["idempotency_key"],
                name="shop_order_idempotency_key",
            ),
        ),
    )
