"""Django's tasks over the outbox on a real Postgres: enqueuing, results, one attempt at a time, checks and admin."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from http import HTTPStatus
from io import StringIO
from uuid import uuid4

import psycopg
import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, transaction
from django.utils import timezone
from django.utils.functional import lazystr
from django.utils.safestring import mark_safe

from outbox_core.errors import InvalidConfig, InvalidRecord, RowsHidden, TransactionRequired
from outbox_core.schema import TableName, create_table_sql
from outbox_django.models import Outbox
from outbox_django.tasks import OutboxTaskBackend, results, worker
from outbox_django.tasks.library import (
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_finished,
    task_started,
)
from outbox_django.tasks.models import Result
from outbox_django.tasks.worker import TaskAborted, TaskRunner, TransactionLeftOpen
from outbox_queue import Reject
from outbox_queue.consuming.delivery import Delivery, ReceivedMessage
from outbox_queue.consuming.message import Message
from outbox_queue.protocol.headers import DELIVER_AT
from tests.integration.django import sample_tasks
from tests.integration.django.django_fixtures import django_db_modify_db_settings

__all__ = ["django_db_modify_db_settings"]

pytestmark = pytest.mark.django_db(transaction=True)


class _Undo(Exception):
    """The exception that rolls a block back."""


@pytest.fixture
def without_results(settings):
    """Keep no results: the application of the table is not installed."""
    settings.INSTALLED_APPS = [name for name in settings.INSTALLED_APPS if name != "outbox_django.tasks"]


@pytest.fixture
def finished():
    """The results that `task_finished` has brought."""
    results = []

    def receive(task_result, **_):
        results.append(task_result)

    task_finished.connect(receive)
    yield results
    task_finished.disconnect(receive)


def _seen_elsewhere(model):
    """Count the rows that another session sees."""
    seen = []

    def look():
        seen.append(model.objects.count())
        connections["default"].close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen[0]


def _stashed():
    """Return the latest stashed message: its queue, and its job."""
    row = Outbox.objects.latest("id")
    return row.kafka_key, json.loads(bytes(row.kafka_value))


class _Acks:
    """A recorder of messages that are given back."""

    def __init__(self):
        self.nacks = []

    def nack(self, _delivery, delay_ms, _reason, *, counts):
        self.nacks.append((delay_ms, counts))


def _run(*, attempt=1, max_attempts=10, payload=None, row=None, acks=None):
    """Run the latest stashed task, or this payload, as a worker that has received its message."""
    row = row or Outbox.objects.latest("id")
    received = ReceivedMessage(
        row.kafka_key, payload or bytes(row.kafka_value), (), attempt, max_attempts, (0, 0), (0, 0), 0
    )
    message = Message(Delivery(received, 0, b"q", float("inf")), acks)
    TaskRunner(task_backends["default"], f"worker-{attempt}")(message)


def test_a_task_commits_and_rolls_back_with_its_transaction():
    """Message and result exist once the transaction commits, not before, and never if it rolls back."""
    with transaction.atomic():
        sample_tasks.noop.enqueue(1, two={"three": [4]})
        assert (_seen_elsewhere(Outbox), _seen_elsewhere(Result)) == (0, 0)
    assert (_seen_elsewhere(Outbox), _seen_elsewhere(Result)) == (1, 1)
    with suppress(_Undo), transaction.atomic():
        sample_tasks.noop.enqueue()
        raise _Undo
    with transaction.atomic():
        with suppress(_Undo), transaction.atomic():  # a savepoint
            sample_tasks.noop.enqueue()
            raise _Undo
        sample_tasks.add.enqueue(1)
    assert (Outbox.objects.count(), Result.objects.count()) == (2, 2)
    queue, job = _stashed()
    assert (queue, job["task"], job["args"]) == ("second", "tests.integration.django.sample_tasks.add", [1])


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_transaction_of_another_database_is_refused(settings):
    """A task that a rollback would not undo is refused; in a transaction of both databases it is written."""
    settings.OUTBOX = {"DATABASE": "other"}
    with transaction.atomic(), pytest.raises(TransactionRequired, match=r"of database 'default'.*using='other'"):
        sample_tasks.noop.enqueue()
    assert not Outbox.objects.using("other").exists()
    with transaction.atomic(), transaction.atomic(using="other"):
        sample_tasks.noop.enqueue()
    assert Outbox.objects.using("other").count() == 1


def test_outside_a_transaction_a_task_is_durable_at_once():
    """`enqueue` without a transaction commits one of its own."""
    sample_tasks.noop.enqueue()
    assert (_seen_elsewhere(Outbox), _seen_elsewhere(Result)) == (1, 1)


def test_the_result_of_enqueuing():
    """`get_result` reads what `enqueue` returned; results of others are not found."""
    result = sample_tasks.noop.enqueue(1, two=[3])
    backend = task_backends["default"]
    assert isinstance(backend, OutboxTaskBackend)
    assert result == backend.get_result(result.id) == sample_tasks.noop.get_result(result.id)
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [1], {"two": [3]})
    assert (result.attempts, result.is_finished, result.started_at) == (0, False, None)
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result("123")


async def _enqueue_and_read():
    result = await sample_tasks.add.aenqueue(1, right=2)
    again = await sample_tasks.add.aget_result(result.id)
    await result.arefresh()
    return result, again


def test_tasks_are_enqueued_asynchronously():
    """`aenqueue` and `aget_result` do what their synchronous sisters do."""
    result, again = async_to_sync(_enqueue_and_read)()
    assert result == again
    assert Outbox.objects.count() == 1


@pytest.mark.usefixtures("without_results")
def test_results_are_kept_only_in_their_table(django_assert_num_queries):
    """Without the application there is no table to write to, and reading a result is refused as Django refuses it."""
    with transaction.atomic(), django_assert_num_queries(1):
        result = sample_tasks.noop.enqueue("\0")
    assert not task_backends["default"].supports_get_result
    with pytest.raises(NotImplementedError):
        task_backends["default"].get_result(result.id)
    _run(attempt=3)
    assert (Outbox.objects.count(), Result.objects.count()) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"number": Decimal(1)}, r"noop: argument 'kwargs': not JSON.*Decimal.*primary key"),
        ({"number": float("nan")}, "not JSON"),
        ({"number": {1: 2}}, "keys of a dict must be text"),
        ({"number": {"a": [timezone.now()]}}, "not JSON.*datetime"),
        ({"number": {"a": ["b\0"]}}, "can keep no NUL"),
        ({"number": {"\ud800": 1}}, "can keep no NUL, and nothing that UTF-8 lacks"),
    ],
)
def test_arguments_that_are_not_json_are_refused(arguments, said):
    """An argument that would not arrive as it was given is refused before anything is written."""
    with pytest.raises(TypeError, match=said):
        sample_tasks.noop.enqueue(**arguments)
    assert Outbox.objects.count() == 0


class Shop(str, Enum):  # noqa: UP042  its text is its name
    """An application's names."""

    OUTLET = "outlet"


@pytest.mark.parametrize(
    "value",
    [Shop.OUTLET, mark_safe("outlet"), {Shop.OUTLET: [Shop.OUTLET]}, HTTPStatus.OK, True, 1e23, -0.0, 5e-324, 2**70],
)
def test_arguments_of_types_of_callers(value):
    """They arrive as the JSON that they are, which is that of the row, too, and the task runs."""
    result = sample_tasks.noop.enqueue(value, named=value)
    assert _stashed()[1]["args"] == [value]
    _run(max_attempts=1)
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL


def test_text_that_is_not_there_yet():
    """A lazy text is refused, as its language would be that of whoever sends it; nothing is written."""
    with pytest.raises(TypeError, match="not JSON"):
        sample_tasks.noop.enqueue(lazystr("outlet"))
    assert Outbox.objects.count() == 0


def test_arguments_that_the_task_does_not_take_are_refused():
    """A call that could only fail in the worker fails where it is made; the context is not an argument."""
    with pytest.raises(TypeError, match=r"sample_tasks\.add: missing a required argument: 'left'"):
        sample_tasks.add.enqueue()
    with pytest.raises(TypeError, match="argument 'name': not JSON"):
        sample_tasks.attempt_of.enqueue(object())
    sample_tasks.attempt_of.enqueue("a")
    assert _stashed()[1]["args"] == ["a"]


def test_a_deferred_task_waits():
    """`run_after` delays the message; one that comes early is stashed again instead of run."""
    soon = timezone.now() + timedelta(hours=1)
    sample_tasks.noop.using(run_after=soon).enqueue()
    row = Outbox.objects.get()
    assert _deliver_at(row) == pytest.approx(soon.timestamp() * 1000, abs=1000)
    late = timezone.now() + timedelta(days=30)  # longer than max_delay
    result = sample_tasks.noop.using(run_after=late).enqueue()
    row = Outbox.objects.latest("id")
    assert _deliver_at(row) < late.timestamp() * 1000 - 86_400_000
    _run(row=row)
    again = Outbox.objects.latest("id")
    assert again.pk != row.pk
    assert bytes(again.kafka_value) == bytes(row.kafka_value)
    result.refresh()
    assert (result.status, result.attempts, result.task.run_after) == (TaskResultStatus.READY, 0, late)
    sample_tasks.noop.using(run_after=timezone.now() - timedelta(days=1)).enqueue()
    assert DELIVER_AT not in Outbox.objects.latest("id").kafka_header_keys


def test_tasks_are_spread_over_partitions(settings):
    """With their number, a message names a partition, except in a table of goharvest, which has no column for it."""
    options = {"queue": {**settings.TASKS["default"]["OPTIONS"]["queue"], "message_partitions": 4}}
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": options}}
    sample_tasks.noop.enqueue()
    assert Outbox.objects.get().kafka_partition in range(4)
    settings.OUTBOX = {"TABLE": "text_outbox", "LAYOUT": "text"}
    connection = connections["default"]
    with transaction.atomic():
        connection.cursor().execute(create_table_sql(TableName("text_outbox"), "text"))
        sample_tasks.noop.enqueue("ö")
        task_backends["default"].queue("jobs").stash(connection, b"{}", headers={"h": b"1"})
        with pytest.raises(InvalidRecord, match="bytes do not fit a text column"):
            task_backends["default"].queue("jobs").stash(connection, b"\xff")
        with connection.cursor() as cursor:
            cursor.execute("SELECT kafka_key, kafka_value, kafka_header_values FROM text_outbox ORDER BY id")
            (queue, task, _), job = cursor.fetchall()
        transaction.set_rollback(True)
    assert (queue, json.loads(task)["args"], job) == ("default", ["ö"], ("jobs", "{}", ["1"]))
    assert Outbox.objects.count() == 1


def _deliver_at(row):
    return int(bytes(row.kafka_header_values[row.kafka_header_keys.index(DELIVER_AT)]))


def test_a_task_that_succeeds(finished):
    """A run keeps the return value, and a successful task does not run again."""
    result = sample_tasks.add.enqueue(1, right=2)
    _run()
    result.refresh()
    assert (result.status, result.return_value, result.worker_ids) == (TaskResultStatus.SUCCESSFUL, 3, ["worker-1"])
    assert result.enqueued_at <= result.started_at <= result.finished_at
    _run(attempt=2)
    result.refresh()
    assert (result.attempts, [each.id for each in finished]) == (1, [result.id])


def test_a_task_that_fails(finished):
    """Each failed attempt is kept with its traceback; the last one finishes the task, which may be requeued."""
    result = sample_tasks.fail.enqueue("no way")
    for attempt in (1, 2):
        with pytest.raises(ValueError, match="no way"):
            _run(attempt=attempt, max_attempts=2)
        result.refresh()
        assert result.status == (TaskResultStatus.READY, TaskResultStatus.FAILED)[attempt - 1]
        assert len(finished) == attempt - 1
    assert [error.exception_class for error in result.errors] == [ValueError] * 2
    assert "no way" in result.errors[0].traceback
    assert result.worker_ids == ["worker-1", "worker-2"]
    with pytest.raises(ValueError, match="no way"):
        _run(attempt=1)
    result.refresh()
    assert (result.status, result.attempts, result.finished_at) == (TaskResultStatus.READY, 3, None)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_an_outage_of_the_database_uses_up_no_attempt(monkeypatch, meanwhile):
    """Also its last attempt comes again uncounted, whether the database is away before the task begins or after."""
    monkeypatch.setattr(worker, "_OUTAGE_PAUSE_SECONDS", 0.0)
    result, row, acks = sample_tasks.without_database.enqueue(meanwhile), Outbox.objects.latest("id"), _Acks()
    parameters = connections["default"].settings_dict
    port = parameters["PORT"]
    try:
        if not meanwhile:
            sample_tasks.cut_database()
        _run(max_attempts=1, row=row, acks=acks)
    finally:
        parameters["PORT"] = port
    assert acks.nacks == [(10_000, False)]
    result.refresh()
    assert (result.status, result.errors) == (TaskResultStatus.RUNNING if meanwhile else TaskResultStatus.READY, [])


@pytest.mark.parametrize("moment", ["begin", "write"])
def test_a_database_that_says_nothing_keeps_no_worker(monkeypatch, caplog, moment):
    """Counting an attempt and keeping its result go on over a new connection after a deadline, with one log line."""
    monkeypatch.setattr("outbox_django.databases.SHORT_SECONDS", 1.0)
    sample_tasks.noop.enqueue()
    stopped = []

    def freeze(*given):
        connection = connections["default"]
        connection.ensure_connection()
        monkeypatch.setattr(results, moment, original)
        pid = connection.connection.info.backend_pid
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)
        return original(*given)

    original = getattr(results, moment)
    monkeypatch.setattr(results, moment, freeze)
    try:
        _run()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    (line,) = [record.getMessage() for record in caplog.records if "was given up" in record.getMessage()]
    assert "has not answered for 1 s (the " in line
    result = Result.objects.get()
    assert (result.status, result.worker_ids) == (TaskResultStatus.SUCCESSFUL, ["worker-1"])


@pytest.mark.parametrize("name", ["killed", "closed"])
def test_a_task_that_outlives_its_connection(name):
    """A task whose connection is lost meanwhile has succeeded all the same, at its only attempt."""
    result = sample_tasks.lose_connection.enqueue(name)
    _run(max_attempts=1)
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, name, 1)


def test_a_task_that_fails_without_a_connection():
    """Its own error is kept, and not that of the connection."""
    result = sample_tasks.lose_connection.enqueue("fails")
    with pytest.raises(ValueError, match="after the connection was lost"):
        _run(max_attempts=1)
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == (TaskResultStatus.FAILED, ValueError)


def test_a_connection_that_was_lost_between_two_tasks():
    """An idle connection that the server has ended costs no attempt."""
    result = sample_tasks.noop.enqueue()
    row = Outbox.objects.latest("id")
    sample_tasks.kill_backend()
    _run(max_attempts=1, row=row)
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)


@pytest.mark.parametrize("moment", ["begin", "write"])
def test_a_pool_whose_connections_were_all_lost(monkeypatch, moment):
    """Several connections in turn that were lost while they were idle, in a pool, cost no attempt and no second run."""
    result = sample_tasks.make_group.enqueue("once")
    row = Outbox.objects.latest("id")
    connection, original = connections["default"], getattr(results, moment)
    connect, lost = connection.get_new_connection, []
    given = connection.get_connection_params()
    other = {name: given[name] for name in ("host", "port", "user", "password", "dbname") if name in given}

    def take(parameters):
        made = connect(parameters)
        if len(lost) < 4:
            lost.append(made.info.backend_pid)
            with psycopg.connect(**other, autocommit=True) as killer:
                killer.execute("SELECT pg_terminate_backend(%s, 5000)", [made.info.backend_pid])
        return made

    def begin_to_lose(*given):
        monkeypatch.setattr(results, moment, original)
        monkeypatch.setattr(connection, "get_new_connection", take)
        connection.close()
        return original(*given)

    monkeypatch.setattr(results, moment, begin_to_lose)
    _run(max_attempts=1, row=row)
    result.refresh()
    assert (result.status, result.attempts, len(lost), Group.objects.count()) == (TaskResultStatus.SUCCESSFUL, 1, 4, 1)


@pytest.mark.parametrize("has_table", [True, False])
@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_database_that_is_read_only(monkeypatch, settings, moment, has_table):
    """A server that has become read-only takes no attempt, whether a task has begun before or not."""
    for name in ("_OUTAGE_PAUSE_SECONDS", "_PATIENCE_SECONDS"):
        monkeypatch.setattr(worker, name, 0.0)
    if not has_table:
        settings.INSTALLED_APPS = [name for name in settings.INSTALLED_APPS if name != "outbox_django.tasks"]
    sample_tasks.make_group.enqueue("none")
    row, acks, connection = Outbox.objects.latest("id"), _Acks(), connections["default"]
    connection.close()

    def refuse_writes(**_):
        connection.close()
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"options": "-c default_transaction_read_only=on"})

    if moment == "before":
        refuse_writes()
    else:
        task_started.connect(refuse_writes)
    try:
        _run(max_attempts=1, row=row, acks=acks)
    finally:
        task_started.disconnect(refuse_writes)
        monkeypatch.undo()
        connection.close()
    assert (acks.nacks, Group.objects.count()) == ([(10_000, False)], 0)


def test_a_session_that_was_left_read_only(monkeypatch):
    """The state of a task is written on another connection, if the task's own is read-only."""
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", None)
    result = sample_tasks.lose_connection.enqueue("read-only")
    _run(max_attempts=1)
    connections["default"].close()
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)


def test_a_deferred_task_on_a_connection_that_was_lost():
    """It is stashed again over another connection, and costs no attempt."""
    sample_tasks.noop.using(run_after=timezone.now() + timedelta(days=3)).enqueue()
    row = Outbox.objects.latest("id")
    sample_tasks.kill_backend()
    _run(max_attempts=1, row=row)
    assert Outbox.objects.count() == 2


@pytest.mark.parametrize("moment", ["begin", "write"])
def test_a_state_that_cannot_be_written_counts_no_attempt(monkeypatch, moment):
    """A message whose state cannot be written, before the task begins or after it, is given back uncounted."""
    monkeypatch.setattr(worker, "_OUTAGE_PAUSE_SECONDS", 0.0)

    def refuse(*_):
        raise OperationalError("could not serialize access due to concurrent update")

    monkeypatch.setattr(results, moment, refuse)
    monkeypatch.setattr(worker, "_PATIENCE_SECONDS", 0.0)
    sample_tasks.noop.enqueue()
    acks = _Acks()
    _run(max_attempts=1, acks=acks)
    assert acks.nacks == [(10_000, False)]


def test_receivers_that_raise(finished):
    """Receivers of the signals change nothing about a task."""

    def refuse(**_):
        raise RuntimeError("a receiver fails")

    for signal_ in (task_started, task_finished):
        signal_.connect(refuse)
    try:
        result = sample_tasks.noop.enqueue()
        _run(max_attempts=1)
    finally:
        for signal_ in (task_started, task_finished):
            signal_.disconnect(refuse)
    result.refresh()
    assert (result.status, len(finished)) == (TaskResultStatus.SUCCESSFUL, 1)


@pytest.mark.parametrize("age", [0, None])
@pytest.mark.parametrize("name", ["error", "cycle", "atomic", "begin", "autocommit"])
def test_a_task_that_leaves_a_transaction_open(monkeypatch, name, age):
    """The attempt has failed, nothing of it stays, and the next task of the thread commits what it writes."""
    monkeypatch.setitem(connections["default"].settings_dict, "CONN_MAX_AGE", age)
    left, next_one = sample_tasks.leave_open.enqueue(name), sample_tasks.make_group.enqueue("next")
    first, second = Outbox.objects.order_by("id")
    own = name in ("error", "cycle")
    with pytest.raises(ValueError if own else TransactionLeftOpen, match="cannot handle" if own else "left open"):
        _run(max_attempts=1, row=first)
    assert not connections["default"].in_atomic_block
    _run(max_attempts=1, row=second)
    connections["default"].close()
    assert set(Group.objects.values_list("name", flat=True)) == {"next", *([name] if own else [])}
    left.refresh()
    next_one.refresh()
    assert (left.status, next_one.status) == (TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL)
    assert "a transaction of 'default' was left open" in left.errors[0].traceback


def test_a_project_without_autocommit(monkeypatch):
    """With AUTOCOMMIT off results are committed, and a task that does not commit what it writes has failed."""
    result, deferred = sample_tasks.make_group.enqueue("never"), sample_tasks.noop
    first = Outbox.objects.latest("id")
    deferred.using(run_after=timezone.now() + timedelta(days=3)).enqueue()
    second = Outbox.objects.latest("id")
    noop = sample_tasks.noop.enqueue()
    third = Outbox.objects.latest("id")
    connections["default"].close()
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)
    try:
        with pytest.raises(TransactionLeftOpen):
            _run(max_attempts=1, row=first)
        _run(max_attempts=1, row=second)
        _run(max_attempts=1, row=third)
    finally:
        monkeypatch.undo()
        connections["default"].close()
    result.refresh()
    noop.refresh()
    assert (result.status, noop.status) == (TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL)
    assert (Group.objects.count(), Outbox.objects.count()) == (0, 4)


def test_in_the_transaction_of_a_test():
    """In a TestCase tasks run in the test's own transaction, and its connection stays."""
    with transaction.atomic():
        Result.objects.all().delete()
        result = sample_tasks.noop.enqueue()
        _run()
        result.refresh()
        assert result.status == TaskResultStatus.SUCCESSFUL
        assert connections["default"].in_atomic_block


def test_an_error_of_a_database_that_is_there_counts():
    """An attempt that a time-out of a statement, or a deadlock, has ended is an attempt."""
    sample_tasks.time_out.enqueue()
    with pytest.raises(OperationalError, match="statement timeout"):
        _run()


@pytest.mark.parametrize("value", ["nan", "nul", "surrogate"])
def test_a_return_value_that_the_table_refuses(value):
    """A task whose value JSON has in Python alone has run all the same: it is FAILED, and not tried again."""
    result = sample_tasks.echo.enqueue(value)
    with pytest.raises(Reject, match="cannot be kept"):
        _run()
    result.refresh()
    assert (result.status, len(result.errors)) == (TaskResultStatus.FAILED, 1)


def test_an_error_whose_text_the_table_refuses():
    """An attempt is counted as failed also if the text of its error cannot be kept as it is."""
    result = sample_tasks.echo.enqueue("raise")
    with pytest.raises(ValueError, match="\0"):
        _run()
    result.refresh()
    assert (result.status, len(result.errors)) == (TaskResultStatus.READY, 1)


@pytest.mark.parametrize("is_aware", [True, False])
def test_a_deferred_task_in_a_project_without_time_zones(settings, is_aware):
    """With USE_TZ False `run_after` may be naive, in the project's time zone, or aware, as Django allows."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    soon = timezone.now() + timedelta(hours=1)
    sample_tasks.noop.using(run_after=soon.astimezone() if is_aware else soon).enqueue()
    assert _deliver_at(Outbox.objects.get()) == pytest.approx(soon.timestamp() * 1000, abs=1000)
    _run()
    assert Outbox.objects.count() == 2  # it came early, and was stashed again


def test_two_attempts_at_once_are_both_counted():
    """A message that came twice runs in two workers at once: the first to end keeps the other among the workers."""
    result = sample_tasks.accompanied.enqueue()
    _run()
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 2)
    assert result.worker_ids[1] == "another"


@pytest.mark.parametrize("meanwhile", ["", "another"])
def test_a_beginning_that_was_rolled_back_is_counted(meanwhile):
    """A worker that has begun a task before counts each attempt, also one whose first try was rolled back."""
    enqueued = sample_tasks.noop.enqueue()
    for _ in range(2):
        ours, begun_at = results.read(enqueued.id, "default"), timezone.now()
        with suppress(OperationalError), transaction.atomic():
            results.begin(ours, "worker-1", begun_at, "default")
            raise OperationalError
        if meanwhile:
            results.begin(results.read(enqueued.id, "default"), meanwhile, timezone.now(), "default")
        results.begin(ours, "worker-1", begun_at, "default")
    enqueued.refresh()
    assert [each for each in enqueued.worker_ids if each != meanwhile] == ["worker-1", "worker-1"]


def test_a_success_is_final():
    """A worker that was thought dead fails after another has succeeded: the result stays, and nothing runs again."""
    result = sample_tasks.overtaken.enqueue()
    with pytest.raises(ValueError, match="too late"):
        _run()
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == "by another"


def test_a_task_that_never_runs():
    """A task that no worker knows, or that is none, is READY until its message becomes a dead letter, then FAILED."""
    result = sample_tasks.noop.enqueue()
    row = Outbox.objects.latest("id")
    job = json.loads(bytes(row.kafka_value))
    Result.objects.filter(pk=result.id).update(task_path="outbox_django.tasks.of_tomorrow")
    payload = json.dumps({**job, "task": "outbox_django.tasks.of_tomorrow"}).encode()
    for attempt, status in ((1, "READY"), (2, "FAILED")):
        with pytest.raises(ImportError):
            _run(attempt=attempt, max_attempts=2, payload=payload)
        kept = Result.objects.get(pk=result.id)
        assert kept.status == status
    assert [path for path, _ in kept.errors] == ["builtins.ImportError"]
    assert kept.finished_at is not None
    other = sample_tasks.noop.enqueue()
    Result.objects.filter(pk=other.id).update(task_path=f"{_MODULE}.NOT_A_TASK")
    payload = json.dumps({**job, "id": other.id, "task": f"{_MODULE}.NOT_A_TASK"}).encode()
    with pytest.raises(Reject):
        _run(payload=payload)
    assert Result.objects.get(pk=other.id).status == "FAILED"


@pytest.mark.parametrize(
    ("task", "raised", "status"),
    [
        (sample_tasks.refuse, Reject, TaskResultStatus.FAILED),
        (sample_tasks.return_an_object, Reject, TaskResultStatus.FAILED),
        (sample_tasks.return_itself, Reject, TaskResultStatus.FAILED),
        (sample_tasks.wrapped, Reject, TaskResultStatus.FAILED),
        (sample_tasks.generate, Reject, TaskResultStatus.FAILED),
        (sample_tasks.leave, TaskAborted, TaskResultStatus.READY),
    ],
)
def test_tasks_that_end_in_other_ways(task, raised, status):
    """A task may refuse for good; a return value that cannot be kept is not retried; `sys.exit` is a failed attempt."""
    result = task.enqueue()
    with pytest.raises(raised):
        _run()
    result.refresh()
    assert (result.status, len(result.errors)) == (status, 1)


@pytest.mark.usefixtures("without_results")
@pytest.mark.parametrize("task", [sample_tasks.wrapped, sample_tasks.generate])
def test_a_task_that_was_only_begun(finished, task):
    """A coroutine that nobody awaits, or a generator, has failed also where no value is kept."""
    task.enqueue()
    with pytest.raises(Reject, match="the work is not done"):
        _run()
    assert [result.status for result in finished] == [TaskResultStatus.FAILED]


def test_receivers_that_end_programs(caplog):
    """A receiver that raises no Exception changes nothing about a task; the log has it."""

    def leave(**_):
        sys.exit(3)

    for signal_ in (task_started, task_finished):
        signal_.connect(leave)
    try:
        result = sample_tasks.noop.enqueue()
        _run(max_attempts=1)
    finally:
        for signal_ in (task_started, task_finished):
            signal_.disconnect(leave)
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert len([line for line in caplog.messages if "a receiver of a signal raised" in line]) == 2


def test_a_backend_with_another_alias():
    """A task that was enqueued before its backend was renamed runs."""
    sample_tasks.noop.enqueue()
    Result.objects.update(backend="before")
    _run()
    assert Result.objects.get().status == "SUCCESSFUL"


def test_deferring_needs_a_delay(settings):
    """Tasks with run_after are refused where each delivery could only put them off for a moment."""
    queue = {**settings.TASKS["default"]["OPTIONS"]["queue"], "max_delay": "0s"}
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"queue": queue}}}
    with pytest.raises(InvalidConfig, match="max_delay must be 1s or more"):
        sample_tasks.noop.using(run_after=timezone.now() + timedelta(days=3)).enqueue()
    sample_tasks.noop.enqueue()
    assert Outbox.objects.count() == 1


def test_the_context_counts_attempts():
    """A task gets the number of its attempt, those included whose worker died."""
    result = sample_tasks.attempt_of.enqueue("a")
    Result.objects.update(status="RUNNING", worker_ids=["dead"])
    _run(attempt=2)
    result.refresh()
    assert result.return_value == ["a", 2]


@pytest.mark.usefixtures("without_results")
def test_the_context_counts_attempts_without_results(finished):
    """Without a table the attempts are the message's."""
    sample_tasks.attempt_of.enqueue("a")
    _run(attempt=3)
    assert [result.return_value for result in finished] == [["a", 3]]


def test_a_result_that_row_security_hides():
    """A task whose row may only be hidden does not begin: it may have been successful."""
    result = sample_tasks.add.enqueue(1)
    table, role = Result._meta.db_table, f"worker {uuid4()}"
    with connections["default"].cursor() as cursor:
        cursor.execute(f'CREATE ROLE "{role}"; GRANT ALL ON {table} TO "{role}"')
        cursor.execute(f'ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; SET ROLE "{role}"')
        try:
            with pytest.raises(RowsHidden, match=f"table public.{table} has row level security"):
                results.begin(result, "worker-1", timezone.now(), "default")
        finally:
            cursor.execute(f"RESET ROLE; ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
            cursor.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_a_message_with_the_id_of_another_task():
    """It writes nothing into the other's result, and does not keep it from running; it becomes a dead letter itself."""
    result = sample_tasks.add.enqueue(1, right=2)
    row = Outbox.objects.latest("id")
    job = json.loads(bytes(row.kafka_value))
    for forged in ({"task": f"{_MODULE}.noop"}, {"args": [100]}, {"kwargs": {}}):
        with pytest.raises(Reject, match="belongs to another task"):
            _run(max_attempts=1, payload=json.dumps({**job, **forged}).encode())
        result.refresh()
        assert (result.status, result.errors) == (TaskResultStatus.READY, [])
    with pytest.raises(ImportError):
        _run(max_attempts=1, payload=json.dumps({**job, "task": "outbox_django.tasks.nowhere"}).encode())
    result.refresh()
    assert (result.status, result.errors) == (TaskResultStatus.READY, [])
    _run()
    result.refresh()
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 3)


def test_a_result_that_was_pruned(finished):
    """A task whose row is gone runs; the rows of finished tasks are pruned by age, others stay."""
    sample_tasks.add.enqueue(1)
    Result.objects.all().delete()
    _run()
    assert (finished[0].return_value, Result.objects.count()) == (1, 0)

    sample_tasks.noop.enqueue()
    old = sample_tasks.noop.enqueue()
    Result.objects.filter(pk=old.id).update(finished_at=timezone.now() - timedelta(days=8))
    output = StringIO()
    call_command("prune_task_results", "--older-than=7d", stdout=output)
    assert (output.getvalue(), Result.objects.count()) == ("Deleted results: 1\n", 1)
    with pytest.raises(CommandError, match="not an age"):
        call_command("prune_task_results", "--older-than=week")


def test_pruning_without_the_table_ends_in_one_line(settings):
    """A missing table, and a wrong setting, are errors of one line with the exit code 2."""
    with transaction.atomic():
        connections["default"].cursor().execute("DROP TABLE outbox_task_result")
        with pytest.raises(CommandError, match='"outbox_task_result" does not exist') as raised:
            call_command("prune_task_results", "--older-than=7d")
        transaction.set_rollback(True)
    assert raised.value.returncode == 2
    settings.OUTBOX = {"DATABASE": "nowhere"}
    with pytest.raises(CommandError, match="'nowhere' is not in DATABASES"):
        call_command("prune_task_results", "--older-than=7d")


_JOB = {"id": "1", "args": [], "kwargs": {}, "enqueued_at": "2026-01-01T00:00:00+00:00"}
_MODULE = "tests.integration.django.sample_tasks"


@pytest.mark.parametrize(
    ("payload", "raised"),
    [
        (b"{", Reject),
        (b"[]", Reject),
        (b"{}", Reject),
        (json.dumps({**_JOB, "task": f"{_MODULE}.NOT_A_TASK"}), Reject),
        (json.dumps({**_JOB, "task": "subprocess.check_output", "args": ["id"]}), Reject),
        (json.dumps({**_JOB, "task": "new_application.tasks.welcome"}), ImportError),
        (json.dumps({**_JOB, "task": f"{_MODULE}.noop", "args": "text"}), Reject),
        (json.dumps({**_JOB, "task": f"{_MODULE}.noop", "enqueued_at": "today"}), Reject),
        (json.dumps({**_JOB, "task": "unittest.__main__.main"}), Reject),
        # An older worker may meet a newer task: another may know it.
        (json.dumps({**_JOB, "task": "outbox_django.tasks.of_tomorrow"}), ImportError),
    ],
)
def test_messages_that_are_no_tasks(payload, raised):
    """A message that can never be run is rejected; a task that this code does not know is retried."""
    sample_tasks.noop.enqueue()
    with pytest.raises(raised):
        _run(payload=payload if isinstance(payload, bytes) else payload.encode())


def test_a_message_imports_no_module_of_its_choice(tmp_path, monkeypatch):
    """A module of no installed application is not run; a newer worker may have it, so its message comes again."""
    (tmp_path / "some_program.py").write_text("raise AssertionError('it was run')")
    monkeypatch.syspath_prepend(tmp_path)
    sample_tasks.noop.enqueue()
    with pytest.raises(ImportError, match=r"some_program\.main is no task of an installed application"):
        _run(payload=json.dumps({**_JOB, "task": "some_program.main"}).encode())
    assert "some_program" not in sys.modules


def test_tasks_of_modules_outside_of_applications(tmp_path, monkeypatch, settings):
    """OPTIONS["modules"] names modules whose tasks a worker imports, and packages with all that is in them."""
    library = type(sample_tasks.noop).__module__.partition(".base")[0]
    text = f"from {library} import task\n\n\n@task\ndef main():\n    raise LookupError('it was run')\n"
    (tmp_path / "site_root").mkdir()
    (tmp_path / "site_root" / "jobs.py").write_text(text)
    (tmp_path / "site_root_of_another.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    options = {**settings.TASKS["default"]["OPTIONS"], "modules": ["site_root"]}
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": options}}
    sample_tasks.noop.enqueue()
    try:
        with pytest.raises(LookupError, match="it was run"):
            _run(payload=json.dumps({**_JOB, "task": "site_root.jobs.main"}).encode())
        with pytest.raises(ImportError, match=r"TASKS\['default'\]\['OPTIONS'\]\['modules'\]"):
            _run(payload=json.dumps({**_JOB, "task": "site_root_of_another.main"}).encode())
    finally:
        sys.modules.pop("site_root.jobs", None)
        sys.modules.pop("site_root", None)


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt", "type('Own', (BaseException,), {})"])
def test_a_module_that_ends_programs_ends_no_worker(tmp_path, monkeypatch, settings, error):
    """A module of an installed application that raises more than an Exception when it is imported is no task's."""
    (tmp_path / "ending_app").mkdir()
    (tmp_path / "ending_app" / "__init__.py").touch()
    (tmp_path / "ending_app" / "jobs.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "ending_app"]
    sample_tasks.noop.enqueue()
    try:
        with pytest.raises(Reject, match=r"ending_app\.jobs\.main is no task: its module raises"):
            _run(payload=json.dumps({**_JOB, "task": "ending_app.jobs.main"}).encode())
    finally:
        sys.modules.pop("ending_app", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"TASKS\['default'\]\['OPTIONS'\]\['queue'\]: expected a dict with bootstrap_servers"),
        ({"queue": {"bootstrap_servers": "b:1"}}, "message_topic, marker_topic missing"),
        ({"queue": {}, "results": True}, "'results' is no option; there are 'queue' and 'modules'"),
        ({"queue": {}, "modules": "tasks"}, r"\['modules'\]: expected a list of names of modules, got 'tasks'"),
        (
            {"queue": {"bootstrap_servers": "b:1", "message_topic": "m", "marker_topic": "n", "max_attempts": 0}},
            "max_attempts",
        ),
    ],
)
def test_wrong_options(settings, options, said):
    """Wrong OPTIONS are an error of the system check, of `enqueue` and of `run_tasks`, which names them."""
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": options}}
    [error] = [found for found in task_backends["default"].check() if found.id == "outbox_tasks.E001"]
    for call in (sample_tasks.noop.enqueue, lambda: call_command("run_tasks")):
        with pytest.raises((InvalidConfig, CommandError), match=said) as raised:
            call()
        assert str(raised.value) == error.msg
    assert Outbox.objects.count() == 0


def test_annotations_that_are_not_json():
    """The system check warns of arguments whose annotated types JSON does not have, and of no others."""
    found = task_backends["default"].check()
    assert {message.id for message in found} == {"outbox_tasks.W001"}
    assert [message.msg.partition("annotated: ")[2] for message in found] == [
        "its argument 'when' is annotated as datetime.datetime, which is not JSON.",
        "its argument 'price' is annotated as decimal.Decimal | None, which is not JSON.",
        "its argument 'lists' is annotated as list[set[int]], which is not JSON.",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend=other"], "TASKS has no 'other'"),
        (["--backend=dummy"], "DummyBackend, which has workers of its own"),
        (["--queue=third"], "no queue 'third'; its QUEUES are"),
        (["--backend=any"], "takes any: name them by --queue"),
        (["--concurrency=0"], "1 or more"),
        (["--drain-timeout=soon"], "soon"),
    ],
)
def test_run_tasks_refuses_nonsense(settings, arguments, said):
    """A wrong option of the command is one clear line."""
    library = "django.tasks" if task_backends.__class__.__module__.startswith("django.") else "django_tasks"
    settings.TASKS = {
        **settings.TASKS,
        "dummy": {"BACKEND": f"{library}.backends.dummy.DummyBackend"},
        "any": {**settings.TASKS["default"], "QUEUES": []},
    }
    with pytest.raises(CommandError, match=said):
        call_command("run_tasks", *arguments)


def test_run_tasks_loads_without_the_extra_for_queues():
    """Its module needs no pydantic, so that what names the missing extra is reached."""
    program = "import sys; sys.modules['pydantic'] = None; import outbox_django.management.commands.run_tasks"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_admin_shows_results(admin_client):
    """The list shows tasks and their attempts, a page the tracebacks; neither offers a change."""
    result = sample_tasks.fail.enqueue("<no way>")
    with pytest.raises(ValueError, match="no way"):
        _run()
    page = admin_client.get("/admin/outbox_tasks/result/", {"q": result.id}).content.decode()
    assert result.id in page
    assert '<td class="field-attempts">1</td>' in page
    page = admin_client.get(f"/admin/outbox_tasks/result/{result.id}/change/").content.decode()
    assert "ValueError: &lt;no way&gt;" in page
    assert 'name="_save"' not in page
    assert admin_client.get("/admin/outbox_tasks/result/add/").status_code == 403


@pytest.mark.django_db(databases=["default", "other"])
def test_the_admin_shows_results_of_the_outbox_s_database(admin_client, settings):
    """Results are listed and deleted where `enqueue` writes them."""
    settings.OUTBOX = {"DATABASE": "other"}
    result = sample_tasks.add.enqueue(1, 2)
    assert result.id in admin_client.get("/admin/outbox_tasks/result/").content.decode()
    admin_client.post(f"/admin/outbox_tasks/result/{result.id}/delete/", {"post": "yes"})
    assert not Result.objects.using("other").exists()
