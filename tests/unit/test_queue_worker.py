"""Workers without Kafka: whatever a handler does to one message, the next one is handled."""

import functools
import threading
from datetime import timedelta

import pytest

from outbox_queue import InvalidMessage, MessageSettled, QueueConfig, QueueService, Reject, backoff
from outbox_queue.headers import NOTHING
from outbox_queue.message import Message, State
from outbox_queue.worker import Worker

UNTIL_IT_IS_DONE = timedelta(seconds=30)


class Consumer:
    """Hands out messages, and notes what becomes of them."""

    def __init__(self, number):
        self.settled = []
        self._messages = iter(
            [Message(self, "q", b"%d" % n, (0, n), NOTHING, enqueued_at_ms=0, max_attempts=None) for n in range(number)]
        )
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

    def acknowledge(self, message):
        self._settle(message, State.ACKNOWLEDGED, "ack")

    def give_back(self, message, delay_ms, reason):
        self._settle(message, State.GIVEN_BACK, f"nack after {delay_ms} ms: {reason}")

    def set_aside(self, message, reason):
        self._settle(message, State.REJECTED, f"reject: {reason}")

    def interrupt(self, message):
        self._settle(message, State.INTERRUPTED, "interrupt")

    def _settle(self, message, state, what):
        message._state = state
        self.settled.append(what)


def outcome(handler, retry_delay=lambda *_: timedelta(seconds=1)):
    """What becomes of a message that the handler gets, and that the next one is handled too."""
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
    """An error that cannot say what it is."""

    def __str__(self):
        raise ValueError("no text")


def failing(error):
    """A handler that raises."""

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
    ],
)
def test_an_error_settles_its_message(error, settled):
    """Whatever the error says, or cannot say, its message is given back or set aside with a text."""
    assert outcome(failing(error)) == [settled]


@pytest.mark.parametrize("delay", [timedelta(days=-1), "soon", None])
def test_a_retry_delay_that_is_none_leaves_the_message_to_its_timeout(delay):
    """A bad answer of `retry_delay` ends no worker; None means at once."""
    expected = "nack after 0 ms: ValueError: x" if delay is None else "interrupt"
    assert outcome(failing(ValueError("x")), lambda *_: delay) == [expected]


def test_a_retry_delay_that_raises_leaves_the_message_to_its_timeout():
    """An error of `retry_delay` ends no worker."""

    def raises(*_):
        raise OverflowError("too many attempts")

    assert outcome(failing(ValueError("x")), raises) == ["interrupt"]


def test_another_thread_may_settle_the_message_first():
    """Between a look at a message and its settling another thread may have settled it."""

    def handle(message):
        def settled_meanwhile(_):
            raise MessageSettled("by another thread")

        message._settler = type("Other", (), {"acknowledge": settled_meanwhile})
        assert not message.is_settled

    assert outcome(handle) == []


def test_another_thread_may_settle_a_failed_message_first():
    """The same when the handler has raised."""

    def handle(message):
        def settled_meanwhile(*_):
            raise MessageSettled("by another thread")

        message._settler = type("Other", (), {"give_back": settled_meanwhile, "interrupt": settled_meanwhile})
        raise ValueError("x")

    assert outcome(handle) == []


async def begun_only(_message):
    """What `queue.run` cannot run."""


class BegunOnly:
    """The same as an object."""

    async def __call__(self, _message):
        pass


def generating(_message):
    """Does nothing when it is called."""
    yield


class Promise:
    """Something to be awaited that is no coroutine."""

    def __init__(self, _message):
        pass

    def __await__(self):
        yield


@pytest.mark.parametrize("handler", [begun_only, BegunOnly(), functools.partial(begun_only), generating, None, "print"])
def test_a_handler_that_would_not_do_its_work_is_refused(handler):
    """An asynchronous function is refused before anything is connected."""
    queue = QueueService(QueueConfig(bootstrap_servers="nowhere:1")).queue("q")
    with pytest.raises(InvalidMessage, match="handler"):
        queue.run(handler)


@pytest.mark.parametrize("returned", [begun_only, Promise, generating])
def test_work_that_is_only_begun_is_not_acknowledged(returned):
    """A handler that returns something to be awaited or iterated has failed; nothing warns that it was not awaited."""
    (settled,) = outcome(returned)
    assert "nack" in settled
    assert "the work is not done" in settled


@pytest.mark.parametrize("attempt", [40, 41, 1000, 2**31 - 2])
@pytest.mark.parametrize("first", [timedelta(microseconds=1), timedelta(minutes=5), timedelta(days=300)])
def test_a_delay_never_overflows(attempt, first):
    """However many attempts there were, the delay is at most the longest."""
    message = Message(None, "q", b"", (0, 0), NOTHING._replace(attempt=attempt), enqueued_at_ms=0, max_attempts=None)
    longest = timedelta(days=300)
    assert backoff(first, longest, jitter=0)(message, ValueError()) <= longest
