"""The Django application."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The shop."""

    name = "example_project.shop"
    label = "shop"
    verbose_name = "Shop"
