"""Commands of shell blocks, read by the parsers of the programs themselves: a wrong option or command is an error."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module

from tests.docs.blocks import ROOT

NOT_RUN = {
    "kafka-acls.sh": "the tools of Kafka are not among the jars of the devstack",
    "kafka-configs.sh": "the same",
    "kafka-topics.sh": "the same",
    "kafka-transactions.sh": "the same",
    "kafka-consumer-groups.sh": "the same",
    "kubectl": "needs a cluster",
    "docker": "needs an engine",
    "psql": "not among the development tools",
    "spark-submit": "needs a cluster",
    "spark-class": "needs machines; devstack/spark.py runs the same commands",
    "alembic": "tests/integration/sqlalchemy/test_alembic.py runs it",
    "celery": "runs until it is stopped; tests/docs runs the task",
    "uvicorn": "runs until it is stopped; tests/docs runs the application",
    "flask": "runs until it is stopped; tests/docs runs the application",
    "curl": "asks a server that the block started",
    "python": "an application of the reader's, or a module of the checkout",
    "python3": "the same",
    "sleep": "a shell's own",
    "export": "a shell's own",
    "unset": "a shell's own",
    "set": "a shell's own",
    "cat": "a shell's own",
    "cd": "a shell's own",
    "kill": "a shell's own",
    "wait": "a shell's own",
    ".": "a shell's own",
}
"""Commands of others, with the reason why no test runs them."""

_OPERATORS = {"|", "&", "&&", "||", ";", ">", "<", ">>"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of a block, without prompts, comments, redirections and assignments."""
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        yield from _split(list(lexer))


def _split(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    is_target = False  # of a redirection
    for word in [*words, ";"]:
        if is_target:
            is_target = False
        elif word in {">", "<", ">>"}:
            is_target = True
        elif word in _OPERATORS:
            while command and re.fullmatch(r"\w+=.*", command[0]):
                del command[0]
            if command:
                yield command
            command = []
        else:
            command.append(word)


def check(command: list[str]) -> None:
    """Parse a command as its program would; raise ValueError for one that nothing here knows."""
    program, *arguments = command
    program = program.rpartition("/")[2] if program.startswith((".venv/", "/srv/")) else program
    if program == "outbox":
        _parse_outbox(arguments)
    elif program == "outbox-spark":
        from outbox_spark.cli import build_parser as spark_parser

        spark_parser().parse_args(["archive" if word == "NAME" else word for word in arguments])
    elif program == "make":
        _check_targets(arguments)
    elif program == "pip":
        check_extras(" ".join(arguments))
    elif _is_manage(command):
        _parse_manage(command[command.index(next(word for word in command if word.endswith("manage.py"))) + 1 :])
    elif command[:3] == ["python", "-m", "devstack"] or command[1:3] == ["-m", "devstack"]:
        from devstack.__main__ import _parser

        _parser().parse_args(command[3:])
    elif program not in NOT_RUN and program not in {"pytest", "pre-commit", "ls"}:
        raise ValueError(
            f"{program}: tests/docs/shell.py does not know this command; add it to NOT_RUN with the reason"
        )


def _parse_outbox(arguments: list[str]) -> None:
    from outbox_core.cli import build_parser

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    added = project["entry-points"]["outbox.commands"].get(arguments[0])
    if added is not None:  # not from the installed metadata, which an editable install does not renew
        import_module(added.partition(":")[0]).build_parser().parse_args(arguments[1:])
    else:
        build_parser().parse_args(arguments)


def _is_manage(command: list[str]) -> bool:
    return any(word.endswith("manage.py") for word in command[:2])


def _parse_manage(arguments: list[str]) -> None:
    from django.core.management import get_commands, load_command_class

    name, *options = arguments
    app = get_commands().get(name)
    if app is None:  # a command of an application of the examples
        if not list(ROOT.glob(f"example_project/**/management/commands/{name}.py")):
            raise ValueError(f"manage.py has no command {name}")
        return
    made = load_command_class(app, name) if isinstance(app, str) else app
    parser: argparse.ArgumentParser = made.create_parser("manage.py", name)
    parser.parse_args(options)


def _check_targets(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = [word for word in arguments if "=" not in word and word not in targets]
    if unknown:
        raise ValueError(f"the Makefile has no target {', '.join(unknown)}")


def check_extras(text: str) -> None:
    """Check that the extras that a text asks pip for exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"kafka-outbox\[([\w,-]+)\]", text):
        unknown = set(extras.split(",")) - set(project["optional-dependencies"])
        if unknown:
            raise ValueError(f"the package has no extra {', '.join(unknown)}")
