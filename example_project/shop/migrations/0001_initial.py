"""Products and orders, and the histories of both."""

import uuid

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    """Make the tables."""

    initial = True

    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("customer", models.CharField(max_length=80)),
                (
                    "status",
                    models.CharField(
                        choices=[("placed", "Placed"), ("cancelled", "Cancelled")], default="placed", max_length=10
                    ),
                ),
                ("total_cents", models.PositiveIntegerField()),
                ("placed_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="Product",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=80)),
                ("price_cents", models.PositiveIntegerField()),
                ("stock", models.PositiveIntegerField()),
                ("movements_count", models.PositiveIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name="OrderLine",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("quantity", models.PositiveIntegerField()),
                ("price_cents", models.PositiveIntegerField()),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="lines", to="shop.order"
                    ),
                ),
                ("product", models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, to="shop.product")),
            ],
        ),
        migrations.CreateModel(
            name="OrderEvent",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField()),
                ("status", models.CharField(choices=[("placed", "Placed"), ("cancelled", "Cancelled")], max_length=10)),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="events", to="shop.order"
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("order", "number"), name="shop_orderevent_numbered")],
            },
        ),
        migrations.CreateModel(
            name="StockMovement",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("number", models.PositiveIntegerField()),
                ("quantity", models.IntegerField()),
                ("stock_after", models.PositiveIntegerField()),
                ("order", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="shop.order")),
                (
                    "product",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="movements", to="shop.product"
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("product", "number"), name="shop_stockmovement_numbered")
                ],
            },
        ),
    )
