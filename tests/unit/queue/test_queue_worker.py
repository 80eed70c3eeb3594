"""Workers without Kafka: after any error of a handler the next message is handled."""

import functools
import threading
from asyncio import CancelledError
from datetime import timedelta

import pytest

from outbox_queue import InvalidMessage, MessageSettled, QueueConfig, QueueService, Reject, backoff
from outbox_queue.consuming.delivery import State
from outbox_queue.consuming.message import Message
from outbox_queue.consuming.worker import Worker
from tests.queueing import delivery

UNTIL_IT_IS_DONE = timedelta(seconds=30)


class Consumer:
    """A consumer that hands out messages, and notes the outcome of each."""

    def __init__(self, number):
        self.settled = []
        self._messages = iter([Message(delivery(payload=b"%d" % n), self) for n in range(number)])
        self._all = threading.Event()
        self.is_closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def __iter__(self):
        yield from self._messages
        self._all.set()

    def stop(self):
        pass

    def drain(self, _timeout):
        return self._all.wait(30)

    def acknowledge(self, delivery):
        self._settle(delivery, State.ACKNOWLEDGED, "ack")

    def nack(self, delivery, delay_ms, reason, *, counts):
        assert counts
        self._settle(delivery, State.NACKED, f"nack after {delay_ms} ms: {reason}")

    def reject(self, delivery, reason):
        self._settle(delivery, State.REJECTED, f"reject: {reason}")

    def interrupt(self, delivery):
        self._settle(delivery, State.INTERRUPTED, "interrupt")

    def _settle(self, delivery, state, what):
        delivery.state = state
        self.settled.append(what)


def outcome(handler, retry_delay=lambda *_: timedelta(seconds=1)):
    """Return the outcome of a message that the handler gets; check that the next one is handled, too."""
    consumer = Consumer(2)
    stop = threading.Event()

    def first_one(message):
        if message.payload == b"0":
            return handler(message)
        stop.set()
        return None

    worker = Worker(consumer, first_one, concurrency=1, retry_delay=retry_delay, drain_timeout=UNTIL_IT_IS_DONE)
    assert worker.run(stop, on_signals=False)
    assert consumer.is_closed
    assert consumer.settled[-1] == "ack"
    return consumer.settled[:-1]


class Unprintable(Exception):
    """An error that cannot be printed."""

    def __str__(self):
        raise ValueError("no text")


class Panic(BaseException):
    """An error as extensions in Rust raise it."""


def failing(error):
    """Return a handler that raises."""

    def handle(_):
        raise error

    return handle


@pytest.mark.parametrize(
    ("error", "settled"),
    [
        (ValueError("no number"), "nack after 1000 ms: ValueError: no number"),
        (ValueError("\ud800"), "nack after 1000 ms: ValueError: ?"),
        (Unprintable(), "nack after 1000 ms: Unprintable: Unprintable without text"),
        (Reject("makes no sense"), "reject: makes no sense"),
        (Reject(ValueError("an error")), "reject: an error"),
        (CancelledError(), "nack after 1000 ms: QueueError: the handler was cancelled"),  # of its own event loop
        (SystemExit(3), "nack after 1000 ms: QueueError: the handler raised SystemExit: 3"),
        (Panic("index"), "nack after 1000 ms: QueueError: the handler raised Panic: index"),
        (SyntaxError("bad", ("rule", 1, 2, b"a + + b")), "nack after 1000 ms: SyntaxError: bad (rule, line 1)"),
    ],
)
def test_an_error_settles_its_message(error, settled):
    """Any error, even one that cannot be printed, gives its message back or sets it aside, with a text."""
    assert outcome(failing(error)) == [settled]


@pytest.mark.parametrize("delay", [timedelta(days=-1), "soon", None])
def test_a_retry_delay_that_is_none_leaves_the_message_to_its_timeout(delay):
    """A bad answer of `retry_delay` ends no worker; None means at once."""
    expected = "nack after 0 ms: ValueError: x" if delay is None else "interrupt"
    assert outcome(failing(ValueError("x")), lambda *_: delay) == [expected]


@pytest.mark.parametrize("error", [OverflowError("too many attempts"), SystemExit(3)])
def test_a_retry_delay_that_raises_leaves_the_message_to_its_timeout(error):
    """An error of `retry_delay` ends no worker."""

    def raises(*_):
        raise error

    assert outcome(failing(ValueError("x")), raises) == ["interrupt"]


def test_another_thread_may_settle_the_message_first():
    """A message that another thread settles first ends no worker."""

    def handle(message):
        def settled_meanwhile(_):
            raise MessageSettled("by another thread")

        message._acks = type("Other", (), {"acknowledge": settled_meanwhile})
        assert not message.is_settled

    assert outcome(handle) == []


def test_another_thread_may_settle_a_failed_message_first():
    """A message that another thread settles first ends no worker even if its handler raises."""

    def handle(message):
        def settled_meanwhile(*_):
            raise MessageSettled("by another thread")

        message._acks = type("Other", (), {"nack": settled_meanwhile, "interrupt": settled_meanwhile})
        raise ValueError("x")

    assert outcome(handle) == []


async def begun_only(_message):
    """Do nothing, asynchronously: `queue.run` cannot run it."""


class BegunOnly:
    """A callable object that `queue.run` cannot run."""

    async def __call__(self, _message):
        pass


def generating(_message):
    """Do nothing when called, as a generator function."""
    yield


class Promise:
    """An awaitable that is no coroutine."""

    def __init__(self, _message):
        pass

    def __await__(self):
        yield


@pytest.mark.parametrize("handler", [begun_only, BegunOnly(), functools.partial(begun_only), generating, None, "print"])
def test_a_handler_that_would_not_do_its_work_is_refused(handler):
    """A handler that is asynchronous, a generator function or not callable is refused before any connection."""
    queue = QueueService(QueueConfig(bootstrap_servers="nowhere:1")).queue("q")
    with pytest.raises(InvalidMessage, match="handler"):
        queue.run(handler)


@pytest.mark.parametrize("returned", [begun_only, Promise, generating])
def test_work_that_is_only_begun_is_not_acknowledged(returned):
    """A handler that returns an awaitable or an iterator has failed; no warning says that it was not awaited."""
    (settled,) = outcome(returned)
    assert "nack" in settled
    assert "the work is not done" in settled


@pytest.mark.parametrize("attempt", [40, 41, 1000, 2**31 - 2])
@pytest.mark.parametrize("first", [timedelta(microseconds=1), timedelta(minutes=5), timedelta(days=300)])
def test_a_delay_never_overflows(attempt, first):
    """After any number of attempts the delay is at most the longest."""
    message = Message(delivery(attempt=attempt), None)
    longest = timedelta(days=300)
    assert backoff(first, longest, jitter=0)(message, ValueError()) <= longest
