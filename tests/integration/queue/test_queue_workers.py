"""Workers and asyncio on a real broker: `queue.run`, its draining, and the asynchronous iterator."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from datetime import timedelta

import pytest

from outbox_queue import InvalidMessage, QueueClosed, QueueError, QueueService, Reject, backoff
from outbox_queue.consuming.message import Message
from outbox_queue.dead_letters.store import DeadLetters
from tests.queueing import delivery, eventually, queue_config, tracking

pytestmark = pytest.mark.real_broker

PATIENCE = 60.0


@pytest.fixture
def config(kafka_bootstrap, make_topic):
    """A configuration with new topics."""
    return queue_config(kafka_bootstrap, make_topic)


@pytest.fixture
def queue(config):
    """A queue with these topics."""
    return QueueService(config).queue("q", max_attempts=3)


class Running:
    """A worker on a thread of its own."""

    def __init__(self, queue, handler, **options):
        self.stop = threading.Event()
        self.answer = None
        self._thread = threading.Thread(target=self._run, args=(queue, handler, options))
        self._thread.start()

    def _run(self, queue, handler, options):
        try:
            self.answer = queue.run(handler, stop=self.stop, **options)
        except Exception as error:
            self.answer = error

    def end(self):
        self.stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.answer


def send(queue, *payloads):
    """Send messages, and wait until they are in Kafka."""
    with queue.producer() as producer:
        for payload in payloads:
            producer.send(payload)


def test_a_handler_is_called_for_each_message(config, queue):
    """`run` acknowledges a message when its handler returns, retries it after an error, and obeys Reject at once."""
    calls = Counter()
    lock = threading.Lock()

    def handle(message):
        with lock:
            calls[message.payload] += 1
        if message.payload == b"bad":
            raise ValueError("not a number")
        if message.payload == b"worse":
            raise Reject("makes no sense")
        if message.payload == b"settled":
            message.ack()

    with tracking(config) as tracker:
        send(queue, b"good", b"bad", b"worse", b"settled")
        running = Running(queue, handle, concurrency=4, retry_delay=lambda *_: timedelta(milliseconds=50))
        eventually(lambda: len(DeadLetters(config).all()) == 2)
        eventually(lambda: tracker.in_progress == 0)
        assert running.end() is True
    assert calls == {b"good": 1, b"bad": 3, b"worse": 1, b"settled": 1}
    reasons = {letter.payload: letter.reason for letter in DeadLetters(config).all()}
    assert reasons == {b"bad": "ValueError: not a number", b"worse": "makes no sense"}


def test_handlers_run_at_the_same_time(queue):
    """With `concurrency=4`, four handlers are at work together, and never more."""
    barrier = threading.Barrier(4)
    at_work, most = [], []

    def handle(_):
        at_work.append(1)
        most.append(len(at_work))
        barrier.wait(PATIENCE)
        at_work.pop()

    send(queue, *(b"%d" % n for n in range(8)))
    running = Running(queue, handle, concurrency=4)
    eventually(lambda: len(most) == 8)
    assert running.end() is True
    assert max(most) == 4


def test_stopping_waits_for_handlers(config, queue):
    """A handler at work at the stop finishes, and its message is acknowledged."""
    begun, go_on = threading.Event(), threading.Event()

    def handle(_):
        begun.set()
        go_on.wait(PATIENCE)

    with tracking(config) as tracker:
        send(queue, b"1")
        running = Running(queue, handle)
        assert begun.wait(PATIENCE)
        running.stop.set()
        go_on.set()
        assert running.end() is True
        eventually(lambda: tracker.in_progress == 0)


def test_stopping_does_not_wait_for_ever(queue):
    """`run` does not wait longer than drain_timeout for a handler, and returns False."""
    begun, go_on = threading.Event(), threading.Event()

    def handle(_):
        begun.set()
        go_on.wait(PATIENCE)

    send(queue, b"1")
    running = Running(queue, handle, drain_timeout=timedelta(milliseconds=100))
    assert begun.wait(PATIENCE)
    try:
        assert running.end() is False
    finally:
        go_on.set()


WORKER = """
import sys, time
from outbox_queue import QueueConfig, QueueService
servers, messages, markers, letters = sys.argv[1:]
config = QueueConfig(bootstrap_servers=servers, message_topic=messages, marker_topic=markers, dead_letter_topic=letters)
def handle(message):
    print("begun", flush=True)
    time.sleep(1)
    print("done", flush=True)
QueueService(config).queue("q").run(handle)
print("drained", flush=True)
"""


def test_sigterm_drains(config, queue):
    """The first SIGTERM lets the handler finish; the process ends with 0 and its message is acknowledged."""
    send(queue, b"1", b"2")
    arguments = [config.bootstrap_servers, config.message_topic, config.marker_topic, config.dead_letters]
    with tracking(config) as tracker:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout.readline() == "begun\n"
            worker.send_signal(signal.SIGTERM)
            output, _ = worker.communicate(timeout=PATIENCE)
        finally:
            worker.kill()
            worker.wait()
        assert (worker.returncode, output) == (0, "done\ndrained\n")
        with queue.consumer() as consumer:
            left = consumer.receive(PATIENCE)
            assert left.attempt == 1
            left.ack()
            eventually(lambda: tracker.in_progress == 0)
            assert consumer.receive(0.5) is None


def test_a_queue_that_cannot_be_read_ends_the_worker(queue, monkeypatch):
    """`run` and `receive` raise an error that is not transient."""
    from outbox_queue.consuming.group_member import GroupMember

    def read(*_):
        raise QueueError("may not be read")

    monkeypatch.setattr(GroupMember, "fetch", read)
    with pytest.raises(QueueError, match="may not be read"):
        queue.run(print)
    with queue.consumer() as consumer, pytest.raises(QueueError, match="may not be read"):
        consumer.receive(PATIENCE)


def test_messages_are_iterated_by_tasks(config, queue):
    """`async for` hands messages to the loop; several tasks share them, and settle them."""

    async def run():
        payloads = []
        async with queue.async_consumer(concurrency=10) as consumer:

            async def work():
                async for message in consumer:
                    await asyncio.sleep(0.001)
                    payloads.append(message.payload)
                    message.ack()

            tasks = [asyncio.create_task(work()) for _ in range(3)]
            async with asyncio.timeout(PATIENCE):
                await asyncio.to_thread(eventually, lambda: len(payloads) == 200)
            consumer.stop()
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
            assert await consumer.drain(PATIENCE)
        return payloads

    with tracking(config) as tracker:
        send(queue, *(b"%d" % n for n in range(200)))
        payloads = asyncio.run(run())
        assert Counter(payloads) == Counter(b"%d" % n for n in range(200))
        eventually(lambda: tracker.in_progress == 0)


def test_an_asynchronous_receive_may_be_cancelled(config, queue):
    """A receive that times out or is cancelled loses no message; `reject` can be awaited."""

    async def run():
        async with queue.async_consumer() as consumer:
            assert await consumer.receive(0.05) is None
            task = asyncio.create_task(consumer.receive())
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(send, queue, b"1")
            message = await consumer.receive(PATIENCE)
            await consumer.reject(message, "no")
            return message.payload

    assert asyncio.run(run()) == b"1"
    assert [letter.reason for letter in DeadLetters(config).all()] == ["no"]
    with pytest.raises(QueueClosed):
        asyncio.run(queue.async_consumer().receive())


def test_backoff_doubles():
    """Delays double from the first to the longest, and never overflow."""
    delay = backoff(timedelta(seconds=1), timedelta(seconds=60), jitter=0)

    def after(attempt):
        message = Message(delivery(attempt=attempt), None)
        return delay(message, ValueError()).total_seconds()

    assert [after(attempt) for attempt in (1, 2, 3, 7, 41, 10**6)] == [1, 2, 4, 60, 60, 60]


def test_bad_timeouts_are_refused(queue):
    """A timeout that is neither a timedelta nor a number is refused."""
    with queue.consumer() as consumer, pytest.raises(InvalidMessage, match="timeout"):
        consumer.receive("5s")
