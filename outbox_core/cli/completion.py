"""`outbox completion`: the script with which a shell completes commands and options. Needs the extra `[completion]`."""

from __future__ import annotations

import argparse
import sys

from outbox_core.errors import MissingExtra

SHELLS = ("bash", "zsh", "fish")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser) -> None:
    """Add `completion` to the commands of `outbox`, whose parser is `whole`."""
    parser = commands.add_parser(
        "completion",
        help="print the script with which a shell completes commands and options",
        description="Print a script for a shell. For bash: "
        "outbox completion bash > ~/.local/share/bash-completion/completions/outbox",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")

    def command(options: argparse.Namespace) -> int:
        try:
            import shtab
        except ImportError:
            raise MissingExtra("needs shtab, which is not installed; pip install 'kafka-outbox[completion]'") from None
        sys.stdout.write(shtab.complete(whole, options.shell) + "\n")
        return 0

    parser.set_defaults(command=command)
