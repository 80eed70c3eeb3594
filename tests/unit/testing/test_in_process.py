"""Stashed records handed to consumers and queue handlers within the process."""

import json
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum

import pytest

from outbox_core import OutboxRecord, Stasher
from outbox_core.claims import ClaimMissing, FolderStore
from outbox_core.consuming import Consumed, backoff, consume
from outbox_core.errors import OutboxError
from outbox_core.testing.kafka import InProcessKafka
from outbox_queue import InvalidMessage, QueueConfig, QueueError, QueueService, Reject
from outbox_queue.testing import FakeClock, InProcessQueue

SETTINGS = QueueConfig(bootstrap_servers="none:1", max_attempts=3, redelivery_timeout=timedelta(seconds=30))
MINUTE = timedelta(minutes=1)


@pytest.fixture
def kafka(in_memory_outbox):
    """Return topics over an outbox in memory."""
    return InProcessKafka(in_memory_outbox)


@pytest.fixture
def queue():
    """Return a queue that no broker knows."""
    return QueueService(SETTINGS).queue("jobs")


@pytest.fixture
def jobs(queue, in_memory_outbox):
    """Return the same queue within this process."""
    return InProcessQueue(queue, in_memory_outbox)


def _stash(*records):
    Stasher().stash_many(None, records)


def test_claimed_payloads_come_back(kafka, tmp_path):
    """`deliver` hands large payloads to handlers as `consume` does: from the store, or not without one."""
    store, received = FolderStore(tmp_path), []
    Stasher(claim_store=store, claim_check_above=3).stash_many(
        None, [OutboxRecord("a", value=b"large"), OutboxRecord("a", value=b"abc"), OutboxRecord("a")]
    )
    with pytest.raises(ClaimMissing, match="pass the store"):
        kafka.deliver({"a": received.append})
    assert kafka.deliver({"a": lambda message: received.append(message.value())}, claim_store=store) == 3
    assert received == [b"large", b"abc", None]


class _Inbox:
    """An inbox in memory, whose acceptances are rolled back with their transaction."""

    def __init__(self):
        self.accepted = set()

    @contextmanager
    def transaction(self):
        before = set(self.accepted)
        try:
            yield self
        except BaseException:
            self.accepted = before
            raise

    def accept(self, _transaction, source, message_id):
        is_new = (source, message_id) not in self.accepted
        self.accepted.add((source, message_id))
        return is_new

    def confirm(self, _transaction, source, message_id):
        assert (source, message_id) in self.accepted


def test_records_are_delivered_as_kafka_messages(kafka):
    """A handler gets the records of its topic in order, as messages of the client, with a harvester's header."""
    messages = []
    _stash(
        OutboxRecord("orders", 7, {"total": 42}, {"event": "placed", "outbox-id": "forged:1"}),
        OutboxRecord("stock", 1),
        OutboxRecord("orders", None, b"\xff", (), 3),
        OutboxRecord("orders", "", None, {"none": None}),
    )
    assert kafka.deliver({"orders": messages.append}) == 3
    first, second, third = messages
    assert (first.topic(), first.partition(), first.offset(), first.key()) == ("orders", 0, 0, b"7")
    assert json.loads(first.value()) == {"total": 42}
    assert [name for name, _ in first.headers()] == ["event", "outbox-id"]
    assert first.headers()[1][1].startswith(b"in-process:")
    assert first.error() is None
    assert (second.partition(), second.offset(), second.key(), second.value()) == (3, 0, None, b"\xff")
    assert (third.partition(), third.offset(), third.key(), third.value()) == (0, 1, b"", None)
    assert third.headers()[0] == ("none", None)
    assert kafka.deliver({"orders": messages.append, "stock": messages.append}) == 0


def test_records_that_handlers_stash_are_delivered_too(kafka):
    """Deliveries go on until nothing is left, also through the handlers' own records."""
    seen = []

    def pass_on(message):
        seen.append((message.topic(), message.key()))
        if message.topic() == "a":
            _stash(OutboxRecord("b", message.key()))

    _stash(OutboxRecord("a", 1), OutboxRecord("a", 2))
    assert kafka.deliver({"a": pass_on, "b": pass_on}) == 4
    assert seen == [("a", b"1"), ("a", b"2"), ("b", b"1"), ("b", b"2")]


def test_a_failed_handler_gets_its_message_again(kafka):
    """An error of a handler is raised; the next call begins with the message that it left."""
    seen = []

    def once(message):
        seen.append(message.key())
        if len(seen) == 2:
            raise ValueError("not today")

    _stash(*(OutboxRecord("a", key) for key in "xyz"))
    with pytest.raises(ValueError, match="not today"):
        kafka.deliver({"a": once})
    assert kafka.deliver({"a": once}) == 2
    assert seen == [b"x", b"y", b"y", b"z"]


def test_work_that_is_only_begun_is_refused(kafka, jobs, queue):
    """A handler that returns a coroutine has not done its work, and says so."""

    async def handle(_):
        raise AssertionError("never run")

    _stash(OutboxRecord("a"), queue.record("job"))
    with pytest.raises(OutboxError, match="coroutine, which is not awaited"):
        kafka.deliver({"a": handle})
    with pytest.raises(InvalidMessage, match="asynchronous"):
        jobs.run(handle)
    with pytest.raises(QueueError, match="not awaited"):
        jobs.run(lambda message: handle(message))  # noqa: PLW0108  which does not look asynchronous


def test_the_whole_loop_runs(kafka):
    """`consume` accepts, handles and commits each record of its topics, and stops when none is left."""
    inbox, handled = _Inbox(), []
    _stash(*(OutboxRecord("orders", n) for n in range(3)), OutboxRecord("other"))

    def run():
        consumer = kafka.consumer("orders", "payments", group="billing")
        return consume(
            consumer,
            lambda _, message: handled.append(message.key()),
            inbox.transaction,
            inbox=inbox,
            stop=consumer.drained,
        )

    assert run() == Consumed(handled=3, repeats=0)
    assert {source for source, _ in inbox.accepted} == {"billing"}
    _stash(OutboxRecord("payments", 3))
    assert run() == Consumed(handled=1, repeats=0)
    assert handled == [b"0", b"1", b"2", b"3"]
    kafka.rewind("billing")
    assert run() == Consumed(handled=0, repeats=4)
    assert len(handled) == 4


def test_the_loop_takes_a_failed_record_up_again(kafka):
    """A record whose handler raises is not committed; retries and the next consumer of its group begin with it."""
    inbox, attempts = _Inbox(), []

    def handle(_, message):
        attempts.append(message.key())
        if attempts.count(b"1") in {1, 2} and message.key() == b"1":
            raise ValueError("not today")

    def run(retry=None):
        consumer = kafka.consumer("t")
        return consume(consumer, handle, inbox.transaction, inbox=inbox, retry=retry, stop=consumer.drained).handled

    _stash(*(OutboxRecord("t", n) for n in range(3)))
    with pytest.raises(ValueError, match="not today"):
        run()
    assert run(backoff(2, first=0.001)) == 2
    assert attempts == [b"0", b"1", b"1", b"1", b"2"]


def test_a_queue_runs_in_the_callers_thread(jobs, queue):
    """Messages come in the order of their stashing, with payload and headers, and are gone when they are handled."""
    seen = []
    Stasher().stash(None, queue.record({"order": 1}, headers={"trace": "x"}))
    Stasher().stash(None, QueueService(SETTINGS).queue("other").record(b"not ours"))
    Stasher().stash(None, queue.record(b"raw"))
    assert len(jobs) == 2
    assert jobs.run(seen.append) == 2
    assert [(message.payload, message.headers, message.attempt) for message in seen] == [
        (b'{"order":1}', (("trace", b"x"),), 1),
        (b"raw", (), 1),
    ]
    assert all(message.is_settled for message in seen)
    assert (jobs.run(seen.append), len(jobs), jobs.dead_letters) == (0, 0, [])


def test_delays_pass_on_a_fake_clock(queue, in_memory_outbox):
    """A delayed message is delivered once the clock is moved ahead, in the order of due times."""
    clock = FakeClock()
    jobs, seen = InProcessQueue(queue, in_memory_outbox, clock=clock), []
    for payload, delay in (("later", 2 * MINUTE), ("soon", MINUTE), ("now", None)):
        Stasher().stash(None, queue.record(payload, delay=delay))

    def run():
        jobs.run(lambda message: seen.append(message.payload.decode()))
        return seen

    assert run() == ["now"]
    clock.advance(MINUTE / 2)
    assert run() == ["now"]
    clock.advance(MINUTE * 2)
    assert run() == ["now", "soon", "later"]
    with pytest.raises(ValueError, match="ahead only"):
        clock.advance(-MINUTE)


def test_a_failed_job_is_tried_again_and_dies(jobs, queue):
    """A handler's error is raised, the message comes again after its delay, and is a dead letter after the last try."""
    attempts = []

    def fail(message):
        attempts.append(message.attempt)
        raise RuntimeError("no server")

    Stasher().stash(None, queue.record("job"))
    with pytest.raises(RuntimeError, match="no server"):
        jobs.run(fail)
    assert jobs.run(fail) == 0, "its delay is not over"
    jobs.clock.advance(MINUTE)
    assert jobs.run(fail, raise_errors=False, retry_delay=lambda *_: timedelta(0)) == 2
    assert attempts == [1, 2, 3]
    (letter,) = jobs.dead_letters
    assert letter == (b"job", (), 3, "RuntimeError: no server")


def test_a_handler_settles_messages_itself(jobs, queue):
    """Reject, nack, interrupt and ack have the consequences that they have for a worker."""
    Stasher().stash(None, queue.record("job"))
    seen = []

    def handle(message):
        seen.append(message.attempt)
        message.extend(MINUTE)
        if message.attempt == 1:
            message.nack(delay=MINUTE)
        elif message.attempt == 2:
            message.interrupt()
        else:
            raise Reject("never")

    for ahead in (0, 1, 2):
        jobs.clock.advance(MINUTE * ahead)
        assert jobs.run(handle) == 1
    assert seen == [1, 2, 3]
    assert jobs.dead_letters == [(b"job", (), 3, "never")]


def test_attempts_that_do_not_count_use_none_up(jobs, queue):
    """A message that is given back uncounted, in an outage, comes again after its delay as the same attempt."""
    Stasher().stash(None, queue.record("job"))
    seen = []

    def handle(message):
        seen.append(message.attempt)
        if len(seen) < 20:
            message.nack(delay=MINUTE, counts=False)

    for _ in range(20):
        assert jobs.run(handle) == 1
        jobs.clock.advance(MINUTE)
    assert (seen, jobs.dead_letters, len(jobs)) == ([1] * 20, [], 0)


def test_a_message_that_is_given_back_for_ever_is_an_error(in_memory_outbox):
    """A handler that gives a message back without delay or limit does not hang the test."""
    queue = QueueService(QueueConfig(bootstrap_servers="none:1", max_attempts=None)).queue("jobs")
    Stasher().stash(None, queue.record("job"))
    with pytest.raises(InvalidMessage, match="given back 1000 times"):
        InProcessQueue(queue, in_memory_outbox).run(lambda message: message.nack())


class _Name(str, Enum):  # noqa: UP042  its text is its name
    JOBS = "jobs"


def test_texts_of_callers(in_memory_outbox):
    """Names of queues, headers and reasons may be members of an Enum, as all texts that callers have."""
    queue = QueueService(SETTINGS).queue(_Name.JOBS)
    assert type(queue.name) is str
    assert repr(queue) == "<Queue 'jobs'>"
    jobs = InProcessQueue(queue, in_memory_outbox)
    for _ in range(2):
        queue.stash(None, memoryview(b"x"), headers={_Name.JOBS: _Name.JOBS, "n": bytearray(b"m")})

    def refuse(message):
        assert message.header(_Name.JOBS) == b"jobs"
        if message.id.endswith("-0"):
            raise Reject(_Name.JOBS)
        message.reject(_Name.JOBS)

    assert jobs.run(refuse) == 2
    assert [letter.reason for letter in jobs.dead_letters] == ["jobs", "jobs"]
    assert jobs.dead_letters[0].headers == (("jobs", b"jobs"), ("n", b"m"))
