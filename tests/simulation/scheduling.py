"""One thread, a virtual clock, and greenlets in the place of threads: the order of all steps follows from a seed.

A `Process` stands for an operating system's process: its tasks (threads), its clocks, and whether it runs, is
suspended or has crashed. Steps take no time; what takes time waits in the scheduler's queue. A task that becomes ready
runs after a short delay drawn from the seed, so that ready tasks take turns in any order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

_EPOCH = 1_700_000_000.0
_MOST_AT_ONCE = 20
_SPIN_SECONDS = 0.0002


class ProcessDied(BaseException):
    """The end of a task whose process has crashed: nothing it does from here on has any effect."""


class Process:
    """A process with clocks of its own. Its clocks begin at any time, and may run fast or slow."""

    def __init__(self, scheduler: Scheduler, name: str, drift: float = 0.0) -> None:
        self.scheduler = scheduler
        self.name = name
        self.is_dead = False
        self.is_suspended = False
        self.started_at = scheduler.now
        self.clock_error = 0.0  # seconds by which its time of day is ahead
        self.asked_at, self.asked = -1.0, 0
        self._rate = 1.0 + drift
        self._clock_from = 1000.0 + scheduler.random.random() * 1000.0
        self._suspended_at = 0.0
        self._slept = 0.0
        self._tasks: dict[Task, None] = {}  # in the order of their starts
        self._deferred: list[Callable[[], None]] = []

    def boottime(self) -> float:
        """Return the clock that runs while the machine sleeps."""
        return self._clock_from + self.scheduler.now * self._rate

    def wall_clock(self) -> float:
        """Return the time of day, in seconds since the epoch, as this process believes it to be."""
        return self.scheduler.wall_clock() + self.clock_error

    def monotonic(self) -> float:
        """Return the clock that stands still while the machine sleeps."""
        return self.boottime() - self._slept

    @property
    def has_slept(self) -> bool:
        """True if it was suspended before."""
        return self._slept > 0.0

    def spawn(self, target: Callable[[], object], name: str) -> Task:
        """Start a task."""
        task = Task(self, target, name)
        self._tasks[task] = None
        task.wake()
        return task

    def ended(self, task: Task) -> None:
        """Forget a task that has ended."""
        self._tasks.pop(task, None)

    def run(self, step: Callable[[], None]) -> None:
        """Run a step of this process now, or when it resumes; never once it is dead."""
        if self.is_suspended:
            self._deferred.append(step)
        elif not self.is_dead:
            step()

    def after(self, seconds: float, step: Callable[[], None]) -> None:
        """Run a step of this process after a while."""
        self.scheduler.after(seconds, lambda: self.run(step))

    def suspend(self) -> None:
        """Stop all steps, as when the machine sleeps."""
        self.is_suspended = True
        self._suspended_at = self.scheduler.now

    def resume(self) -> None:
        """Go on; what came meanwhile is done now, in its order."""
        self.is_suspended = False
        self._slept += (self.scheduler.now - self._suspended_at) * self._rate
        deferred, self._deferred = self._deferred, []
        for step in deferred:
            self.run(step)

    def crash(self) -> None:
        """End all tasks at once; what they would still do in `finally` has no effect."""
        self.is_dead, self.is_suspended = True, False
        self._deferred.clear()
        for task in list(self._tasks):
            task.kill()
        self._tasks.clear()


class Task:
    """A greenlet of a process."""

    def __init__(self, process: Process, target: Callable[[], object], name: str) -> None:
        self.process = process
        self.name = name
        self.has_ended = False
        self.thread: Any = None
        self.works_since = 0.0
        self.waiters: deque[Task] = deque()
        self._target = target
        self._wait_number = 0
        self._result = False
        self._greenlet: Any = greenlet(self._run, process.scheduler.hub)
        self._greenlet.task = self

    def _run(self) -> None:
        try:
            self._target()
        except ProcessDied:
            pass
        finally:
            self.has_ended = True
            self.process.ended(self)
            for waiter in self.waiters:
                waiter.wake()

    def wake(self, result: bool = True) -> None:
        """Let the task go on from its present wait, soon."""
        number = self._wait_number
        self.process.scheduler.soon(lambda: self.process.run(lambda: self._switch(number, result)))

    def _switch(self, number: int, result: bool) -> None:
        if number == self._wait_number and not self.has_ended:
            self._wait_number += 1
            self._result = result
            self._greenlet.switch()

    def wait(self, timeout: float | None) -> bool:
        """Wait until `wake`, or until a timeout: then return False. Called by the task itself."""
        process = self.process
        if process.is_dead:
            raise ProcessDied
        number = self._wait_number
        if timeout is not None:
            process.scheduler.after(max(0.0, timeout), lambda: process.run(lambda: self._switch(number, False)))
        process.scheduler.hub.switch()
        if process.is_dead:
            raise ProcessDied
        return self._result

    def kill(self) -> None:
        """End the task."""
        self.has_ended = True
        if self._greenlet:  # it has begun, and not ended
            self._greenlet.throw(ProcessDied)


def current() -> Task:
    """Return the task that runs."""
    task: Task = getcurrent().task
    return task


def spend(process: Process) -> None:
    """Let some time pass for a task that asks again and again without waiting."""
    scheduler = process.scheduler
    if process.asked_at != scheduler.now:
        process.asked_at, process.asked = scheduler.now, 0
    process.asked += 1
    if process.asked > _MOST_AT_ONCE:
        current().wait(_SPIN_SECONDS)


class Scheduler:
    """The queue of all that happens, by time; what happens at one time, in the order in which it was put there."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.hub = getcurrent()
        self.trace: deque[str] | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def wall_clock(self) -> float:
        """Return the time of day, in seconds since the epoch."""
        return _EPOCH + self.now

    def after(self, seconds: float, step: Callable[[], None]) -> None:
        """Run a step after a while."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + seconds, self._number, step))

    def soon(self, step: Callable[[], None]) -> None:
        """Run a step after the short delay of a thread that becomes ready; now and then after a long one."""
        draw = self.random.random()
        self.after(draw * 0.0002 if draw < 0.998 else self.random.random() * 0.05, step)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run until a time, or until `stop`, which is asked now and then, says so."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, step = heapq.heappop(queue)
            step()
            self.steps += 1
            if not self.steps % 64 and stop():
                return
        if not queue or queue[0][0] > until:
            self.now = max(self.now, until)

    def note(self, what: str, *values: object) -> None:
        """Add a line to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.4f}  {what % values if values else what}")
