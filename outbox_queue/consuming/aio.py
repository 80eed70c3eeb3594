"""Receiving messages with asyncio: a thin shell over the consumer, which keeps its own threads.

A message's methods are called as they are, since they do not wait for Kafka; only `reject` does: use
`await consumer.reject(message, reason)`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

from outbox_queue.consuming.consumer import Consumer
from outbox_queue.consuming.message import Message
from outbox_queue.errors import QueueClosed
from outbox_queue.times import Timeout, seconds


class _Making:
    """A consumer in the making on a thread, which cannot be cancelled: once abandoned, it is closed there."""

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None
        self._is_abandoned = False

    def run(self) -> Consumer:
        consumer = self._make()
        with self._lock:
            self._consumer = consumer
            is_abandoned = self._is_abandoned
        if is_abandoned:
            consumer.close()
        return consumer

    def abandon(self) -> Consumer | None:
        """Have `run` close the consumer; return it if it is made already, for the caller to close."""
        with self._lock:
            self._is_abandoned = True
            return self._consumer


class AsyncConsumer:
    """The consumer for the tasks of one event loop. Made by `Queue.async_consumer`."""

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self._consumer: Consumer | None = None
        self._arrival: asyncio.Event

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._arrival = asyncio.Event()
        making = _Making(self._make)
        try:
            self._consumer = await asyncio.to_thread(making.run)
        except asyncio.CancelledError:
            if (consumer := making.abandon()) is not None:
                loop.run_in_executor(None, consumer.close)
            raise

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._arrival.set)

        self._consumer.listen(wake)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        self._open()
        try:
            message = await self._next()
        except QueueClosed:
            message = None
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self, timeout: Timeout = None) -> Message | None:  # noqa: ASYNC109  as Consumer.receive
        """Wait for the next message, as `Consumer.receive` does. Cancelling it loses no message."""
        try:
            async with asyncio.timeout(seconds(timeout)):
                return await self._next()
        except TimeoutError:
            return None

    async def _next(self) -> Message | None:
        consumer = self._open()
        while True:
            self._arrival.clear()  # before looking: what arrives afterwards sets it again
            message = consumer.receive(timedelta(0))
            if message is not None or consumer.is_stopped:
                if message is not None:
                    self._arrival.set()  # another task may be waiting, and there may be more
                return message
            await self._arrival.wait()

    async def reject(self, message: Message, reason: str) -> None:
        """Make a message a dead letter; see `Message.reject`."""
        await asyncio.to_thread(message.reject, reason)

    def stop(self) -> None:
        """Hand out no more messages: iteration ends. Returns at once; settling goes on."""
        self._open().stop()

    async def drain(self, timeout: Timeout = None) -> bool:  # noqa: ASYNC109  as Consumer.drain
        """Stop, and wait until all received messages are settled; see `Consumer.drain`."""
        return await asyncio.to_thread(self._open().drain, timeout)

    async def close(self) -> None:
        """Close the consumer; see `Consumer.close`."""
        if self._consumer is not None:
            await asyncio.to_thread(self._consumer.close)

    def _open(self) -> Consumer:
        if self._consumer is None:
            raise QueueClosed("use `async with queue.async_consumer() as consumer`")
        return self._consumer
