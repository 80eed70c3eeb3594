"""A TCP proxy that cuts real connections: the network faults of the tests."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from enum import Enum
from typing import Any, Self

from devstack.ports import LOCALHOST

_CHUNK = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Direction(Enum):
    """The two directions of a connection, as its client sees them."""

    REQUESTS = "requests"
    ANSWERS = "answers"


class _Gate:
    """The gate that the bytes of one direction pass. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._is_dropping = False
        self._delay = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self, *, dropping: bool) -> None:
        self._is_dropping = dropping
        self._opened.clear()

    def open(self, delay: float = 0.0) -> None:
        self._is_dropping, self._delay = False, delay
        self._opened.set()

    async def wait(self) -> None:
        await self._opened.wait()

    async def lets_pass(self) -> bool:
        """Wait until bytes that have arrived may go on; False if they are thrown away."""
        if self._is_dropping:
            return False
        if self._delay:
            await asyncio.sleep(self._delay)
        await self._opened.wait()
        return True


_gates_of_connection: ContextVar[dict[Direction, _Gate]] = ContextVar("gates of a connection")


class TcpProxy:
    """A proxy that forwards `bootstrap` to a target, with faults on demand. Also a context manager.

    Three faults, each with its end: `cut()`/`restore()` is a black hole (connections stay open, new ones are accepted,
    nothing passes, or nothing in one direction), `slow()`/`restore()` a line that is slow, `reset()`/`resume()` a
    machine that refuses (connections end with RST, new ones too). `lose_connections()` is a firewall
    that lost its table.

    Its sockets belong to an event loop in a thread of its own; every method hands its work to that loop and waits.

    Args:
        target_host: Where connections are forwarded to.
        target_port: The same.
        listen_port: Port on 127.0.0.1; 0 takes a free one.
    """

    def __init__(self, target_host: str, target_port: int, listen_port: int = 0) -> None:
        self._target = (target_host, target_port)
        self._listener = socket.create_server((LOCALHOST, listen_port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._gates = {direction: _Gate() for direction in Direction}
        self._refusing = False
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)

    @property
    def bootstrap(self) -> str:
        """Return host and port to connect to."""
        return f"{LOCALHOST}:{self.port}"

    def start(self) -> Self:
        """Begin to accept connections."""
        self._thread.start()
        self._do(self._start())
        return self

    def stop(self) -> None:
        """Close everything. The proxy cannot be started again."""
        if not self._thread.is_alive():
            self._listener.close()
            return
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def forward_to(self, host: str, port: int) -> None:
        """Forward new connections elsewhere, as a load balancer does; those that are there stay."""
        self._target = (host, port)

    def cut(self, *, drop: bool = False, only: Direction | None = None) -> None:
        """Become a black hole.

        Args:
            drop: Throw away bytes that arrive meanwhile, for good; otherwise they are held and forwarded by
                `restore`, as TCP's retransmission would.
            only: The direction in which nothing passes; None for both. While one direction is open, new connections
                reach the target.
        """
        self._do(self._close_gates([only] if only is not None else list(Direction), dropping=drop))

    def slow(self, seconds: float) -> None:
        """Let each piece of a connection's bytes, in both directions, wait for so long."""
        self._do(self._open_gates(seconds))

    def restore(self) -> None:
        """End `cut` and `slow`: forward again, beginning with the held bytes."""
        self._do(self._open_gates(0.0))

    def lose_connections(self) -> None:
        """Let the connections of now stay open and carry nothing any more, for good; new ones pass."""
        self._do(self._lose_connections())

    def reset(self) -> None:
        """Close all connections with RST and reset new ones at once."""
        self._do(self._reset(refusing=True))

    def resume(self) -> None:
        """End `reset`: accept connections again."""
        self._do(self._reset(refusing=False))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _start(self) -> None:
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def _stop(self) -> None:
        if self._accepting is not None:
            await cancel_all({self._accepting})
        self._listener.close()
        await cancel_all(self._connections)

    async def _close_gates(self, directions: list[Direction], *, dropping: bool) -> None:
        for direction in directions:
            self._gates[direction].close(dropping=dropping)

    async def _open_gates(self, delay: float) -> None:
        for gate in self._gates.values():
            gate.open(delay)

    async def _lose_connections(self) -> None:
        for gate in self._gates.values():
            gate.close(dropping=True)
        self._gates = {direction: _Gate() for direction in Direction}

    async def _reset(self, *, refusing: bool) -> None:
        self._refusing = refusing
        if refusing:
            await cancel_all(self._connections)

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            client.setblocking(False)
            if self._refusing:
                close_with_reset(client)
                continue
            task = asyncio.create_task(self._serve(client))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, client: socket.socket) -> None:
        """Carry one connection until either side closes it; both sides are always reset at the end."""
        server = new_socket()
        _gates_of_connection.set(self._gates)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not any(gate.is_open for gate in self._gates.values()):
                await self._gates[Direction.REQUESTS].wait()
            await self._loop.sock_connect(server, self._target)
            await self._carry(client, server)
        except* OSError:
            pass
        finally:
            close_with_reset(client)
            close_with_reset(server)

    async def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Forward both directions until one of them fails or both end."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pump(Direction.REQUESTS, client, server))
            both.create_task(self._pump(Direction.ANSWERS, server, client))

    async def _pump(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        """Forward one direction. The gate is passed after the read, so a cut holds even bytes already read."""
        while chunk := await self._loop.sock_recv(source, _CHUNK):
            await self._forward(direction, sink, chunk)
        await _gates_of_connection.get()[direction].wait()  # a black hole hides the end of a connection too
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    async def _forward(self, direction: Direction, sink: socket.socket, chunk: bytes | bytearray) -> None:
        if chunk and await _gates_of_connection.get()[direction].lets_pass():
            await self._loop.sock_sendall(sink, chunk)


def new_socket() -> socket.socket:
    """Return a socket for an event loop that sends small requests at once."""
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


async def cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def close_with_reset(side: socket.socket) -> None:
    """Close it with RST instead of FIN."""
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    side.close()
