"""The findings of `outbox doctor`, each with its remedy, and the commands that remedies name."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal, Protocol

Service = Literal["database", "kafka"]


class Verdict(Enum):
    """The judgement of a finding: fine, worth a look, or in the way of harvesting."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One examined thing, named in a word or two.

    A remedy that can be typed begins with a statement of SQL, or has a command in backquotes.
    """

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""  # empty if it is fine
    unanswered: Service | None = None  # the service that did not answer, so that more is not known

    def as_json(self) -> dict[str, Any]:
        """Return the finding as JSON can have it."""
        return asdict(self) | {"verdict": self.verdict.value}


def fine(subject: str, detail: str) -> Finding:
    """Return a finding without anything to do."""
    return Finding(subject, Verdict.OK, detail)


def warning(subject: str, detail: str, remedy: str) -> Finding:
    """Return a finding with which harvesting works, but not as well as it could, or not for long."""
    return Finding(subject, Verdict.WARNING, detail, remedy)


def problem(subject: str, detail: str, remedy: str) -> Finding:
    """Return a finding with which harvesting cannot work, or would lose or reorder records."""
    return Finding(subject, Verdict.PROBLEM, detail, remedy)


def unanswered(subject: str, service: Service, detail: str, remedy: str) -> Finding:
    """Return the finding that a service does not answer."""
    return Finding(subject, Verdict.PROBLEM, detail, remedy, service)


class Commands(Protocol):
    """The commands that remedies name: those of the program that the user has run."""

    @property
    def harvest(self) -> str:
        """The command that starts a harvester."""

    def hold(self, arguments: str) -> str:
        """Return the command for holds."""

    def make_tables(self) -> str:
        """Return the command that makes the outbox and its holds, where they are missing."""

    def add_checks(self, layout: str) -> str:
        """Return the command that adds the CHECK constraints."""

    def add_trigger(self) -> str:
        """Return what adds the trigger for `notify`."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The commands of `outbox`, with the options that lead them to the same outbox.

    Args:
        table: the outbox table as the user named it.
        options: further options of the user's that say where the database is, `("-f", "outbox.yaml")`. No secrets.
    """

    table: str = "outbox"
    options: tuple[str, ...] = ()

    @property
    def harvest(self) -> str:
        """The command that starts a harvester."""
        return self._typed("harvest")

    def hold(self, arguments: str) -> str:
        """Return the command for holds."""
        return self._typed(f"hold {arguments}")

    def make_tables(self) -> str:
        """Return the command that makes the outbox and its holds, where they are missing."""
        return self._typed("schema --apply")

    def add_checks(self, layout: str) -> str:
        """Return the command that adds the CHECK constraints."""
        chosen = "" if layout == "binary" else f" --layout {layout}"
        return self._typed(f"schema --apply --only checks{chosen}")

    def add_trigger(self) -> str:
        """Return the command that adds the trigger for `notify`."""
        return self._typed("schema --apply --notify")

    def _typed(self, arguments: str) -> str:
        table = () if self.table == "outbox" else ("--table", self.table)
        return f"`outbox {arguments}{''.join(f' {shlex.quote(word)}' for word in (*self.options, *table))}`"


@dataclass(frozen=True, slots=True)
class ManagePy:
    """The commands of a Django project, with the options that lead them to the same outbox.

    Args:
        database: Django's alias; "" for the one that needs no option.
        table: the outbox table if it is not that of the settings, which the project's own migrations make.
    """

    database: str = ""
    table: str = ""

    @property
    def harvest(self) -> str:
        """The command that starts a harvester."""
        return self._typed("run_harvester", self.table)

    def hold(self, arguments: str) -> str:
        """Return the command for holds."""
        return self._typed(f"outbox_hold {arguments}", self.table)

    def make_tables(self) -> str:
        """Return the command that makes the outbox and its holds, where they are missing."""
        return self._migration("") if self.table else self._typed("migrate outbox_django")

    def add_checks(self, layout: str) -> str:
        """Return the command that adds the CHECK constraints."""
        return self._migration(f" --only checks --layout {layout}") if self.table else self.make_tables()

    def add_trigger(self) -> str:
        """Return what adds the trigger for `notify`."""
        if self.table:
            return self._migration(" --notify")
        return "a migration with the operation `NotifyOnInsert()` of outbox_django.operations"

    def _migration(self, options: str) -> str:
        return f"a migration that runs the SQL of `outbox schema{options} --table {shlex.quote(self.table)}`"

    def _typed(self, arguments: str, table: str = "") -> str:
        named = {"--database": self.database, "--table": table}
        options = (f" {option} {shlex.quote(value)}" for option, value in named.items() if value)
        return f"`manage.py {arguments}{''.join(options)}`"
