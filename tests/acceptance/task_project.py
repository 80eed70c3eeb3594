"""A Django project whose tasks go through the outbox: `python -m tests.acceptance.task_project COMMAND`.

Its environment names the services and the topics. Beside Django's commands it has one of its own,
`enqueue JOURNAL COUNT [MARK]`: it migrates, and threads enqueue so many tasks, from 0 on, in concurrent transactions
of one to four, of which a third rolls back after everything was written. Each transaction writes its tasks' numbers
into a table, too. With MARK half of the tasks come behind one that kills its worker, once.
"""

import json
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import django
from django.conf import settings
from django.core.management import call_command, execute_from_command_line
from django.db import connection, transaction
from psycopg.conninfo import conninfo_to_dict

_THREADS = 8
_ROLLED_BACK = 1 / 3


def main():
    """Run a command."""
    configure()
    import_module("tests.integration.django.sample_tasks")  # which is of no installed application
    if sys.argv[1] == "enqueue":
        enqueue(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        execute_from_command_line(["manage.py", *sys.argv[1:]])


def configure(**database):
    """Configure Django by the environment; `database` has settings of the connection that differ."""
    server = conninfo_to_dict(os.environ["TEST_DATABASE"])
    settings.configure(
        INSTALLED_APPS=["outbox_django", "outbox_django.tasks"],
        OUTBOX={
            "KAFKA": {"bootstrap.servers": os.environ["TEST_KAFKA"]},
            "LEADER_TOPIC": os.environ["TEST_LEADER_TOPIC"],
            "LIMITS": {"heartbeat_timeout": "3s"},
        },
        TASKS={
            "default": {
                "BACKEND": "outbox_django.tasks.OutboxTaskBackend",
                "QUEUES": ["default", "second"],
                "OPTIONS": {"queue": json.loads(os.environ["TEST_QUEUE"])},
            }
        },
        USE_TZ=True,
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": server["dbname"],
                "USER": server["user"],
                "PASSWORD": server.get("password", ""),
                "HOST": server["host"],
                "PORT": server["port"],
                "CONN_MAX_AGE": None,
                **database,
            }
        },
    )
    django.setup()


def in_threads(number, count, work):
    """Call `work` on so many threads with one to four numbers at a time, until all below `count` are done."""
    numbers = iter(range(count))
    lock = threading.Lock()

    def take():
        with lock:
            return [each for _, each in zip(range(random.randint(1, 4)), numbers, strict=False)]

    def run(_):
        try:
            while some := take():
                work(some)
        finally:
            connection.close()

    with ThreadPoolExecutor(number) as threads:
        list(threads.map(run, range(number)))


def enqueue(journal, count, mark=None):
    """Enqueue tasks that append their number to the journal, and perhaps one that kills its worker."""
    from tests.integration.django.sample_tasks import kill_worker_once

    def work(some):
        if mark and count // 2 in some:
            kill_worker_once.enqueue(mark)
        _enqueue_together(journal, some)

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE committed (number integer PRIMARY KEY)")
    in_threads(_THREADS, count, work)


def _enqueue_together(journal, numbers):
    from tests.integration.django.sample_tasks import append_line

    with transaction.atomic(), connection.cursor() as cursor:
        for number in numbers:
            cursor.execute("INSERT INTO committed VALUES (%s)", [number])
            append_line.enqueue(journal, str(number))
        if random.random() < 0.05:
            time.sleep(random.uniform(0, 0.1))  # others with higher ids commit before
        if random.random() < _ROLLED_BACK:
            transaction.set_rollback(True)


if __name__ == "__main__":
    main()
