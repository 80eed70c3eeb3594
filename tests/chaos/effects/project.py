"""The Django project of a run: `python -m tests.chaos.effects.project COMMAND`.

Beside Django's commands it has one of its own, `enqueue COUNT`: threads enqueue so many tasks, in transactions of one
to four. A transaction that is rolled back, and one in which a receiver raised, are made anew, with tasks of their own.
Each transaction writes the ids of its tasks into a table, too.
"""

import os
import random
import sys
from contextlib import suppress
from importlib import import_module

from django.core.management import execute_from_command_line
from django.db import connection, transaction

from tests.acceptance.task_project import configure, in_threads
from tests.chaos.effects.misfortunes import Misfortune

AGES = {
    "for ever": {"CONN_MAX_AGE": None},
    "checked": {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True},
    "a request": {"CONN_MAX_AGE": 0},
}
"""The lifetime of Django's connections in a process with this TEST_AGE."""
_THREADS = 4
_ROLLED_BACK = 1 / 5


def main():
    """Run a command."""
    configure(**AGES[os.environ.get("TEST_AGE", "for ever")])
    import_module("tests.chaos.effects.tasks")  # which is of no installed application
    if sys.argv[1] == "enqueue":
        enqueue(int(sys.argv[2]))
    else:
        execute_from_command_line(["manage.py", *sys.argv[1:]])


def enqueue(count):
    """Enqueue so many tasks."""

    def work(some):
        while not _enqueue_together(some):
            pass

    in_threads(_THREADS, count, work)


def _enqueue_together(numbers):
    """Enqueue tasks in one transaction; return whether it was committed."""
    from tests.chaos.effects.tasks import work

    with suppress(Misfortune), transaction.atomic(), connection.cursor() as cursor:
        for number in numbers:
            cursor.execute("INSERT INTO committed VALUES (%s, %s)", [number, work.enqueue(number).id])
        is_rolled_back = random.random() < _ROLLED_BACK
        if is_rolled_back:
            transaction.set_rollback(True)
        return not is_rolled_back
    return False


if __name__ == "__main__":
    main()
