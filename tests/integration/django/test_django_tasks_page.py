"""The files of docs/how-to-django-tasks.md, as a project."""

import os
import subprocess
import sys

import django
import psycopg

from tests.integration.harvest.serving import CHECKOUT, write_files

_RUN = """
import runpy
import django
from django.core.management import call_command

django.setup()
call_command("check", "--fail-level=WARNING")
call_command("migrate", verbosity=0)
runpy.run_path("enqueue.py")
"""

_WORK = """
import django
django.setup()
from outbox_django.models import Outbox
from outbox_django.tasks.jobs import Job

for row in Outbox.objects.order_by("id"):
    print(Job.decode(bytes(row.kafka_value)).result(row.kafka_key, "default").task.name)
"""


def _output(program, directory, environment):
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_page(database, tmp_path):
    """The page's settings pass the checks, and its script enqueues three tasks, which a worker finds."""
    write_files("how-to-django-tasks.md", tmp_path, "settings.py", "tasks.py", "enqueue.py")
    if django.VERSION >= (6, 0):
        for path, old, new in (
            ("settings.py", '    "django_tasks",  # Django 5.2 only\n', ""),
            ("tasks.py", "from django_tasks import task", "from django.tasks import task"),
        ):
            content = (tmp_path / path).read_text()
            assert old in content
            (tmp_path / path).write_text(content.replace(old, new))
    environment = {
        **os.environ,
        "OUTBOX_POSTGRES_DSN": database,
        "OUTBOX_KAFKA_BOOTSTRAP": "localhost:9092",
        "DJANGO_SETTINGS_MODULE": "settings",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)]),
    }
    assert _output(_RUN, tmp_path, environment).endswith(" READY\n")
    assert _output(_WORK, tmp_path, environment).split() == ["send_confirmation", "settle", "send_confirmation"]
    with psycopg.connect(database) as connection:
        results = connection.execute("SELECT task_path, status FROM outbox_task_result ORDER BY enqueued_at").fetchall()
        keys = connection.execute("SELECT kafka_key FROM outbox ORDER BY id").fetchall()
    confirmation, settling = ("tasks.send_confirmation", "READY"), ("tasks.settle", "READY")
    assert results == [confirmation, settling, confirmation]
    assert keys == [("emails",), ("default",), ("emails",)]
