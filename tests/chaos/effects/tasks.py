"""A task with an effect, which is accepted, and receivers that raise."""

import random
import sys
from contextlib import suppress
from itertools import count

import django
from django.db import connection, transaction

from outbox_django import accept, confirm
from outbox_django.tasks.library import task_enqueued, task_finished, task_started
from tests.chaos.effects.misfortunes import Journal, Misfortune, Misfortunes, Place
from tests.integration.django.sample_tasks import kill_backend

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task

SOURCE = "tasks"
_RAISING = 0.02

_place = Place.of_this_process()
_journal = Journal(_place)
_misfortunes = Misfortunes(_place)
_runs = count()


def _raise():
    raise Misfortune


def _swallow_an_error():
    with suppress(django.db.IntegrityError):
        _execute("INSERT INTO orders VALUES (1)")


def _close():
    connection.connection.close()


def _turn_autocommit_off():
    transaction.set_autocommit(False)
    _execute("SELECT 1")


def _execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def _cut_and_raise():
    kill_backend()
    raise Misfortune


_BEFORE = {"cut before": (0.005, kill_backend)}
_IN = {
    "swallows an error": (0.005, _swallow_an_error),
    "is set to roll back": (0.005, lambda: transaction.set_rollback(True)),
    "raises": (0.01, _raise),
    "raises SystemExit": (0.002, lambda: sys.exit(3)),
    "cut in": (0.005, kill_backend),
    "dies in": (0.0005, _misfortunes.die),
}
_AFTER = {
    "cut after": (0.005, kill_backend),
    "cut after and raises": (0.002, _cut_and_raise),
    "closed after": (0.002, _close),
    "autocommit off after": (0.002, _turn_autocommit_off),
}
_AT_LAST = {"dies after": (0.0005, _misfortunes.die)}
_SHARES = {kind: share for when in (_BEFORE, _IN, _AFTER, _AT_LAST) for kind, (share, _) in when.items()}


@task(takes_context=True)
def work(context, number: int) -> int:
    """Have an effect, unless an earlier run had it."""
    run = next(_runs)
    _journal.note("run", run, context.task_result.id, context.task_result.worker_ids[-1])
    what = _misfortunes.of(f"task-{number}", _SHARES)
    _meet(what, _BEFORE)
    with transaction.atomic():
        if accept(SOURCE, number):
            _execute(f"INSERT INTO effect VALUES ('task-{number}')")
            _meet(what, _IN)
            confirm(SOURCE, number)
    _meet(what, _AFTER)
    _journal.note("done", run)
    _meet(what, _AT_LAST)
    return number


def _meet(what, kinds):
    """Let a misfortune happen if its time has come."""
    if what in kinds:
        kinds[what][1]()


def raise_at_times(**_):
    """Raise, as receivers of signals may."""
    if random.random() < _RAISING:
        raise Misfortune("a receiver")


for _signal in (task_enqueued, task_started, task_finished):
    _signal.connect(raise_at_times, weak=False)
