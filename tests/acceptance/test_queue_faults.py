"""A queue whose consumers and trackers are killed at work: no message is lost, and no finished one comes again.

`make test-queues` runs it with 100,000 messages.
"""

import os
import random
import time

import pytest

from outbox_queue import QueueConfig, QueueService
from outbox_queue.operations.stats import queue_stats
from tests.acceptance.queue_fleet import QueueFleet, judge
from tests.acceptance.queue_worker import POISON

MESSAGES = int(os.environ.get("OUTBOX_TEST_QUEUE_MESSAGES", "1200"))
MAX_ATTEMPTS = 6
QUIET_SECONDS = 120 + MESSAGES / 200


@pytest.fixture
def settings(kafka_bootstrap, make_topic):
    """Return settings with topics of their own and short timeouts."""
    return {
        "bootstrap_servers": kafka_bootstrap,
        "message_topic": make_topic(8),
        "marker_topic": make_topic(8, config={"message.timestamp.type": "LogAppendTime"}),
        "dead_letter_topic": make_topic(2, config={"cleanup.policy": "compact"}),
        "redelivery_timeout": "4s",
        "max_attempts": MAX_ATTEMPTS,
        "max_in_progress": 200,
        "kafka": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1500},
    }


def is_poison(payload):
    """Tell whether every attempt at this message fails."""
    return payload.startswith(POISON)


def send_all(service, fleet, queue):
    """Send in portions and kill a process after each; return the sent payloads."""
    sent = [b"%s-%d" % (POISON if number % 100 == 0 else b"m", number) for number in range(MESSAGES)]
    portion = max(1, MESSAGES // 12)
    with service.queue(queue).producer() as producer:
        for begin in range(0, MESSAGES, portion):
            for payload in sent[begin : begin + portion]:
                producer.send(payload)
            producer.flush()
            time.sleep(random.uniform(0.2, 1.5))
            fleet.kill_one(random.choice(["consumer", "tracker"]))
    return sent


def wait_until_finished(config, queue):
    """Wait until no message waits or is in progress."""
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        (stats,) = queue_stats(config, queue)
        if stats.waiting == stats.in_progress == 0:
            return stats
        time.sleep(1)
    return stats


@pytest.mark.real_broker
@pytest.mark.alone
@pytest.mark.timeout(QUIET_SECONDS * 3 + 120)
@pytest.mark.parametrize("transactional", [False, True] if MESSAGES > 50_000 else [False])
def test_killed_consumers_and_trackers(settings, tmp_path, topic_name, say, *, transactional):
    """Every message is acknowledged or, if poison, set aside; attempts are counted; no ended message comes again."""
    settings |= {"transactional": transactional}
    queue = topic_name("faults")
    config = QueueConfig(**settings)
    begun = time.monotonic()
    fleet = QueueFleet(settings, queue, tmp_path, consumers=4, trackers=2)
    try:
        sent = send_all(QueueService(config), fleet, queue)
        left = wait_until_finished(config, queue)
    finally:
        codes = fleet.end()
    verdict = judge(config, sent, fleet.journal(), is_poison=is_poison)
    say(
        f"{MESSAGES} messages, {time.monotonic() - begun:.0f} s, killed {dict(fleet.kills)}, "
        f"{verdict.copies} redelivered, {sum(verdict.dead.values())} dead letters"
    )
    assert (left.waiting, left.in_progress) == (0, 0), fleet.logs()[-5000:]
    assert set(codes) == {0}, fleet.logs()[-5000:]
    assert not verdict.lost
    assert not verdict.redelivered_after_end
    assert not verdict.miscounted
    for payload, (copies, attempts, read_again) in verdict.poison.items():
        assert attempts == MAX_ATTEMPTS, payload
        assert read_again or copies == MAX_ATTEMPTS, payload
        assert read_again or verdict.dead[payload] == 1, payload
