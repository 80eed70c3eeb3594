"""The verdict on a run: what was sent and enqueued, beside what the database, the topics and the journals tell.

effects      every record and every committed task has its effect once, and a row of the inbox once; there is no other
success      no result is SUCCESSFUL, and no call of `consume` has counted a record, without the effect
attempts     each run of a task was counted for the worker that ran it; what was counted and did not run was in a
             worker that was killed; what has run to its end does not run again, unless its worker was killed, or
             could not write what became of it
nothing left no offset behind its topic's end, no message in progress, no dead letter, no open transaction
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

RECORD, TASK = "record-", "task-"


@dataclass(frozen=True)
class Run:
    """A run of a task that has begun.

    Attributes:
        task: id of its result.
        worker: id of the worker that ran it.
        process: name of its process.
        is_done: whether it came to its end.
    """

    task: str
    worker: str
    process: str
    is_done: bool


@dataclass(frozen=True)
class Call:
    """A call of `consume` that has returned."""

    name: str
    handled: int
    repeats: int


@dataclass(kw_only=True)
class Evidence:
    """All that a verdict goes by.

    Attributes:
        records: names of the records that were sent.
        committed: number of each committed task, and the id of its result.
        effects: each effect and its origin: the name of a call of `consume`, or None.
        accepted: message ids in the inbox, by their source: "tasks", or the group.
        results: status and workers of each result.
        runs: runs of tasks, in their order.
        calls: calls of `consume`.
        killed: names of the processes that were killed.
        given_back: times that a process has given a message back whose outcome it could not write.
        left: what is there at the end and should not be, with its number.
    """

    records: set[str]
    committed: Mapping[int, str]
    effects: list[tuple[str, str | None]]
    accepted: Mapping[str, int]
    results: Mapping[str, tuple[str, list[str]]]
    runs: list[Run]
    calls: list[Call]
    killed: set[str]
    given_back: Mapping[str, int]
    left: Mapping[str, int] = field(default_factory=dict)


def judge(evidence: Evidence, group: str, concurrency: int) -> dict[str, list[str]]:
    """Return what is wrong, by kind, with examples; nothing if all is right."""
    found: dict[str, list[str]] = defaultdict(list)
    _judge_effects(evidence, group, found)
    _judge_calls(evidence, found)
    _judge_tasks(evidence, concurrency, found)
    for what, number in evidence.left.items():
        if number:
            found[what].append(str(number))
    return dict(found)


def _judge_effects(evidence: Evidence, group: str, found: dict[str, list[str]]) -> None:
    tasks = {f"{TASK}{number}" for number in evidence.committed}
    expected = evidence.records | tasks
    times = Counter(value for value, _ in evidence.effects)
    for name in sorted(expected - set(times)):
        found["without an effect"].append(name)
    for name, number in times.items():
        if name not in expected:
            found["effects of what was refused or never sent"].append(name)
        elif number > 1:
            found["more than one effect"].append(f"{name}: {number}")
    for source, wanted in (("tasks", len(tasks)), (group, len(evidence.records))):
        if evidence.accepted.get(source, 0) != wanted:
            found["acceptances"].append(f"{source}: {evidence.accepted.get(source, 0)} for {wanted}")
    if strange := set(evidence.accepted) - {"tasks", group}:
        found["acceptances"].append(f"of unknown sources: {sorted(strange)}")


def _judge_calls(evidence: Evidence, found: dict[str, list[str]]) -> None:
    """Compare what calls have counted: a record that they handled, or one whose commit they saw as a repeat."""
    of_call = Counter(origin for _, origin in evidence.effects)
    for call in evidence.calls:
        if not call.handled <= of_call[call.name] <= call.handled + call.repeats:
            found["calls that counted wrong"].append(f"{call}: {of_call[call.name]} effects")


def _judge_tasks(evidence: Evidence, concurrency: int, found: dict[str, list[str]]) -> None:
    ids = set(evidence.committed.values())
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in evidence.runs:
        runs[run.task].append(run)
    for task in sorted(set(runs) - ids):
        found["tasks that ran although they were never committed"].append(task)
    for task in sorted(set(evidence.results) ^ ids):
        found["results without a committed task, or the reverse"].append(task)
    never_began = Counter[str]()
    for task, (status, workers) in evidence.results.items():
        if status != "SUCCESSFUL":
            found["results that are not successful"].append(f"{task}: {status}")
        ran, counted = Counter(run.worker for run in runs[task]), Counter(workers)
        if ran - counted:
            found["runs that were not counted"].append(f"{task}: {dict(ran - counted)}")
        never_began.update(counted - ran)
    _judge_never_began(evidence, concurrency, never_began, found)
    _judge_again(evidence, concurrency, runs, found)


def _judge_never_began(
    evidence: Evidence, concurrency: int, never_began: Counter[str], found: dict[str, list[str]]
) -> None:
    """Excuse what a killed worker had counted and not begun: at most one for each of its threads."""
    process_of = {run.worker: run.process for run in evidence.runs}
    for worker, number in never_began.items():
        # A worker that has begun nothing at all has told nobody the name of its process.
        allowed = concurrency if process_of.get(worker) in {None, *evidence.killed} else 0
        if number > allowed:
            found["attempts that were counted and never began"].append(f"{worker}: {number}, {allowed} explained")


def _judge_again(
    evidence: Evidence, concurrency: int, runs: Mapping[str, list[Run]], found: dict[str, list[str]]
) -> None:
    """Excuse runs after the end of another one: its worker was killed, or gave the message back."""
    again = Counter(run.process for of_task in runs.values() for run in of_task[:-1] if run.is_done)
    for process, number in again.items():
        allowed = evidence.given_back.get(process, 0) + concurrency * (process in evidence.killed)
        if number > allowed:
            found["tasks that ran again after their end"].append(f"{process}: {number}, {allowed} explained")
