"""Stand-ins for names of `threading`, `time`, `queue`, `concurrent.futures`, `random`, `uuid` and `atexit`.

`patched` puts these in the place of the originals, by identity, in every module of the product that has imported one,
and in the defaults of its methods' arguments: the product has no switch for it, and pays nothing.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import queue
import random
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any, Self

from tests.simulation.scheduling import ProcessDied, Scheduler, Task, current, spend

_PACKAGES = ("outbox_core.", "outbox_queue.", "outbox_django.")
_REAL = ("outbox_core.watched_calls",)  # no simulated code calls it, and its thread may run since an earlier test


def _me() -> Task:
    task = current()
    if task.process.is_dead:
        raise ProcessDied
    return task


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            task.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            task = _me()
            if timeout is not None and timeout <= 0:
                spend(task.process)
                return self._is_set
            self._waiters.append(task)
            if not task.wait(timeout):
                self._waiters = [waiter for waiter in self._waiters if waiter is not task]
        return self._is_set


class Lock:
    """`threading.Lock` and `RLock`: held over a wait by few, so that it is free as a rule."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = getattr(current_greenlet(), "task", None)
        if self._depth and self._owner is not task:
            if not blocking:
                return False
            while self._depth:
                self._waiters.append(task)
                if not task.wait(None if timeout < 0 else timeout):
                    return False
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth and self._waiters:
            self._waiters.popleft().wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


from greenlet import getcurrent as current_greenlet  # noqa: E402


class Condition:
    """`threading.Condition`; several may share a lock."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._told: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = _me()
        self._told.append(task)
        self._lock.release()
        is_told = False
        try:
            is_told = task.wait(timeout)
        finally:
            if not is_told:
                self._told = [other for other in self._told if other is not task]
            self._lock.acquire()
        return is_told

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        task = _me()
        end = None if timeout is None else task.process.monotonic() + timeout
        while not predicate():
            left = None if end is None else end - task.process.monotonic()
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify(self, number: int = 1) -> None:
        told, self._told = self._told[:number], self._told[number:]
        for task in told:
            task.wake()

    def notify_all(self) -> None:
        self.notify(len(self._told))


class Thread:
    """`threading.Thread`."""

    def __init__(self, target: Callable[..., object], args: Iterable[Any] = (), name: str = "", daemon: bool = True):
        del daemon
        self._target, self._args, self.name = target, tuple(args), name
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)

    def start(self) -> None:
        self._task = _me().process.spawn(lambda: self._target(*self._args), self.name)
        self._task.thread = self

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended

    def join(self, timeout: float | None = None) -> None:
        me = _me()
        if self._task is not None and not self._task.has_ended:
            self._task.waiters.append(me)
            me.wait(timeout)


class SimpleQueue:
    """`queue.SimpleQueue`; a task knows when the item that it works on was put."""

    def __init__(self) -> None:
        self._items: deque[tuple[float, Any]] = deque()
        self._event = Event()

    def put(self, item: object) -> None:
        self._items.append((current().process.scheduler.now, item))
        self._event.set()

    def get(self) -> Any:
        while not self._items:
            self._event.clear()
            self._event.wait()
        current().works_since, item = self._items.popleft()
        return item


class Future:
    """`concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._event = Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], object]] = []

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, result: object) -> None:
        self._result = result
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._event.set()
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def exception(self) -> BaseException | None:
        self._event.wait()
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if not self._event.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def wait_until_done(self, timeout: float | None) -> None:
        self._event.wait(timeout)


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`: each call has a thread of its own."""

    def __init__(self, _: int, thread_name_prefix: str = "") -> None:
        self._name = thread_name_prefix
        self._futures: list[Future] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._futures:
            future.wait_until_done(None)

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Call a function for each item, and yield the results in their order."""
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def submit(self, function: Callable[..., Any], *items: object) -> Future:
        """Call a function on a thread."""
        future = Future()

        def run() -> None:
            try:
                future.set_result(function(*items))
            except Exception as error:
                future.set_exception(error)

        Thread(run, name=self._name).start()
        self._futures.append(future)
        return future


def _wait_for_futures(futures: list[Future], timeout: float | None = None) -> None:
    (future,) = futures
    future.wait_until_done(timeout)


def _current_thread() -> object:
    return current().thread


def _sleep(seconds: float) -> None:
    _me().wait(seconds)


def _monotonic() -> float:
    return current().process.monotonic()


def _wall_clock() -> float:
    return current().process.wall_clock()


def _clock_gettime(clock: int) -> float:
    process = current().process
    return process.monotonic() if clock == time.CLOCK_MONOTONIC else process.boottime()


@contextmanager
def patched(scheduler: Scheduler) -> Iterator[None]:
    """Run the product in the simulated world: its threads are tasks, its clocks those of their process."""
    times = SimpleNamespace(
        monotonic=_monotonic,
        time=_wall_clock,
        time_ns=lambda: int(_wall_clock() * 1_000_000) * 1000,
        perf_counter=_monotonic,
        thread_time=lambda: 0.0,
        sleep=_sleep,
        clock_gettime=_clock_gettime,
    )
    threads = SimpleNamespace(
        Thread=Thread, Event=Event, Lock=Lock, RLock=Lock, Condition=Condition, current_thread=_current_thread
    )
    drawn = scheduler.random

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=drawn.getrandbits(128), version=4)

    places: dict[int, object] = {
        id(time): times,
        id(time.monotonic): _monotonic,
        id(time.time): _wall_clock,
        id(time.sleep): _sleep,
        id(threading): threads,
        id(threading.Event): Event,
        id(queue.SimpleQueue): SimpleQueue,
        id(concurrent.futures.Future): Future,
        id(concurrent.futures.ThreadPoolExecutor): ThreadPoolExecutor,
        id(concurrent.futures.wait): _wait_for_futures,
        id(random): drawn,
        id(uuid): SimpleNamespace(uuid4=uuid4, UUID=uuid.UUID),
        id(uuid.uuid4): uuid4,
        id(atexit): SimpleNamespace(register=lambda _: None, unregister=lambda _: None),
    }
    undone: list[tuple[dict[str, Any], str, object]] = []
    defaults: list[tuple[Any, tuple[object, ...]]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(_PACKAGES) or name in _REAL:
            continue
        scope = vars(module)
        for key, value in list(scope.items()):
            if id(value) in places:
                undone.append((scope, key, value))
                scope[key] = places[id(value)]
            elif isinstance(value, type) and value.__module__ == name:
                defaults += [(each, each.__defaults__) for each in _methods(value) if each.__defaults__]
    for method, given in defaults:
        method.__defaults__ = tuple(places.get(id(each), each) for each in given)
    try:
        yield
    finally:
        for scope, key, value in undone:
            scope[key] = value
        for method, given in defaults:
            method.__defaults__ = given


def _methods(kind: type) -> Iterator[Any]:
    return (each for each in vars(kind).values() if isinstance(each, FunctionType))
