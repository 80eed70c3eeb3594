"""The truth about records and tasks by what is committed in the database, whatever consumers and workers believe."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from django.db import InterfaceError, OperationalError

from outbox_core.consuming import ID_HEADER
from outbox_queue import Message, QueueClosed
from outbox_queue.consuming.delivery import State
from outbox_queue.protocol import markers as wire
from tests.simulation.brokers import COMMITTED, PLAIN
from tests.simulation.scheduling import Process
from tests.simulation.tables import Place, Row

RESULTS = "outbox_task_result"
EVENTS = "events"
TASKS = "tasks"
Key = tuple[str, str]
"""A source and a message id."""

_TRIES = 2  # at a statement, the second one on another connection
_OF_THE_DATABASE = OperationalError, InterfaceError
_HELD_UP_SECONDS = 1.0  # for which a marker may be held up


@dataclass(eq=False)
class Call:
    """One call of the handler of tasks, with a message."""

    task: str
    place: tuple[int, int]  # of the copy of its message
    attempt: int
    process: Process
    at: float
    has_started: bool = False  # the task's function
    has_left: bool = False  # it: returned, or raised
    raised: BaseException | None = None  # by the function
    outcome: str = ""  # "done", "given back", "raised"; nothing if its process has ended before
    failures: int = 0  # of statements, since the function has ended or before it began
    is_in_doubt: bool = False  # its beginning: the connection was lost in a COMMIT
    lasted: float = 0.0


@dataclass(eq=False)
class _Task:
    calls: list[Call] = field(default_factory=list)
    starts: int = 0
    kinds: set[str] = field(default_factory=set)  # of errors that its function raised
    successful_at: float | None = None


def _kind(error: type[BaseException]) -> str:
    return f"{error.__module__}.{error.__qualname__}"


class Oracle:
    """All that is committed."""

    def __init__(self, world: Any) -> None:
        self.effects: Counter[Key] = Counter()
        self.accepted: Counter[Key] = Counter()
        self.tasks: dict[str, _Task] = {}
        self._world = world
        self._checked: dict[tuple[str, int], int] = {}  # offsets, by group and partition

    # -- the database

    def committed(self, changes: dict[Place, Row], before: dict[Place, Row | None]) -> None:
        """Note what a transaction has committed: as many effects of a message as acceptances, and at most one."""
        touched: set[Key] = set()
        for place, row in changes.items():
            table, key = place
            if table == RESULTS:
                self._result_changed(key[0], before[place], row)
            elif table == "inbox" and before[place] is None:
                self.accepted[key] += 1
                touched.add(key)
            elif table == "effect":
                of = row["source"], row["message_id"]
                self.effects[of] += 1
                touched |= {of} if row["source"] != TASKS else set()
        for of in sorted(touched):
            if self.effects[of] != self.accepted[of] or self.effects[of] > 1:
                self._world.broken(
                    f"{of[1]} was accepted {self.accepted[of]} times by {of[0]}, and has {self.effects[of]} effects"
                )

    def _result_changed(self, name: str, before: Row | None, after: Row) -> None:
        task = self.tasks.setdefault(name, _Task())
        if before is None:
            return
        if before["status"] == "SUCCESSFUL":
            self._world.broken(f"the result of task {name} was SUCCESSFUL, and is written again: {after['status']}")
        if after["status"] == "SUCCESSFUL":
            task.successful_at = self._world.scheduler.now
            ended = [call for call in task.calls if call.has_left and call.raised is None]
            if not ended or not self.effects[TASKS, name]:
                self._world.broken(f"the result of task {name} is SUCCESSFUL, and it has not run to its end")
        if len(json.loads(after["worker_ids"])) > len(json.loads(before["worker_ids"])) + 1:
            self._world.broken(f"an attempt of task {name} was counted twice")
        for kind, _ in json.loads(after["errors"]):
            if kind not in task.kinds:
                self._world.broken(f"task {name} has an error in its result that is not its own: {kind}")

    # -- the group

    def offsets_committed(self, group: str, offsets: dict[tuple[str, int], int]) -> None:
        """Note a group's offsets: what is before them was accepted, and has its effect."""
        for (topic, number), offset in offsets.items():
            if topic != EVENTS:
                continue
            start = self._checked.get((group, number), 0)
            for entry in self._world.cluster.topics[EVENTS][number].log[start:offset]:
                name = dict(entry.headers or ()).get(ID_HEADER, b"").decode()
                if entry.state in (PLAIN, COMMITTED) and not self.accepted[group, name]:
                    self._world.broken(f"{group} has committed {offset}, and {name} at {entry.offset} has no effect")
            self._checked[group, number] = max(start, offset)

    # -- tasks

    def handed(self, message: Message, process: Process) -> Call:
        """Note that a handler got the message of a task: earlier attempts began, or were held up."""
        name = json.loads(message.payload)["id"]
        call = Call(name, message._delivery.message.place, message.attempt, process, self._world.scheduler.now)
        if message.attempt > 1:
            self._check_counted_before(call, message._delivery.message.origin)
        self.tasks.setdefault(name, _Task()).calls.append(call)
        return call

    def _check_counted_before(self, call: Call, origin: tuple[int, int]) -> None:
        """Check that a copy of the attempt before may have been counted. A copy may be handed out late, or never."""
        oracle = self._world.oracle
        oracle.scan()
        copies = {place: copy for place, copy in oracle.copies.items() if copy.origin == origin}
        written_at = min(copy.at for copy in copies.values() if copy.attempt == call.attempt)
        told: set[str] = set()
        for place in [place for place, copy in copies.items() if copy.attempt == call.attempt - 1]:
            calls = [each for each in self.tasks[call.task].calls if each.place == place]
            starts = sum(mark.kind == wire.START for mark in oracle.marks.get(place, ()))
            # What was started, and came to no handler, was lost. A tracker also counts what nobody takes in time: then
            # it had written the next copy before that attempt ended.
            was_at_work = any(not each.outcome or each.at + each.lasted > written_at for each in calls)
            if starts > len(calls) or was_at_work or any(map(self._counts, calls)):
                return
            told |= {each.outcome for each in calls}
        what = ", ".join(sorted(told)) or "never sent"
        self._world.broken(f"attempt {call.attempt - 1} of task {call.task} was counted, and was {what}")

    def _counts(self, call: Call) -> bool:
        """Tell whether an attempt may be counted: its function failed, or its message was lost."""
        world = self._world
        is_lost = not call.outcome or call.process.is_dead or world.is_stopping(call.process)
        since = call.at - world.timeout_seconds  # it was started before, at the earliest
        held_up = world.disturbances.seconds(call.process.name, since, world.scheduler.now)
        is_late = call.lasted > world.longest_seconds or held_up > _HELD_UP_SECONDS
        # One that is done may come again, as its end marker is late: it does not run again.
        return call.outcome in ("done", "raised") or call.raised is not None or is_lost or is_late

    def started(self, call: Call) -> None:
        """Note that the function of a task starts: it is counted, and was not successful before."""
        task, row = self.tasks[call.task], self._row(call.task)
        call.has_started = True
        task.starts += 1
        if task.successful_at is not None and task.successful_at < call.at:
            self._world.broken(f"task {call.task} runs again, and was successful")
        if len(json.loads(row["worker_ids"])) < task.starts:
            self._world.broken(f"task {call.task} runs for the {task.starts}th time, and its result has fewer attempts")
        self._check_not_counted_more(call.task)

    def _has_copy_beside(self, call: Call) -> bool:
        return any(
            other is not call
            and other.at <= call.at + (call.lasted or float("inf"))
            and call.at <= other.at + (other.lasted or float("inf"))
            for other in self.tasks[call.task].calls
        )

    def _check_not_counted_more(self, name: str) -> None:
        task, row = self.tasks[name], self._row(name)
        # One in doubt is known by the time of the last beginning, which may be that of a copy that began meanwhile.
        in_doubt = sum(
            (call.is_in_doubt and (not call.has_started or self._has_copy_beside(call)))
            or not (call.has_started or call.outcome)
            for call in task.calls
        )
        counted = len(json.loads(row["worker_ids"]))
        if counted > task.starts + in_doubt:
            self._world.broken(f"task {name} has {counted} attempts in its result, and began {task.starts} times")

    def left(self, call: Call, raised: BaseException | None) -> None:
        """Note that the function of a task has ended."""
        call.has_left, call.raised = True, raised
        if raised is not None:
            self.tasks[call.task].kinds.add(_kind(type(raised)))

    def fails_by(self, call: Call, error: type[Exception]) -> None:
        """Note that the function returns, and what it returns, or leaves behind, fails the task with this error."""
        self.tasks[call.task].kinds.add(_kind(error))

    def ended(self, call: Call, message: Message, error: Exception | None) -> None:
        """Note how the handler has ended: what it says is true in the database."""
        world, row = self._world, self._row(call.task)
        call.lasted = world.scheduler.now - call.at
        is_closed = isinstance(error, QueueClosed)  # so it comes again without being given back
        is_given_back = is_closed or (error is None and message._delivery.state is State.NACKED)
        call.outcome = "given back" if is_given_back else "raised" if error is not None else "done"
        kinds = self.tasks[call.task].kinds
        if is_given_back and call.lasted < world.longest_seconds:
            world.seen["task given back"] += 1
            held_up = world.database_disturbances.seconds(call.process.name, call.at - 5.0, world.scheduler.now)
            # A task that failed with such an error is given back if the database then takes no connection, too.
            tries = 1 if isinstance(call.raised, _OF_THE_DATABASE) else _TRIES
            if call.failures < tries and not held_up:
                world.broken(f"task {call.task} was given back, and nothing kept its result from being written")
        elif error is None and not is_given_back and row["status"] != "SUCCESSFUL":
            world.broken(f"task {call.task} is reported as done, and its result is {row['status']}")
        elif error is not None and call.raised is None and not is_closed and _kind(type(error)) not in kinds:
            world.broken(f"task {call.task} has not failed, and its attempt has: {error!r}")
        is_last = message.max_attempts is not None and message.attempt >= message.max_attempts
        others = [other for other in self.tasks[call.task].calls if not other.outcome]
        if error is not None and is_last and not others and row["status"] not in ("FAILED", "SUCCESSFUL"):
            world.broken(f"task {call.task} has failed for the last time, and its result is {row['status']}")

    def _row(self, name: str) -> Row:
        row: Row = self._world.tables.rows[RESULTS][name,]
        return row

    def check_end(self, dead: set[str]) -> None:
        """Check the results when nothing waits any more; `dead` are tasks whose message is a dead letter."""
        for (name,), row in self._world.tables.rows.get(RESULTS, {}).items():
            task = self.tasks[name]
            self._check_not_counted_more(name)
            if row["status"] not in ("SUCCESSFUL", "FAILED") and name not in dead:
                self._world.broken(f"the result of task {name} is {row['status']} in the end")
            if row["status"] == "FAILED" and not task.kinds:
                self._world.broken(f"the result of task {name} is FAILED, and it never failed")
