"""A proxy that understands Kafka's framing: it delays, holds, duplicates and delivers late single requests.

A `TcpProxy`, whose held bytes die with their connection, cannot show this fault of a network: a client loses a
connection and repeats its request on a new one, and the first copy, still somewhere in between, arrives later. Here a
request is taken off its connection, the client is reset, and the bytes are delivered when a test says so, on the
connection to the broker on which they would have arrived. The late answer reaches no client.

    with broker.frame_proxied(1) as proxy:
        trap = proxy.hold(Match(Api.END_TXN, commits=True))
        ...                       # the client commits, is reset, and repeats its EndTxn on a new connection
        trap.wait_until_held(10)
        ...                       # the client's next transaction is open
        trap.deliver()            # ... and the first EndTxn arrives
        trap.wait_until_answered(10)

A request is a frame: its length in four bytes, then a header (API key, version, correlation id, client id) and a body.
"""

import asyncio
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any

from devstack.proxy import Direction, TcpProxy, cancel_all, close_with_reset, new_socket

_CHUNK = 256 * 1024
_LONGEST_FRAME = 256 * 1024 * 1024
_LENGTH = struct.Struct(">i")
_HEADER = struct.Struct(">hhi")  # API key, version, correlation id
_CORRELATION = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_PRODUCER = struct.Struct(">qh?")  # in EndTxn: producer id, epoch, whether it commits


class Api(IntEnum):
    """Keys of the requests that rules are made for."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    CREATE_TOPICS = 19
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26


_FIRST_FLEXIBLE: dict[int, int] = {
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.LIST_OFFSETS: 6,
    Api.METADATA: 9,
    Api.FIND_COORDINATOR: 3,
    Api.JOIN_GROUP: 6,
    Api.CREATE_TOPICS: 5,
    Api.INIT_PRODUCER_ID: 2,
    Api.ADD_PARTITIONS_TO_TXN: 3,
    Api.END_TXN: 3,
}
"""Versions from which strings are compact and headers carry tagged fields."""

_BEGIN_WITH_TRANSACTIONAL_ID = {Api.PRODUCE, Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN}
_FIRST_WITH_TRANSACTIONAL_ID: dict[int, int] = {Api.PRODUCE: 3}
_ANSWER_WITH_ONE_CODE = {Api.INIT_PRODUCER_ID, Api.END_TXN}


class Request:
    """A request frame, which reads its fields on demand.

    Args:
        frame: All of it, the length included.
    """

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.api_key: int
        self.version: int
        self.correlation_id: int
        self.api_key, self.version, self.correlation_id = _HEADER.unpack_from(frame, _LENGTH.size)

    @cached_property
    def client_id(self) -> str | None:
        """Return the client.id that the request carries."""
        return _string(self.frame, _LENGTH.size + _HEADER.size)[0]

    @property
    def transactional_id(self) -> str | None:
        """Return the transactional.id it is about; None for none, and for requests that name none."""
        api, first = self.api_key, _FIRST_WITH_TRANSACTIONAL_ID.get(self.api_key, 0)
        if api not in _BEGIN_WITH_TRANSACTIONAL_ID or self.version < first:
            return None
        return self._first_string[0]

    @property
    def commits(self) -> bool | None:
        """Tell an EndTxn that commits (True) from one that aborts (False); None for other requests."""
        if self.api_key != Api.END_TXN:
            return None
        return bool(_PRODUCER.unpack_from(self.frame, self._first_string[1])[2])

    @property
    def name(self) -> str:
        """Name it for logs: "END_TXN commit", "FETCH", "API 18"."""
        try:
            name = Api(self.api_key).name
        except ValueError:
            return f"API {self.api_key}"
        return name if self.commits is None else f"{name} {'commit' if self.commits else 'abort'}"

    @property
    def is_flexible(self) -> bool:
        """Tell whether its version has compact strings and tagged fields."""
        return self.version >= _FIRST_FLEXIBLE.get(self.api_key, 1 << 15)

    @cached_property
    def _first_string(self) -> tuple[str | None, int]:
        """Return the first field of the body if it is a string, and the place of the second."""
        at = _string(self.frame, _LENGTH.size + _HEADER.size)[1]
        if not self.is_flexible:
            return _string(self.frame, at)
        return _compact_string(self.frame, _after_tags(self.frame, at))

    def __repr__(self) -> str:
        return f"<{self.name} v{self.version} #{self.correlation_id} of {self.client_id}>"


@dataclass(frozen=True)
class Match:
    """The requests of a rule.

    Attributes:
        api: The API key.
        commits: Of EndTxn, only commits (True) or only aborts (False).
        transactional_id: Only requests about this one.
        where: Only requests for which it is true; called on the proxy's thread.
        nth: The first of these that the rule acts on, counted from 1.
    """

    api: Api
    commits: bool | None = None
    transactional_id: str | None = None
    where: Callable[[Request], bool] | None = None
    nth: int = 1

    def __call__(self, request: Request) -> bool:
        """Tell whether the request is one of these; the rule counts them."""
        return (
            request.api_key == self.api
            and (self.commits is None or request.commits is self.commits)
            and (self.transactional_id is None or request.transactional_id == self.transactional_id)
            and (self.where is None or self.where(request))
        )


class Event(Enum):
    """States of a request on which a rule acted, in the order in which they follow."""

    HELD = "held"
    DELAYED = "delayed"
    DELIVERED = "delivered"
    ANSWERED = "answered"
    LOST = "lost"


@dataclass(frozen=True)
class LogEntry:
    """An action of a rule.

    Attributes:
        at: Its time, in seconds since the epoch.
        event: Its outcome.
        request: Its request.
    """

    at: float
    event: Event
    request: Request


class Trap:
    """A rule that catches one request, and the fate of that. Its methods may be called from any thread.

    Attributes:
        request: The request that was caught, or None.
        answer: The broker's late answer, a frame, if no client waits for it; else None.
    """

    def __init__(self, match: Match, loop: asyncio.AbstractEventLoop) -> None:
        self.match = match
        self.request: Request | None = None
        self.answer: bytes | None = None
        self._loop = loop
        self._told = asyncio.Event()
        self._is_dropped = False
        self._happened: set[Event] = set()
        self._changed = threading.Condition()

    @property
    def is_lost(self) -> bool:
        """Tell whether the request cannot arrive any more: the broker or the proxy closed its connection."""
        return Event.LOST in self._happened

    @property
    def error_code(self) -> int | None:
        """Return the code in the late answer to an EndTxn or InitProducerId, 0 for success; None if unknown."""
        if self.request is None or self.answer is None or self.request.api_key not in _ANSWER_WITH_ONE_CODE:
            return None
        at = _LENGTH.size + 4  # the correlation id
        if self.request.is_flexible:
            at = _after_tags(self.answer, at)
        return int(_SHORT.unpack_from(self.answer, at + 4)[0])  # behind the throttle time

    def deliver(self) -> None:
        """Send the request on to the broker: now if it was caught, else as soon as it is."""
        with suppress(RuntimeError):  # the proxy has been stopped
            self._loop.call_soon_threadsafe(self._told.set)

    def drop(self) -> None:
        """Lose the request: it will not be delivered. One that was held in place takes its connection along."""
        self._is_dropped = True
        self.deliver()

    def wait_until_held(self, timeout: float) -> bool:
        """Wait for a request to be caught; False if none was within `timeout` seconds."""
        return self._wait_for({Event.HELD}, timeout)

    def wait_until_delivered(self, timeout: float) -> bool:
        """Wait until the request was sent on; False if it was not, or if it is lost."""
        self._wait_for({Event.DELIVERED, Event.LOST}, timeout)
        return Event.DELIVERED in self._happened

    def wait_until_answered(self, timeout: float) -> bool:
        """Wait for the broker's late answer; False if none came, or if the request is lost."""
        self._wait_for({Event.ANSWERED, Event.LOST}, timeout)
        return Event.ANSWERED in self._happened

    def _wait_for(self, events: set[Event], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(events & self._happened), timeout)

    # -- for the proxy, on its thread

    async def told_to_deliver(self) -> None:
        """Wait for `deliver`.

        Raises:
            ConnectionAbortedError: It came to `drop`.
        """
        await self._told.wait()
        if self._is_dropped:
            raise ConnectionAbortedError("dropped")

    def note(self, event: Event) -> None:
        """Notify the waiting threads."""
        with self._changed:
            self._happened.add(event)
            self._changed.notify_all()


class _Act(Enum):
    WATCH = "watch"
    DELAY = "delay"
    HOLD = "hold"
    HOLD_AND_RESET = "hold and reset"
    DUPLICATE = "duplicate"


@dataclass
class _Rule:
    """A match and the action on its requests."""

    match: Match
    act: _Act
    trap: Trap | None = None
    seconds: float = 0.0
    left: int | None = 1  # None: without end
    matched: int = 0

    def fires(self, request: Request) -> bool:
        if self.left == 0 or not self.match(request):
            return False
        self.matched += 1
        if self.matched < self.match.nth:
            return False
        if self.left is not None:
            self.left -= 1
        return True


class _TakenOffError(Exception):
    """A connection that ends for its client, and lives on for the request that was caught."""

    def __init__(self, trap: Trap, request: Request) -> None:
        super().__init__(request)
        self.trap = trap
        self.request = request


class FrameProxy(TcpProxy):
    """A proxy of Kafka's frames to a broker; rules pick requests out. Also a context manager.

    Rules are tried in the order in which they were made, and the first that fires decides. The faults of `TcpProxy`
    work here, too; a request that was taken off its connection survives it.

    Args:
        target_host: Where the broker is.
        target_port: The same.
        listen_port: Port on 127.0.0.1, which the broker must advertise; 0 takes a free one.
    """

    def __init__(self, target_host: str, target_port: int, listen_port: int = 0) -> None:
        super().__init__(target_host, target_port, listen_port)
        self._rules: list[_Rule] = []
        self._late: set[asyncio.Task[None]] = set()
        self._log: list[LogEntry] = []
        self._seen: Counter[int] = Counter()

    @property
    def log(self) -> list[LogEntry]:
        """Return the actions of the rules so far."""
        return list(self._log)

    def seen(self, api: Api) -> int:
        """Count such requests of clients, those included on which rules acted."""
        return self._seen[api]

    def hold(self, match: Match, *, reset: bool = True) -> Trap:
        """Catch the next request that matches, until `deliver` or `drop` of its trap is called.

        Args:
            match: The request.
            reset: Reset the client's connection at once, so that the client repeats the request on another; the one
                that was caught is delivered on the old connection to the broker, and its answer is swallowed.
                Otherwise the connection stands still, and its client gets the answer in the end.
        """
        return self._catch(match, _Act.HOLD_AND_RESET if reset else _Act.HOLD)

    def duplicate(self, match: Match) -> Trap:
        """Forward the next request that matches, and hold a copy, to be delivered on a connection of its own."""
        return self._catch(match, _Act.DUPLICATE)

    def watch(self, match: Match) -> Trap:
        """Note the next request that matches, and forward it."""
        return self._catch(match, _Act.WATCH)

    def delay(self, match: Match, seconds: float, *, times: int | None = None) -> None:
        """Let requests that match, and all behind them on their connections, wait for some seconds each.

        Args:
            match: The requests.
            seconds: Delay of each.
            times: Number of them; None for all.
        """
        self._do(self._add(_Rule(match, _Act.DELAY, seconds=seconds, left=times)))

    def forget(self, trap: Trap) -> bool:
        """Remove the rule of a trap; return False if it had caught a request, which stays held."""
        self._do(self._remove(trap))
        return trap.request is None

    def _catch(self, match: Match, act: _Act) -> Trap:
        trap = Trap(match, self._loop)
        self._do(self._add(_Rule(match, act, trap)))
        return trap

    async def _add(self, rule: _Rule) -> None:
        self._rules.append(rule)

    async def _remove(self, trap: Trap) -> None:
        self._rules = [rule for rule in self._rules if rule.trap is not trap]

    async def _stop(self) -> None:
        await super()._stop()
        await cancel_all(self._late)

    # -- a connection

    async def _carry(self, client: socket.socket, server: socket.socket) -> None:
        unread = bytearray()  # of the answers, for the one that reads on when the client is gone
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump_requests(client, server))
                both.create_task(self._pump_answers(client, server, unread))
        except* _TakenOffError as error:
            close_with_reset(client)
            taken = next(one for one in error.exceptions if isinstance(one, _TakenOffError))
            # A second descriptor: `_serve` closes the first, and the connection lives on.
            self._spawn(self._deliver_late(taken.trap, taken.request, _adopted(server.dup()), unread))
            self._happens(Event.HELD, taken.trap, taken.request)

    async def _pump_requests(self, client: socket.socket, server: socket.socket) -> None:
        """Forward whole requests. The gate is passed after the read, as in `_pump`."""
        unread = bytearray()
        while chunk := await self._loop.sock_recv(client, _CHUNK):
            unread += chunk
            passing = bytearray()
            for frame in _frames(unread):
                self._seen[_HEADER.unpack_from(frame, _LENGTH.size)[0]] += 1
                rule = self._rule_for(frame) if self._rules else None
                if rule is not None:
                    await self._forward(Direction.REQUESTS, server, passing)
                    passing.clear()
                    await self._act(rule, Request(frame), server)
                else:
                    passing += frame
            await self._forward(Direction.REQUESTS, server, passing)
        await self._gates[Direction.REQUESTS].wait()
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    async def _pump_answers(self, client: socket.socket, server: socket.socket, unread: bytearray) -> None:
        """Forward whole answers."""
        while chunk := await self._loop.sock_recv(server, _CHUNK):
            unread += chunk
            await self._forward(Direction.ANSWERS, client, b"".join(_frames(unread)))
        await self._gates[Direction.ANSWERS].wait()
        raise ConnectionResetError("the broker closed the connection")

    # -- rules

    def _rule_for(self, frame: bytes) -> _Rule | None:
        request = Request(frame)
        rule = next((rule for rule in self._rules if rule.fires(request)), None)
        if rule is not None and rule.left == 0:
            self._rules.remove(rule)
        return rule

    async def _act(self, rule: _Rule, request: Request, server: socket.socket) -> None:
        """Carry out the rule, and forward the request if that belongs to it."""
        trap = rule.trap
        if trap is None:
            self._log.append(LogEntry(time.time(), Event.DELAYED, request))
            await asyncio.sleep(rule.seconds)
            await self._forward(Direction.REQUESTS, server, request.frame)
            return
        trap.request = request
        if rule.act is _Act.HOLD_AND_RESET:
            raise _TakenOffError(trap, request)
        if rule.act is _Act.WATCH:
            await self._forward(Direction.REQUESTS, server, request.frame)
            self._happens(Event.DELIVERED, trap, request)
            return
        self._happens(Event.HELD, trap, request)
        if rule.act is _Act.DUPLICATE:
            self._spawn(self._deliver_late(trap, request, new_socket(), bytearray(), connect=True))
            await self._forward(Direction.REQUESTS, server, request.frame)
            return
        try:
            await trap.told_to_deliver()
            await self._forward(Direction.REQUESTS, server, request.frame)
        except BaseException:
            self._happens(Event.LOST, trap, request)
            raise
        self._happens(Event.DELIVERED, trap, request)

    async def _deliver_late(
        self, trap: Trap, request: Request, server: socket.socket, unread: bytearray, *, connect: bool = False
    ) -> None:
        """Send a request on once its trap allows it, and give the answer to the trap alone."""
        try:
            await trap.told_to_deliver()
            if connect:
                await self._loop.sock_connect(server, self._target)
            await self._loop.sock_sendall(server, request.frame)
            self._happens(Event.DELIVERED, trap, request)
            trap.answer = await self._answer_to(request, server, unread)
            self._happens(Event.ANSWERED, trap, request)
        except BaseException as error:
            self._happens(Event.LOST, trap, request)
            if not isinstance(error, OSError):
                raise
        finally:
            close_with_reset(server)

    async def _answer_to(self, request: Request, server: socket.socket, unread: bytearray) -> bytes:
        """Read on until the answer to a request; those before it are of requests whose client is gone."""
        while True:
            for frame in _frames(unread):
                if _CORRELATION.unpack_from(frame, _LENGTH.size)[0] == request.correlation_id:
                    return frame
            chunk = await self._loop.sock_recv(server, _CHUNK)
            if not chunk:
                raise ConnectionResetError("the broker closed the connection")
            unread += chunk

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _happens(self, event: Event, trap: Trap, request: Request) -> None:
        self._log.append(LogEntry(time.time(), event, request))
        trap.note(event)


def _adopted(side: socket.socket) -> socket.socket:
    side.setblocking(False)
    return side


def _frames(unread: bytearray) -> Iterator[bytes]:
    """Take the whole frames out of the bytes read; they are gone from these however the iteration ends."""
    at = 0
    try:
        while len(unread) - at >= _LENGTH.size:
            size = _LENGTH.size + _LENGTH.unpack_from(unread, at)[0]
            if not _LENGTH.size <= size <= _LONGEST_FRAME:
                raise ConnectionAbortedError(f"a frame of {size} bytes: not Kafka's protocol")
            if len(unread) - at < size:
                return
            at += size
            yield bytes(unread[at - size : at])
    finally:
        del unread[:at]


def _string(frame: bytes, at: int) -> tuple[str | None, int]:
    """Return a nullable string with its length in two bytes, and its end."""
    length: int = _SHORT.unpack_from(frame, at)[0]
    begin = at + _SHORT.size
    if length < 0:
        return None, begin
    return frame[begin : begin + length].decode(errors="replace"), begin + length


def _compact_string(frame: bytes, at: int) -> tuple[str | None, int]:
    """Return a nullable string with its length plus one as a varint, and its end."""
    length, begin = _varint(frame, at)
    if length == 0:
        return None, begin
    return frame[begin : begin + length - 1].decode(errors="replace"), begin + length - 1


def _after_tags(frame: bytes, at: int) -> int:
    """Return the end of tagged fields."""
    count, at = _varint(frame, at)
    for _ in range(count):
        _, at = _varint(frame, at)
        size, at = _varint(frame, at)
        at += size
    return at


def _varint(frame: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
