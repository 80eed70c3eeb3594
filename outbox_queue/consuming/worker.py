"""Running a handler for each message, on threads, until stopped."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

from outbox_core.cli.signals import stop_on_signals
from outbox_core.errors import is_unfinished, traceback_of
from outbox_core.plain import plain
from outbox_queue.consuming.consumer import Consumer
from outbox_queue.consuming.message import Message
from outbox_queue.errors import InvalidMessage, MessageSettled, QueueClosed, QueueError, Reject

Handler = Callable[[Message], object]
RetryDelay = Callable[[Message, Exception], timedelta]  # -> delay of the next attempt

_MOST_DOUBLINGS = 100  # of any delay, even a microsecond: more than a timedelta holds

_log = logging.getLogger(__name__)


def backoff(
    first: timedelta = timedelta(seconds=1), longest: timedelta = timedelta(minutes=5), *, jitter: float = 0.2
) -> RetryDelay:
    """Double the delay before each attempt.

    Args:
        first: delay after the first attempt.
        longest: limit of the delay.
        jitter: share by which a delay is longer or shorter at random, so that messages that failed together are spread.
    """

    def delay(message: Message, _: Exception) -> timedelta:
        doubled = first.total_seconds() * 2.0 ** min(message.attempt - 1, _MOST_DOUBLINGS)
        shortened = min(longest.total_seconds(), doubled)
        return timedelta(seconds=shortened * random.uniform(1 - jitter, 1 + jitter))  # noqa: S311  not for secrets

    return delay


class HandlerCall:
    """A handler with its consequences: a message that it does not settle itself is settled by how it ends."""

    def __init__(self, handler: Handler, retry_delay: RetryDelay) -> None:
        self._handler = handler
        self._retry_delay = retry_delay

    def __call__(self, message: Message) -> None:
        """Handle a message; nothing that the handler raises leaves this."""
        try:
            try:
                with message.span():
                    call_handler(self._handler, message)
            except Exception as error:
                self._failed(message, error)
            else:
                if not message.is_settled:
                    message.ack()
        except QueueClosed:
            _log.warning("%r: done after the consumer was closed; it will be redelivered", message)
        except MessageSettled:
            _log.debug("%r: another thread has settled it just now", message)

    def _failed(self, message: Message, error: Exception) -> None:
        if message.is_settled:
            _log.warning("%r: the handler raised after it had settled it\n%s", message, _trace(error))
            return
        try:
            if isinstance(error, Reject):
                message.reject(_text(error.reason))
                return
            _log.warning("%r: the handler raised\n%s", message, _trace(error))
            message.nack(delay=self._retry_delay(message, error), reason=f"{type(error).__name__}: {_text(error)}")
        except (QueueClosed, MessageSettled, KeyboardInterrupt):
            raise
        except BaseException as problem:  # of `retry_delay`, too
            _log.warning("%r: not given back, and redelivered after its timeout\n%s", message, _trace(problem))
            message.interrupt()


class Worker:
    """The threads of `Queue.run`, with their consumer, which they close."""

    def __init__(
        self,
        consumer: Consumer,
        handler: Handler,
        *,
        concurrency: int,
        retry_delay: RetryDelay,
        drain_timeout: timedelta,
    ) -> None:
        self._consumer = consumer
        self._handle = HandlerCall(handler, retry_delay)
        self._drain_timeout = drain_timeout
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"outbox-queue-work-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def stop(self) -> None:
        """Hand out no more messages. Returns at once."""
        self._stopping.set()
        self._consumer.stop()

    def run(self, stop: threading.Event | None, *, on_signals: bool) -> bool:
        """Work until stopped; return whether every handler finished in time. Raise QueueError if reading fails."""
        with self._consumer, stop_on_signals(self.stop) if on_signals else nullcontext():
            for thread in self._threads:
                thread.start()
            while not self._stopping.wait(0.1) and (stop is None or not stop.is_set()):
                pass
            self.stop()
            drained = self._consumer.drain(self._drain_timeout)
            if not drained:
                _log.warning("handlers did not finish within drain_timeout; their messages are redelivered")
        if self._failure is not None:
            raise self._failure
        return drained

    def _work(self) -> None:
        try:
            for message in self._consumer:
                self._handle(message)
        except BaseException as error:
            self._failure = error
            self._stopping.set()


def _trace(error: BaseException) -> str:
    """Format a traceback; some formatters of logs fail where the error's own text does."""
    return traceback_of(error).rstrip()


def check_handler(handler: object) -> None:
    """Refuse a handler that has not done its work when it returns (`InvalidMessage`)."""
    if not callable(handler):
        raise InvalidMessage(f"handler: expected a function of a message, got {handler!r:.200}")
    for called in (handler, getattr(handler, "__call__", None)):  # noqa: B004  an object with `async def __call__`
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise InvalidMessage(
                f"handler: {handler!r:.200} is asynchronous, and would only be begun: take messages with "
                "`async with queue.async_consumer() as consumer`, or hand over a function that runs it"
            )
        if inspect.isgeneratorfunction(called):
            raise InvalidMessage(f"handler: {handler!r:.200} is a generator function: calling it does nothing yet")


def call_handler(handler: Handler, message: Message) -> None:
    """Call a handler; raise QueueError for one that was only begun, or raised what is no Exception."""
    try:
        result = handler(message)
    except (Exception, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:  # in an event loop of its own
        raise QueueError("the handler was cancelled") from error
    except BaseException as error:  # SystemExit, a panic of an extension in Rust: it must not end worker after worker
        raise QueueError(f"the handler raised {type(error).__name__}: {_text(error)}") from error
    if is_unfinished(result):
        raise QueueError(f"the handler returned {type(result).__name__}, which is not awaited: the work is not done")


def _text(value: object) -> str:
    try:
        return str(plain(value))
    except Exception:
        return f"{type(value).__name__} without text"
