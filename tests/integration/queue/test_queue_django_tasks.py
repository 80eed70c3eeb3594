"""Django tasks from `enqueue` to their results: a real database, a harvester, a broker, a tracker and a worker."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.utils import timezone

from devstack.processes import wait_until
from outbox_core.harvest import EmbeddedHarvester
from outbox_django.harvesting import harvest_config
from outbox_django.models import Outbox
from outbox_django.tasks.library import task_backends
from outbox_django.tasks.models import Result
from outbox_django.tasks.worker import run_tasks
from outbox_queue import QueueError
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.redelivery.loop import TrackerLoop
from tests.integration.django import sample_tasks
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.queueing import PATIENCE, queue_config

__all__ = ["django_db_modify_db_settings"]

pytestmark = [pytest.mark.real_broker, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def backend(settings, kafka_bootstrap, make_topic, topic_name):
    """The backend over topics of its own, with two queues of names that no other test uses."""
    config = queue_config(kafka_bootstrap, make_topic)
    names = ("bootstrap_servers", "message_topic", "marker_topic", "dead_letter_topic")
    settings.OUTBOX = {"KAFKA": {"bootstrap.servers": kafka_bootstrap}, "LEADER_TOPIC": topic_name("leaders")}
    settings.TASKS = {
        "default": {
            "BACKEND": "outbox_django.tasks.OutboxTaskBackend",
            "QUEUES": ["default", "second"],
            "OPTIONS": {"queue": {name: getattr(config, name) for name in names} | {"redelivery_timeout": "2s"}},
        }
    }
    return task_backends["default"]


def test_tasks_run(backend, tmp_path):
    """Committed tasks run, at their time, again after a failure, or become dead letters; rolled-back ones do not."""
    journal = tmp_path / "journal"
    with transaction.atomic():
        added = sample_tasks.add.enqueue(1, right=2)
        flaky = sample_tasks.append_line.enqueue(str(journal), "flaky", failures=1)
        refused = sample_tasks.refuse.enqueue()
        due = timezone.now() + timedelta(seconds=3)
        deferred = sample_tasks.append_line.using(run_after=due).enqueue(str(journal), "deferred")
    with transaction.atomic():
        sample_tasks.append_line.enqueue(str(journal), "rolled-back")
        transaction.set_rollback(True)

    stop = threading.Event()
    with EmbeddedHarvester(harvest_config()), ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_tasks, backend, ["default", "second"], with_tracker=True, stop=stop)
        try:
            assert wait_until(lambda: _is_over(running), PATIENCE), Result.objects.values()
        finally:
            stop.set()
        assert running.result(PATIENCE) is True

    for result in (added, flaky, refused, deferred):
        result.refresh()
    assert (added.return_value, added.attempts) == (3, 1)
    assert (flaky.status, flaky.attempts, len(flaky.errors)) == ("SUCCESSFUL", 2, 1)
    assert (refused.status, refused.attempts) == ("FAILED", 1)
    assert deferred.started_at >= due - timedelta(seconds=1)
    assert sorted(journal.read_text().split()) == ["deferred", "flaky", "flaky"]
    letters = list(DeadLetters(backend.service.config).all())
    assert [(letter.queue, letter.reason) for letter in letters] == [("default", "makes no sense")]
    connections.close_all()


def test_a_worker_does_not_go_on_without_its_tracker(backend, monkeypatch):
    """An error that ends the tracker ends the worker, too: its supervisor restarts both, as failed tasks would wait."""

    def turn(_):
        raise QueueError("no right to read markers")

    monkeypatch.setattr(TrackerLoop, "turn", turn)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_tasks, backend, ["default"], with_tracker=True, stop=stop)
        try:
            with pytest.raises(QueueError, match="no right"):
                running.result(PATIENCE)
        finally:
            stop.set()


def _is_over(running):
    """Tell whether all four tasks are over, and nothing is left to publish; raise if the worker has ended."""
    if running.done():
        running.result()
    over = Result.objects.filter(finished_at__isnull=False).count()
    return over == 4 and not Outbox.objects.exists()
