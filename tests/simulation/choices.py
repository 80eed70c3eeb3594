"""A world in which nothing is drawn: whatever may happen next is an event, and a caller chooses one.

Steps inside a process that need no server are taken at once, in the order in which they became ready. What is left to
choose is the order in which requests arrive at their servers and markers are written, and the faults. A request and its
answer are one event. Time stands still while a request is under way; then the next timer is due.
"""

from __future__ import annotations

import functools
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from tests.simulation.fingerprints import CLOCKS_BEGIN, Fingerprint
from tests.simulation.network import Connection, Handler, Network, Request
from tests.simulation.scheduling import Process, ProcessDied, Scheduler, Task

Step = Callable[[], object]

_AT_ONCE_SECONDS = 0.006  # such a pause, like a linger, is as good as none
_MOST_STEPS = 10_000  # between two events
_RETRY_SECONDS = 0.06  # a client's repeat after such a pause needs no quiet world
WRITES = {
    "Producer._send.": "Produce",
    "Producer._send_end.": "EndTxn",
    "Producer._register.": "AddPartitionsToTxn",
    "Producer._try_init.": "InitProducerId",
    "Store.delete_published.": "DELETE",
}
_READS = {
    "Consumer._fetch.": "Fetch",
    "Consumer.get_watermark_offsets.": "ListOffsets",
    "Store.scan.": "SELECT",
    "Store.find.": "SELECT by id",
    "Store.is_empty.": "SELECT any",
}


class Event(NamedTuple):
    """Something that may happen next."""

    label: str
    run: Step
    changes_server: bool = True


class NoRandom(Random):
    """Draws the same each time: what is to vary is chosen."""

    def random(self) -> float:
        return 0.5

    def getrandbits(self, k: int) -> int:
        del k
        return 1

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def uniform(self, a: float, b: float) -> float:
        del b
        return a  # the earliest repeat is the worst


class _Timer(NamedTuple):
    time: float
    number: int
    step: Step
    cells: dict[str, Any]


class StillScheduler(Scheduler):
    """A scheduler whose time passes only when it is told to."""

    def __init__(self) -> None:
        super().__init__(0)
        self.random = NoRandom()
        self.now = CLOCKS_BEGIN
        self.markers: list[Step] = []
        self.retries: list[tuple[Process, Step]] = []
        self.timers: list[_Timer] = []
        self._ready: deque[Step] = deque()

    def soon(self, step: Step) -> None:
        """Run a step of a ready task."""
        self._ready.append(step)

    def after(self, seconds: float, step: Step) -> None:
        """Run a step after a while, or sort it with the events to choose from."""
        maker = step.__qualname__
        if maker.startswith("Cluster._end."):
            self.markers.append(step)
        elif maker.startswith("Store._statement.") or (seconds <= _AT_ONCE_SECONDS and not _is_wait(step)):
            self._ready.append(step)
        elif maker.startswith("Process.after.") and seconds <= _RETRY_SECONDS:
            self.retries.append((cells_of(step)["self"], step))
        else:
            self._number += 1
            insort(self.timers, _Timer(self.now + seconds, self._number, step, cells_of(step)))

    def settle(self) -> None:
        """Take every step that needs no choice."""
        most = self.steps + _MOST_STEPS
        while self._ready:
            self._ready.popleft()()
            self.steps += 1
            if self.steps > most:
                raise RuntimeError("the processes do not come to rest")
        self.timers = [timer for timer in self.timers if _matters(timer)]
        self.retries = [retry for retry in self.retries if not retry[0].is_dead and not _is_of_closed(retry[1])]

    def pass_time(self) -> None:
        """Go on to the next timer."""
        timer = self.timers.pop(0)
        self.now = max(self.now, timer.time)
        timer.step()

    def add_to(self, state: Fingerprint) -> None:
        """Add what waits here to a state."""
        state.add([*self.markers, *(step for _, step in self.retries)])
        for timer in self.timers:
            state.add(timer.time)
            state.add(timer.cells["self"] if _is_wait(timer.step) else timer.step)


def cells_of(function: Any) -> dict[str, Any]:
    """Return what a closure closes over."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)} if names else {}


def _is_wait(step: Any) -> bool:
    return str(step.__qualname__).startswith("Task.wait.")


def _is_of_closed(step: Any) -> bool:
    client = cells_of(cells_of(step)["step"]).get("self")
    return bool(getattr(client, "is_closed", False))


def _request_of(step: Any) -> Request | None:
    """Return the request that a timer is to give up."""
    names = step.__code__.co_freevars
    request: Request | None = step.__closure__[names.index("request")].cell_contents if "request" in names else None
    return request


def _matters(timer: _Timer) -> bool:
    """Tell whether a timer can still do anything."""
    step, cells = timer.step, timer.cells
    if _is_wait(step):
        task: Task = cells["self"]
        return not task.has_ended and not task.process.is_dead and bool(cells["number"] == task._wait_number)
    if step.__qualname__.startswith("Process.after."):
        if cells["self"].is_dead:
            return False
        request = _request_of(cells["step"])
        return request is None or not request.is_over
    if step.__qualname__.startswith("Cluster._watch."):
        transaction = cells["transaction"]
        return bool(transaction.state == "ongoing" and transaction.number == cells["number"])
    return True


def name_of(handler: Handler) -> tuple[str, bool]:
    """Return what a request asks for, '' if no other event has a say in its answer, and if it changes anything."""
    maker: str = handler.__qualname__  # type: ignore[attr-defined]
    if maker.startswith("Store._statement."):
        maker = cells_of(handler)["steps"][0].__qualname__
    return _name_of(maker)


@functools.cache
def _name_of(maker: str) -> tuple[str, bool]:
    for prefix, name in WRITES.items():
        if maker.startswith(prefix):
            return name, True
    for prefix, name in _READS.items():
        if maker.startswith(prefix):
            return name, False
    return "", False


class ChosenNetwork(Network):
    """A network whose requests arrive when they are chosen."""

    def __init__(self, scheduler: StillScheduler) -> None:
        super().__init__(scheduler)
        self.held: Request | None = None
        self.hung: Connection | None = None  # the held request's connection, while nobody knows that it stands still
        self._waiting: list[Connection] = []
        self._names: dict[int, str] = {}
        self._offered: dict[int, Request] = {}  # faults of these have been offered

    def connect(self, process: Process, server: Any, client: str = "") -> Connection:
        return Connection(process, server, client)

    def send(
        self, connection: Connection, handler: Handler, on_answer: Callable[[object], None], name: str = ""
    ) -> Request:
        if connection.process.is_dead:
            raise ProcessDied
        request = Request(handler, on_answer, name)
        if connection.is_broken:
            self.scheduler.soon(lambda: self._lose(connection, request))
        elif name_of(handler)[0]:
            connection.open_requests.append(request)
            if connection not in self._waiting:
                self._waiting.append(connection)
        else:
            self.scheduler.soon(lambda: self._arrive(connection, request))
        return request

    def _answer(self, connection: Connection, request: Request, answer: object) -> None:
        self.scheduler.soon(lambda: self._come_back(connection, request, answer))

    def heads(self) -> Iterator[tuple[Connection, Request]]:
        """Yield the next request of each connection."""
        for connection in self._waiting:
            head = next((each for each in connection.open_requests if not each.has_arrived), None)
            if head is not None and connection is not self.hung:
                yield connection, head

    def has_under_way(self, process: Process) -> bool:
        """Tell whether requests of a process are under way."""
        return any(connection.process is process for connection, _ in self.heads())

    def tidy(self) -> None:
        """Forget connections without requests, and questions that nobody waits for."""
        for connection in self._waiting:
            for request in list(connection.open_requests):
                owner = cells_of(request.handler).get("self")
                if connection.process.is_dead or (getattr(owner, "is_closed", False) and not _changes(request)):
                    request.is_over = True
                    connection.open_requests.remove(request)
        self._waiting = [connection for connection in self._waiting if connection.open_requests]
        if self.hung is not None and self.hung.is_broken:
            self.hung = None

    def arrive(self, connection: Connection, request: Request, *, is_answer_lost: bool = False) -> None:
        """Let a request arrive; its answer comes back at once, or never."""
        if is_answer_lost:
            request.has_arrived = True
            request.handler(lambda _: None)
            self.break_connection(connection)
        else:
            self._arrive(connection, request)

    def hold(self, connection: Connection, request: Request, *, breaks: bool) -> None:
        """Keep a request on its way; its connection breaks, or stands still."""
        self.held = request
        if breaks:
            connection.open_requests.remove(request)
            self.break_connection(connection)
            if not connection.process.is_dead:
                self._lose(connection, request)
        else:
            self.hung = connection

    def deliver_held(self) -> None:
        """Let the held request arrive; its client hears of it only if it has waited until now."""
        request, self.held = self.held, None
        connection, self.hung = self.hung, None
        if request is None:
            return
        if connection is not None and not connection.is_broken and not connection.process.is_dead:
            self._arrive(connection, request)
        else:
            request.has_arrived = True
            request.handler(lambda _: None)

    def break_connection(self, connection: Connection) -> None:
        if not connection.is_broken:
            connection.is_broken = True
            for request in list(connection.open_requests):
                self._lose(connection, request)

    def take_offer(self, process: Process) -> tuple[Connection, Request] | None:
        """Return the first write under way of a process for which no fault has been offered."""
        for connection, head in self.heads():
            if connection.process is process and _changes(head) and id(head) not in self._offered:
                self._offered[id(head)] = head
                return connection, head
        return None

    def has_write_of(self, process: Process) -> bool:
        """Tell whether a write of a process is under way, held or not."""
        waiting = (connection for connection in self._waiting if connection.process is process)
        return any(_changes(each) and not each.has_arrived for one in waiting for each in one.open_requests)

    def add_to(self, state: Fingerprint, *, tells_offers: bool) -> None:
        """Add the requests under way to a state; of a held one, only what it will do."""
        for connection in self._waiting:
            state.add((connection, connection is self.hung))
            for request in connection.open_requests:
                if request is not self.held:
                    is_offered = tells_offers and id(request) in self._offered
                    state.add((request.handler, request.on_answer, request.has_arrived, is_offered))
        if self.held is not None:
            state.add((name_of(self.held.handler), _content(self.held)))


def _changes(request: Request) -> bool:
    return name_of(request.handler)[1]


def _content(request: Request) -> dict[str, Any]:
    """Return what a request will do, without its client, which may have forgotten it."""
    cells = cells_of(request.handler)
    cells.pop("self", None)
    if "lane" in cells:
        cells["lane"] = cells["lane"].place
    return cells


def label(process: Process, request: Request) -> str:
    """Return a request's name for a trace."""
    cells = cells_of(request.handler)
    name, _ = name_of(request.handler)
    detail = ""
    if name == "Produce":
        detail = f" {cells['lane'].place[0]}[{cells['lane'].place[1]}]" if "lane" in cells else ""
    elif name == "EndTxn":
        detail = " commit" if cells["commit"] else " abort"
    return f"{process.name}: {name}{detail}"
