"""The asynchronous consumer without Kafka: its beginning and its end."""

import asyncio
import threading

import pytest

from outbox_queue import QueueClosed
from outbox_queue.consuming.aio import AsyncConsumer

PATIENCE = 30.0


class Consumer:
    """A consumer without messages."""

    def __init__(self):
        self.is_stopped = False
        self.closed = threading.Event()
        self._listener = lambda: None

    def listen(self, listener):
        self._listener = listener

    def receive(self, _timeout):
        if self.closed.is_set():
            raise QueueClosed("closed")

    def close(self):
        self.is_stopped = True
        self.closed.set()
        self._listener()


def test_closing_ends_iteration():
    """A task that iterates ends when another one closes the consumer, and so does one that begins afterwards."""
    consumer = Consumer()

    async def iterate(messages):
        return [message async for message in messages]

    async def run():
        async with asyncio.timeout(PATIENCE), AsyncConsumer(lambda: consumer) as messages:
            task = asyncio.create_task(iterate(messages))
            await asyncio.sleep(0.01)
            await messages.close()
            assert await task == []
            assert await iterate(messages) == []
            with pytest.raises(QueueClosed):
                await messages.receive()

    asyncio.run(run())


def test_iterating_without_a_consumer_is_an_error():
    """Iterating without `async with` is an error, instead of an iteration without messages."""

    async def run():
        async for _ in AsyncConsumer(Consumer):
            pass

    with pytest.raises(QueueClosed, match="async with"):
        asyncio.run(run())


def test_a_cancelled_beginning_leaves_no_consumer_behind():
    """A consumer that is made while its task is cancelled is closed, and keeps no messages."""
    consumer, begun, go_on = Consumer(), threading.Event(), threading.Event()

    def make():
        begun.set()
        assert go_on.wait(PATIENCE)
        return consumer

    async def run():
        task = asyncio.create_task(AsyncConsumer(make).__aenter__())
        await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(run())
    assert consumer.closed.wait(PATIENCE)


def test_a_consumer_that_was_just_made_is_closed_too():
    """A consumer is closed, too, if it is made already when its task is cancelled, but not yet handed over."""
    consumer = Consumer()

    async def run():
        made = threading.Event()

        def make():
            made.set()
            return consumer

        task = asyncio.create_task(AsyncConsumer(make).__aenter__())
        await asyncio.sleep(0)
        assert made.wait(PATIENCE)  # without a turn of the loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert consumer.closed.wait(PATIENCE)
