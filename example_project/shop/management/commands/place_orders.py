"""`manage.py place_orders`: traffic for the shop."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from example_project.shop.customers import place_orders


class Command(BaseCommand):
    """A door onto `example_project.shop.customers`."""

    help = (
        "Place orders from many threads, some of which roll back; every tenth is cancelled. Prints what was done, as "
        "one line of JSON."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the number of orders, and the rest of the options."""
        parser.add_argument("--count", type=int, default=100, help="orders that commit (default: %(default)s)")
        parser.add_argument("--concurrency", type=int, default=8, help="threads (default: %(default)s)")
        parser.add_argument(
            "--rollback-share", type=float, default=0.05, help="transactions that roll back (default: %(default)s)"
        )
        parser.add_argument("--rate", type=float, help="orders per second at most (default: no limit)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Place the orders."""
        del args
        tally = place_orders(
            options["count"],
            concurrency=options["concurrency"],
            rollback_share=options["rollback_share"],
            rate=options["rate"],
        )
        self.stdout.write(json.dumps(vars(tally)))
