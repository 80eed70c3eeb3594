"""`manage.py send_emails`: a worker that sends the shop's e-mails."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import close_old_connections

from example_project.shop.emails import order_emails, send_confirmation
from outbox_queue import Message


class Command(BaseCommand):
    """A door onto `example_project.shop.emails`."""

    help = "Send the e-mails of orders, until SIGTERM. Needs `outbox queue tracker` for those that fail."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the number of concurrent e-mails."""
        parser.add_argument("--concurrency", type=int, default=4, help="threads (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Work until a signal stops it."""
        del args
        order_emails().run(_in_a_fresh_connection, concurrency=options["concurrency"])


def _in_a_fresh_connection(message: Message) -> None:
    """Handle a message with a fresh database connection, as threads live longer than connections."""
    close_old_connections()
    try:
        send_confirmation(message)
    finally:
        close_old_connections()
