"""One number for a whole state: everything that objects, closures and stopped threads hold, and where those stopped.

Two states with the same number are taken for equal. What is left out, and what that may hide:

- times as such: they count from now, to a tenth of a millisecond; how long ago something was, by `_LONG_AGO` at most;
- settings, metrics, logs and outages, by which no step of the protocol decides;
- the values that a stopped frame has computed and not yet stored in a variable;
- the time of a record in Kafka.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from confluent_kafka import KafkaError

from outbox_core.config import HarvestConfig
from outbox_core.harvest.context import HarvestContext
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.metrics import HarvestMetrics
from outbox_core.monitoring.meter import Meter
from outbox_core.outage import Outage
from tests.simulation.brokers import Entry, Partition
from tests.simulation.network import Connection, Network
from tests.simulation.postgres import Database
from tests.simulation.scheduling import Process, Scheduler, Task

CLOCKS_BEGIN = 1_000_000.0
"""The time at which a world must begin: every number as high as this is a time, and no duration is."""
_WALL = 1_000_000_000.0
_LONG_AGO = 60.0

_PLAIN = {int, str, bytes, bool, type(None)}
# Known from the roots, or without a word in any decision.
_NAMED = (
    HarvestConfig, HarvestMetrics, Meter, Outage, TransactionalIdentity, Scheduler, Network, Database, type,
    types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip
_LEFT_OUT = {
    HarvestContext: {"limits", "dead_letters", "grant_write", "send_window", "emit"},
    Entry: {"time", "sent"},
    RecordProducer: {"sent"},  # the same as the term's records, or an invariant is broken
}
_LEFT_OUT_ANYWHERE = {
    "settings", "_settings", "scheduler", "cluster", "world", "limits", "written_at_ms", "_wait_number", "_time",
    "asked", "asked_at", "_number", "_config", "_kafka", "_greenlet", "_clock_from", "_slept", "_deferred", "waiters",
    "last_out", "last_back", "_loaded", "trace", "seen", "sender", "handed_over_at", "until",
    "started_at", "opened_at", "used_at", "waits_since",
}  # fmt: skip


class Fingerprint:
    """The tokens of a state, in an order that depends on nothing but the state."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._tokens: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # an id must not be used again meanwhile

    @property
    def number(self) -> int:
        """Return the fingerprint: 64 bits, never 0 or 1."""
        digest = blake2b(repr(self._tokens).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") | 2

    def add(self, thing: Any) -> None:
        """Add an object with all it refers to."""
        kind = type(thing)
        if kind in _PLAIN:
            self._tokens.append(thing)
            return
        adder = _ADDERS.get(kind)
        if adder is None:
            adder = _ADDERS[kind] = _adder_for(kind)
        if adder is _add_nothing or kind is float or kind is tuple:
            adder(self, thing)
            return
        number = self._numbers.get(id(thing))
        if number is not None:
            self._tokens.append((number,))
            return
        self._numbers[id(thing)] = len(self._numbers)
        self._kept.append(thing)
        adder(self, thing)

    def relative(self, time: float) -> float:
        """Return a time as seconds from now, and any other number as it is."""
        if time >= _WALL:
            return round(max(-_LONG_AGO, time - 1_700_000_000.0 - self._now), 4)
        if time >= CLOCKS_BEGIN / 2 and time != float("inf"):
            return round(max(-_LONG_AGO, time - self._now), 4)
        return time

    def add_frame(self, frame: types.FrameType | None) -> None:
        """Add a stopped frame: its place, and its variables."""
        while frame is not None:
            code = frame.f_code
            self._tokens.append((code.co_name, code.co_firstlineno, frame.f_lasti))
            for name, value in frame.f_locals.items():
                if name not in _LEFT_OUT_ANYWHERE:
                    self._tokens.append(name)
                    self.add(value)
            frame = frame.f_back


def _adder_for(kind: type) -> Callable[[Fingerprint, Any], None]:
    if issubclass(kind, _NAMED) or issubclass(kind, Enum):
        return _add_enum if issubclass(kind, Enum) else _add_nothing
    if issubclass(kind, tuple | list | deque):
        return _add_all
    if issubclass(kind, dict):
        return _add_dict
    if issubclass(kind, BaseException):
        return _add_exception
    left_out = _LEFT_OUT.get(kind, set()) | _LEFT_OUT_ANYWHERE
    slots = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ()) if not name.startswith("__")]
    slots = [name for name in slots if name not in left_out]

    def add_attributes(self: Fingerprint, thing: Any) -> None:
        tokens = self._tokens
        tokens.append(kind.__name__)
        for name in slots:
            self.add(getattr(thing, name, None))
        for name, value in getattr(thing, "__dict__", {}).items():
            if name not in left_out:
                tokens.append(name)
                self.add(value)
        tokens.append("}")

    return add_attributes


def _add_float(self: Fingerprint, time: float) -> None:
    self._tokens.append(self.relative(time))


def _add_enum(self: Fingerprint, thing: Enum) -> None:
    self._tokens.append(thing.name)


def _add_all(self: Fingerprint, things: Iterable[Any]) -> None:
    self._tokens.append("[")
    for each in things:
        self.add(each)
    self._tokens.append("]")


def _add_exception(self: Fingerprint, error: BaseException) -> None:
    self._tokens.append(type(error).__name__)
    self.add(error.args)


def _add_dict(self: Fingerprint, things: dict[Any, Any]) -> None:
    self._tokens.append("{")
    for key, value in things.items():
        self.add(key)
        self.add(value)
    self._tokens.append("}")


def _add_set(self: Fingerprint, things: Any) -> None:
    by = _place_of if things and isinstance(next(iter(things)), Partition) else repr
    _add_all(self, sorted(things, key=by))


_place_of = attrgetter("topic", "number")


def _add_function(self: Fingerprint, function: types.FunctionType) -> None:
    code = function.__code__
    self._tokens.append((code.co_name, code.co_firstlineno))
    for cell in function.__closure__ or ():
        self.add(cell)
    self.add(function.__defaults__)


def _add_cell(self: Fingerprint, cell: types.CellType) -> None:
    try:
        value = cell.cell_contents
    except ValueError:  # it is empty
        value = None
    self.add(value)


def _add_method(self: Fingerprint, method: types.MethodType) -> None:
    self._tokens.append(method.__func__.__qualname__)
    self.add(method.__self__)


def _add_generator(self: Fingerprint, generator: types.GeneratorType[Any, Any, Any]) -> None:
    self.add_frame(generator.gi_frame)


def _add_partial(self: Fingerprint, partial: functools.partial[Any]) -> None:
    self.add((partial.func, partial.args, partial.keywords))


def _add_error(self: Fingerprint, error: KafkaError) -> None:
    self._tokens.append((error.code(), error.str(), error.fatal(), error.retriable(), error.txn_requires_abort()))


def _add_task(self: Fingerprint, task: Task) -> None:
    self._tokens.append((task.process.name, task.name, task.has_ended))


def _add_process(self: Fingerprint, process: Process) -> None:
    self._tokens.append(process.name)


def _add_connection(self: Fingerprint, connection: Connection) -> None:
    self._tokens.append((connection.process.name, connection.server.name, connection.is_broken))


def _add_nothing(self: Fingerprint, thing: object) -> None:
    self._tokens.append(type(thing).__name__)


_ADDERS: dict[type, Callable[[Fingerprint, Any], None]] = {
    float: _add_float,
    tuple: _add_all,
    dict: _add_dict,
    set: _add_set,
    frozenset: _add_set,
    types.FunctionType: _add_function,
    types.CellType: _add_cell,
    types.MethodType: _add_method,
    types.GeneratorType: _add_generator,
    types.FrameType: _add_nothing,
    types.TracebackType: _add_nothing,
    functools.partial: _add_partial,
    KafkaError: _add_error,
    Task: _add_task,
    Process: _add_process,
    Connection: _add_connection,
}
