"""Products and their stock; each change is announced by a receiver."""

from django.db import models
from django.db.models.signals import post_save
from django.dispatch import receiver

import outbox_django as outbox


class Stock(models.Model):
    """The stock of a product."""

    product = models.TextField(primary_key=True)
    number = models.IntegerField()

    def __str__(self):
        return f"{self.product}: {self.number}"


@receiver(post_save, sender=Stock)
def announce(instance, *, raw, **_):
    """Announce a change, but not the loading of a fixture."""
    if not raw:
        outbox.stash(outbox.OutboxRecord("stock", instance.product, {"number": instance.number}))
