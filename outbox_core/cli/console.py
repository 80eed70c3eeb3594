"""`outbox console`: the console on an address of this machine. Needs the extra `[harvester]`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outbox_core.cli.database import operator
from outbox_core.cli.harvest import add_source_arguments, missing_extra, overrides_from
from outbox_core.cli.logs import add_log_format_argument, configure_logging
from outbox_core.cli.signals import stop_on_signals
from outbox_core.cli.terminal import flush
from outbox_core.doctor.findings import CommandLine
from outbox_core.errors import InvalidConfig
from outbox_core.printable import printable
from outbox_core.schema import TableName

if TYPE_CHECKING:
    from outbox_core.config import HarvestConfig

TOKEN_VARIABLE = "OUTBOX_CONSOLE_TOKEN"  # noqa: S105  a variable's name
_HOST = "127.0.0.1"
_PORT = 8088
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DESCRIPTION = (
    "Serve a page that shows what waits, what is held and why, who leads, and what the doctor finds; with actions that "
    "release, skip and dead-letter held records, pause topics and keys, and stash dead letters anew. On the machine's "
    "own address everyone on the machine may use it; on any other it needs a token, which the page asks for once."
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `console` to the commands of `outbox`."""
    parser = commands.add_parser(
        "console", help="serve a page that shows and operates outboxes", description=_DESCRIPTION
    )
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        dest="files",
        metavar="FILE",
        help="the YAML file of `outbox harvest`; several for several outboxes, each named like its file: then neither "
        "environment variables nor options say where they are",
    )
    add_source_arguments(parser, variables=True)
    parser.add_argument("--host", default=_HOST, metavar="HOST", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=_PORT, metavar="PORT", help="0: any; default: %(default)s")
    parser.add_argument(
        "--token",
        metavar="TOKEN",
        help="what the page asks for; others see it in this machine's list of processes, so better in the environment: "
        f"{TOKEN_VARIABLE}",
    )
    parser.add_argument("--token-file", metavar="FILE", help="a file that has the token")
    parser.add_argument("--read-only", action="store_true", help="show only: nobody may act")
    add_log_format_argument(parser)
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        from outbox_core.console.console import Console
        from outbox_core.console.login import TokenLogin
        from outbox_core.console.server import ConsoleServer
    except ImportError as error:
        raise missing_extra(error) from None
    import logging

    from outbox_core.console.access import EVERYTHING, Permission, User

    configs = _configs(options)
    token = _token(options)
    permissions = frozenset({Permission.VIEW}) if options.read_only else EVERYTHING
    if token is None and options.host not in _LOOPBACK:
        raise InvalidConfig(
            f"--host {options.host}: everyone who reaches this address could act; set {TOKEN_VARIABLE}, --token-file "
            f"or --token, or listen on {_HOST}"
        )
    configure_logging(logging.INFO, options.log_format or "text")
    commands = {name: _commands(config, file) for name, (config, file) in configs.items()}
    login = None if token is None else TokenLogin(token, permissions, f"outbox_console_{options.port}")
    console = Console({name: config for name, (config, _) in configs.items()}, commands=commands, login=login)
    user = User(operator(), permissions) if token is None else None
    try:
        server = ConsoleServer(console, options.host, options.port, user)
    except (OSError, OverflowError) as error:
        raise InvalidConfig(
            f"--host {options.host} --port {options.port}: cannot listen there: {error}; --port 0 takes any free port"
        ) from None
    with server, stop_on_signals(server.stop):
        sys.stdout.write(f"console on {server.url}\n")
        flush(sys.stdout)
        server.serve()
    return 0


def _configs(options: argparse.Namespace) -> dict[str, tuple[HarvestConfig, str | None]]:
    """Return the settings of each outbox, with the file that they are from, by the name on the page."""
    try:
        from outbox_core.config import load_config, read_document
    except ImportError as error:
        raise missing_extra(error) from None
    files, overrides = options.files or [], overrides_from(vars(options))
    if len(files) < 2:
        document = read_document(files[0]) if files else None
        config = load_config(document, environ=os.environ, overrides=overrides)
        name = Path(files[0]).stem if files else str(TableName.parse(config.outbox_table))
        return {name: (config, files[0] if files else None)}
    if overrides:
        raise InvalidConfig(
            f"with several files only they say where the outboxes are; leave out {', '.join(overrides)}"
        )
    configs: dict[str, tuple[HarvestConfig, str | None]] = {}
    for file in files:
        name = Path(file).stem
        if name in configs:
            raise InvalidConfig(f"-f {file}: another is called {name}, too; rename one, as files name the outboxes")
        try:
            configs[name] = load_config(read_document(file)), file
        except InvalidConfig as error:
            raise InvalidConfig(f"-f {file}: {error}") from None
    return configs


def _commands(config: HarvestConfig, file: str | None) -> CommandLine:
    return CommandLine(str(TableName.parse(config.outbox_table)), () if file is None else ("-f", file))


def _token(options: argparse.Namespace) -> str | None:
    given: str | None = options.token
    if given is not None and options.token_file is not None:
        raise InvalidConfig("leave out either --token or --token-file")
    if options.token_file is not None:
        try:
            given = Path(options.token_file).read_text().strip()
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"--token-file {printable(options.token_file)}: cannot be read: {error}") from None
    return given if given is not None else os.environ.get(TOKEN_VARIABLE) or None
