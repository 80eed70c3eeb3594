"""The command `outbox`.

`schema` prints DDL, `harvest` publishes an outbox's records, `status` shows what waits, `doctor` looks for what is
wrong, `inbox prune` forgets old messages.

Exit codes: 0 for success, 2 for anything wrong before work began (arguments, settings, a service that cannot be
reached, a table that is not there), 1 for a harvester that was ended by an error and for a doctor who found a problem,
130 and 143 after a second SIGINT or SIGTERM. Each failure is one line on stderr, beginning with `outbox: error:`.

Nothing here needs more than the base install until `outbox harvest` or `outbox inbox` is run.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from outbox_core import __version__
from outbox_core.cli import doctor, harvest, inbox, schema
from outbox_core.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = build_parser().parse_args(argv)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except OutboxError as error:
        return harvest.fail(str(error))
    except BrokenPipeError:  # `outbox schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of `outbox`, with its subcommands."""
    parser = argparse.ArgumentParser(prog="outbox", description="A transactional outbox for PostgreSQL and Kafka.")
    parser.add_argument("--version", action="version", version=f"kafka-outbox {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    schema.add_command(commands)
    harvest.add_command(commands)
    doctor.add_commands(commands)
    inbox.add_command(commands)
    return parser
