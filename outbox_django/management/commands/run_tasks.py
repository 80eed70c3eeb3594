"""`manage.py run_tasks`: a worker for the tasks of an `OutboxTaskBackend`."""

from __future__ import annotations

import argparse
import logging
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox_core.cli.harvest import EXIT_ENDED_BY_ERROR, EXIT_NOT_STARTED, sentences, shown
from outbox_core.cli.logs import add_log_format_argument, configure_logging
from outbox_core.errors import OutboxError

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class Command(BaseCommand):
    """A door onto `outbox_django.tasks.worker`."""

    help = (
        "Run the tasks that `enqueue` has put into queues, until SIGTERM: then those that run have time to finish. "
        "A second signal exits. Failed tasks are retried by a redelivery tracker: `outbox queue tracker`, or --tracker."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the backend, its queues and the number of threads."""
        parser.add_argument("--backend", default="default", metavar="ALIAS", help="in TASKS (default: %(default)s)")
        parser.add_argument(
            "--queue", action="append", metavar="NAME", help="only this queue; repeat for several (default: its QUEUES)"
        )
        parser.add_argument(
            "--concurrency", type=_count, default=4, metavar="N", help="threads for each queue (default: %(default)s)"
        )
        parser.add_argument(
            "--drain-timeout",
            type=_duration,
            default=timedelta(seconds=30),
            metavar="TIME",
            help="for running tasks at the end (default: 30s)",
        )
        parser.add_argument("--tracker", action="store_true", help="run a redelivery tracker in this process, too")
        add_log_format_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Work. Exit codes: 2 if it could not start, 1 if an error ended it or tasks did not finish in time."""
        del args
        if not logging.getLogger("outbox_queue").hasHandlers():
            configure_logging(_LEVELS[min(options["verbosity"], 2)], options["log_format"] or "text")
        try:
            backend, names = _backend_and_queues(options["backend"], options["queue"])
        except OutboxError as error:
            raise CommandError("\n".join(sentences(error)), returncode=EXIT_NOT_STARTED) from None
        from outbox_django.tasks.worker import run_tasks

        try:
            drained = run_tasks(
                backend,
                names,
                concurrency=options["concurrency"],
                drain_timeout=options["drain_timeout"],
                with_tracker=options["tracker"],
            )
        except OutboxError as error:
            raise CommandError(shown(error), returncode=EXIT_ENDED_BY_ERROR) from None
        if not drained:
            message = "tasks did not finish within --drain-timeout; others run them again"
            raise CommandError(message, returncode=EXIT_ENDED_BY_ERROR)


def _backend_and_queues(alias: str, names: list[str] | None) -> tuple[Any, list[str]]:
    try:
        from outbox_django.tasks.backend import OutboxTaskBackend
        from outbox_django.tasks.library import task_backends
    except ModuleNotFoundError as error:
        raise CommandError(str(error), returncode=EXIT_NOT_STARTED) from None
    if alias not in task_backends.settings:
        raise CommandError(f"TASKS has no {alias!r}", returncode=EXIT_NOT_STARTED)
    backend = task_backends[alias]
    if not isinstance(backend, OutboxTaskBackend):
        message = f"TASKS[{alias!r}] is a {type(backend).__name__}, which has workers of its own"
        raise CommandError(message, returncode=EXIT_NOT_STARTED)
    if backend.queues and (unknown := set(names or ()) - backend.queues):
        message = f"TASKS[{alias!r}] has no queue {min(unknown)!r}; its QUEUES are {sorted(backend.queues)}"
        raise CommandError(message, returncode=EXIT_NOT_STARTED)
    chosen = list(dict.fromkeys(names or sorted(backend.queues)))
    if not chosen:
        message = f"TASKS[{alias!r}] has no QUEUES, and takes any: name them by --queue"
        raise CommandError(message, returncode=EXIT_NOT_STARTED)
    for name in chosen:
        backend.queue(name)  # wrong settings are errors now
    return backend, chosen


def _duration(text: str) -> timedelta:
    from outbox_core.config.durations import parse_duration  # needs pydantic, of the extra [queue]

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return number
