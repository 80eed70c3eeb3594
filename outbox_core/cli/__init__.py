"""The command `outbox`: `schema`, `harvest`, `status`, `doctor`, `peek`, `hold`, `console` and what `--help` lists.

Other packages add commands by entry points of the group `outbox.commands`: a function that takes the arguments behind
the command's name and returns the exit code.

Exit codes: 0 for success, 2 for an error before work began (arguments, settings, an unreachable service, a missing
table), 1 for a harvester that an error ended, for a doctor that found a problem and for what was not confirmed, 3 to 5
for services that did not answer `status` or `doctor`, 130 for Ctrl-C, and 130 and 143 for a second SIGINT or SIGTERM
where the first one drains. Each failure is one line on stderr, beginning with `outbox: error:`; settings have a line
for each mistake.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from outbox_core import __version__
from outbox_core.cli import claims, completion, console, doctor, harvest, hold, inbox, peek, restash, schema
from outbox_core.cli.terminal import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, FULL, drop_output, hide_values
from outbox_core.errors import MissingExtra, OutboxError

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = "outbox.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_output()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OutboxError as error:
        return harvest.fail_with(error)
    except KeyboardInterrupt:
        return harvest.fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # `outbox schema | head`
        drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        drop_output()
        return harvest.fail(f"the output cannot be written: {error.strerror}")
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `outbox`, with its subcommands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="outbox", description="A transactional outbox for PostgreSQL and Kafka."
    )
    parser.add_argument("--version", action="version", version=f"kafka-outbox {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    schema.add_command(commands)
    harvest.add_command(commands)
    doctor.add_commands(commands)
    peek.add_command(commands)
    hold.add_command(commands)
    console.add_command(commands)
    restash.add_command(commands)
    inbox.add_command(commands)
    claims.add_command(commands)
    completion.add_command(commands, parser)
    for added in entry_points(group=_COMMANDS):
        commands.add_parser(added.name, help=f"see outbox {added.name} --help")
    return parser


def _prepare_output() -> None:
    """Have output that no one can read discarded, and escape what the terminal's encoding lacks: a key, say."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `outbox harvest >&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the right word for a wrong one, as Python's own does from 3.14 on."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what a command does not know by the command's own usage, with a like option of it."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with code 2."""
        wrong = re.search(r"invalid choice: '([^']+)' \(choose from (.*)\)$", message)
        choices = wrong[2].replace("'", "").split(", ") if wrong else []
        close = difflib.get_close_matches(wrong[1], choices, 1) if wrong else []
        message = hide_values(message)
        super().error(f"{message}; did you mean {close[0]!r}?" if close else message)


def _run(arguments: list[str]) -> int:
    for added in entry_points(group=_COMMANDS):
        if arguments[:1] == [added.name]:
            return _run_added(added, arguments[1:])
    options = build_parser().parse_args(arguments)
    code: int = options.command(options)
    return code


def _run_added(added: EntryPoint, arguments: list[str]) -> int:
    try:
        main_of_command = added.load()
    except ImportError as error:
        if (error.name or "").startswith("outbox_"):
            raise
        raise MissingExtra(
            f"needs {error.name or error}, which is not installed; pip install 'kafka-outbox[{added.name}]'"
        ) from None
    code: int = main_of_command(arguments)
    return code
