"""Connections between clients and servers: they delay, they break, and what was held when they broke may arrive late.

On one connection everything arrives in its order. After a break the client learns of it at once or after a while, and
sends on over a new connection, which earlier requests may follow: nothing orders the two.

A link between one process and one server may be cut, in one direction or both, refused, or hang: then connections
stand, and the server takes what it is sent without doing anything about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.scheduling import Process, ProcessDied, Scheduler

Respond = Callable[[object], None]
Handler = Callable[[Respond], None]
"""The work of a server on a request that arrives; it answers now, later or never."""

LONGEST_DELAY_SECONDS = 0.2  # of a slow message

LOST = object()
"""In the place of an answer: the connection broke, and it is not known whether the request arrived."""


@dataclass(eq=False)
class Request:
    """A request that is not answered."""

    handler: Handler
    on_answer: Callable[[object], None]
    name: str = ""
    has_arrived: bool = False
    is_over: bool = False


@dataclass(eq=False)
class Cut:
    """The fault of a link between one process and one server."""

    passes: str = ""  # on connections of before, "requests" or "answers"; new ones pass nothing
    is_refused: bool = False  # connections are reset, and new ones refused
    is_hung: bool = False  # the network is well, and the server stands still
    spares_new: bool = False  # the server does so for connections of before alone
    since: float = 0.0
    left: list[tuple[Connection, Request]] = field(default_factory=list)  # done once it goes on, though nobody waits

    def holds_request(self, connection: Connection) -> bool:
        """Tell whether a request waits on its way."""
        is_new = connection.opened_at > self.since
        return not (is_new and self.spares_new) and (is_new or self.passes != "requests")

    @property
    def holds_answers(self) -> bool:
        """True if an answer of before does not come back."""
        return self.passes != "answers" and not self.is_hung


@dataclass(eq=False)
class Connection:
    """A connection from a process to a server."""

    process: Process
    server: Server
    client: str = ""
    opened_at: float = 0.0
    is_broken: bool = False
    last_out: float = 0.0
    last_back: float = 0.0
    open_requests: list[Request] = field(default_factory=list)


class Server:
    """The far end of connections: a broker, or the database."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_up = True
        self.began_at = 0.0  # what was sent before is lost
        self.distance = 1.0  # by which the network's latency is multiplied


class Network:
    """All connections, and their faults."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.latency = 0.001
        self.slow = 0.003  # the share of messages that are delayed for longer
        self.late = 0.0  # the share of held requests that arrive after their connection broke
        self.longest_late = 8.0
        self.late_ends = 0.0  # the share of EndTxn requests whose connection breaks before they arrive
        self.late_produces = 0.0  # and of Produce requests
        self.cut: dict[tuple[Process, Server], Cut] = {}
        self.delivered_late = 0
        self.delivered_late_at = 0.0
        self.on_arrival: Callable[[Connection, Request], bool] | None = None  # takes requests off: True for "taken"
        self.is_late = False  # while a request arrives whose connection had broken
        self._connections: list[Connection] = []

    def connect(self, process: Process, server: Server, client: str = "") -> Connection:
        """Open a connection."""
        connection = Connection(process, server, client, self.scheduler.now)
        self._connections = [other for other in self._connections if not other.is_broken]
        self._connections.append(connection)
        return connection

    def send(
        self, connection: Connection, handler: Handler, on_answer: Callable[[object], None], name: str = ""
    ) -> Request:
        """Send a request; `on_answer` gets the answer or `LOST`, as a step of the client's process."""
        if connection.process.is_dead:
            raise ProcessDied
        request = Request(handler, on_answer, name)
        connection.open_requests.append(request)
        if connection.is_broken or not self.takes_connections(connection.process, connection.server):
            self._after(0.002, lambda: self._lose(connection, request))
            return request
        connection.last_out = max(connection.last_out, self.scheduler.now + self._delay(connection.server))
        self._at(connection.last_out, lambda: self._arrive(connection, request))
        return request

    def _arrive(self, connection: Connection, request: Request) -> None:
        if request.has_arrived or request.is_over:
            return
        cut = self.cut.get((connection.process, connection.server))
        if cut is not None and cut.holds_request(connection):
            return  # held until the link is mended, or its connection breaks
        if not connection.server.is_up:
            self._lose(connection, request)
            return
        request.has_arrived = True
        if self.on_arrival is not None and self.on_arrival(connection, request):
            return
        request.handler(lambda answer: self._answer(connection, request, answer))

    def _answer(self, connection: Connection, request: Request, answer: object) -> None:
        if request.is_over or connection.is_broken:
            return
        connection.last_back = max(connection.last_back, self.scheduler.now + self._delay(connection.server))
        self._at(connection.last_back, lambda: self._come_back(connection, request, answer))

    def _come_back(self, connection: Connection, request: Request, answer: object) -> None:
        if request.is_over or connection.is_broken:
            return
        cut = self.cut.get((connection.process, connection.server))
        if cut is not None and cut.holds_answers:
            return  # never comes; the client's time-out breaks the connection
        self._end(connection, request, answer)

    def _lose(self, connection: Connection, request: Request) -> None:
        if not request.is_over:
            self._end(connection, request, LOST)

    def _end(self, connection: Connection, request: Request, answer: object) -> None:
        request.is_over = True
        if request in connection.open_requests:
            connection.open_requests.remove(request)
        connection.process.run(lambda: request.on_answer(answer))

    def break_connection(self, connection: Connection) -> None:
        """Break a connection: the client learns of it, and what the network still holds may arrive late."""
        if connection.is_broken:
            return
        connection.is_broken = True
        cut = self.cut.get((connection.process, connection.server))
        for request in list(connection.open_requests):
            if cut is not None and cut.is_hung and cut.holds_request(connection) and not request.has_arrived:
                cut.left.append((connection, request))
            elif not request.has_arrived and self.scheduler.random.random() < self.late:
                self._deliver_late(connection, request)
            self._lose(connection, request)

    def _deliver_late(self, connection: Connection, request: Request) -> None:
        late_by = self.scheduler.random.choice((0.3, 1.0, self.longest_late)) * self.scheduler.random.random()
        self._after(late_by, lambda: self._arrive_late(connection, request))

    def _arrive_late(self, connection: Connection, request: Request) -> None:
        if connection.server.is_up and connection.opened_at >= connection.server.began_at:
            self.delivered_late += 1
            self.delivered_late_at = self.scheduler.now
            request.has_arrived = True
            self.is_late = True
            request.handler(lambda _: None)
            self.is_late = False

    def break_some(self, of: Callable[[Connection], bool], share: float = 1.0) -> int:
        """Break connections, each with a probability; return how many."""
        chosen = [each for each in self._connections if not each.is_broken and of(each)]
        chosen = [each for each in chosen if self.scheduler.random.random() < share]
        for connection in chosen:
            self.break_connection(connection)
        return len(chosen)

    def takes_connections(self, process: Process, server: Server) -> bool:
        """Tell whether a server and the link to it refuse no connection."""
        cut = self.cut.get((process, server))
        return server.is_up and not (cut is not None and cut.is_refused)

    def sever(self, process: Process, server: Server, cut: Cut) -> None:
        """Put a fault on a link."""
        cut.since = self.scheduler.now
        self.cut[process, server] = cut
        if cut.is_refused:
            self.break_some(lambda each: each.process is process and each.server is server)

    def mend(self, process: Process, server: Server) -> None:
        """Let a link pass again: what was held on a connection that still stands goes on."""
        cut = self.cut.pop((process, server), None)
        for connection, request in cut.left if cut is not None else ():
            self._arrive_late(connection, request)
        for connection in self._connections:
            if connection.process is process and connection.server is server and not connection.is_broken:
                for request in list(connection.open_requests):
                    if not request.has_arrived:
                        self._arrive(connection, request)
                    else:
                        self._lose(connection, request)  # its answer was dropped

    def _delay(self, server: Server) -> float:
        random = self.scheduler.random
        return self.latency * server.distance * (0.3 + random.expovariate(1.0)) + (
            LONGEST_DELAY_SECONDS * random.random() if random.random() < self.slow else 0
        )

    def _after(self, seconds: float, step: Callable[[], None]) -> None:
        self.scheduler.after(seconds, step)

    def _at(self, time: float, step: Callable[[], None]) -> None:
        self.scheduler.after(time - self.scheduler.now, step)
