"""`manage.py forget_customer NAME`: erase the addresses of a customer, also from Kafka."""

from django.core.management.base import BaseCommand, CommandParser

from example_project.shop.privacy import forget


class Command(BaseCommand):
    """The command."""

    help = "Erase the addresses of a customer: in the orders, and by deleting their key in all messages."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the customer."""
        parser.add_argument("customer", help="the name, as in the orders")

    def handle(self, *_: object, customer: str, **__: object) -> None:
        """Run it."""
        self.stdout.write(f"{forget(customer)} orders without an address now; no message shows one any more")
