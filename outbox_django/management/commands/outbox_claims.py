"""`manage.py outbox_claims`: `outbox claims`, configured by the Django settings."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandParser

from outbox_core.cli.claims import DESCRIPTION, add_actions, run_claims
from outbox_core.cli.harvest import add_source_arguments, overrides_from
from outbox_django.management.doors import Door, add_database_argument, command_errors
from outbox_django.settings import outbox_settings


class Command(Door):
    """A door onto `outbox_core.claims.orphans`."""

    help = DESCRIPTION

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the actions of `outbox claims`, behind which the options stand."""
        place = argparse.ArgumentParser(add_help=False)
        add_database_argument(place)
        add_source_arguments(place)
        add_actions(parser, place)

    def handle(self, *args: Any, **options: Any) -> None:
        """List or delete orphans."""
        del args
        with command_errors():
            from outbox_django.harvesting import harvest_config

            config = harvest_config(outbox_settings(), options["database"], overrides_from(options))
            run_claims(config, self.stdout, argparse.Namespace(**options))
