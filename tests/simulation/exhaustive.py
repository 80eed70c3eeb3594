"""`make explore`: all interleavings of a small world, with the exactly-once terms that the product runs.

A path is a list of choices among the events of each state, 0 for the ordinary course. Nothing can be copied, so each
path begins anew: it repeats the choices that led to a state, takes another one there, and follows the ordinary course
from then on, until it meets a state that was seen before. Paths with few unusual choices come first, so that the first
violation has the shortest trace, or nearly so.
"""

from __future__ import annotations

import argparse
import gc
import logging
import mmap
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tests.simulation.broken_rules import RULES, broken, rule_named
from tests.simulation.small_world import Scope, World, product_in_small_world

_AT_ONCE = 40  # paths for a worker
_MOST_EVENTS = 2_000
_END = 1  # in the place of a state: the end of a path

Choices = bytes


class States:
    """The numbers of all states seen, each with the next one of its ordinary course; shared between processes."""

    def __init__(self, most: int) -> None:
        self._slots = 1 << (most * 2 - 1).bit_length()
        memory = mmap.mmap(-1, self._slots * 16)
        self._numbers = memoryview(memory).cast("Q")
        self._lock = multiprocessing.Lock()

    def add(self, number: int) -> bool:
        """Add a state; return False if it is known."""
        with self._lock:
            place = self._place_of(number)
            if self._numbers[place] == number:
                return False
            self._numbers[place] = number
            return True

    def follow(self, number: int, following: int) -> None:
        """Note which state the ordinary course leads to."""
        self._numbers[self._place_of(number) + 1] = following

    def _place_of(self, number: int) -> int:
        slot = number % self._slots
        while self._numbers[2 * slot] not in {0, number}:
            slot = (slot + 1) % self._slots
        return 2 * slot

    def endless(self) -> int:
        """Return the number of states whose ordinary course never ends."""
        ends: dict[int, bool] = {_END: True}
        for place in range(0, 2 * self._slots, 2):
            number, course = self._numbers[place], []
            while number and number not in ends:
                ends[number] = False  # until the end is reached
                course.append(number)
                number = self._numbers[self._place_of(number) + 1]
            if number and ends[number]:
                ends.update(dict.fromkeys(course, True))
        return sum(not each for each in ends.values())


@dataclass
class Found:
    """The result of some paths, or of all."""

    states: int = 0
    paths: int = 0
    waits: int = 0  # states in which nothing can happen but that time passes
    ended: int = 0  # paths that reached an end, and no known state
    events: int = 0
    longest: int = 0
    violations: list[tuple[str, Choices]] = field(default_factory=list)
    branches: list[Choices] = field(default_factory=list)
    endless: int = 0
    left: int = 0  # branches that were not followed

    def add(self, other: Found) -> None:
        """Add another result, but for its branches."""
        self.states += other.states
        self.waits += other.waits
        self.paths += other.paths
        self.ended += other.ended
        self.events += other.events
        self.longest = max(self.longest, other.longest)
        self.violations += other.violations


class Search:
    """A search of everything that a scope allows."""

    def __init__(self, scope: Scope, rule: str = "", *, most_states: int = 4_000_000) -> None:
        self._scope = scope
        self._rule = rule
        self._states = States(most_states)

    def run(self, jobs: int = 1, deviations: int | None = None, *, progress: bool = False) -> Found:
        """Search, paths with few choices other than the ordinary one first; end at a violation, or with the scope."""
        total, level, number = Found(), [b""], 0
        with self._workers(jobs) as explore:
            while level and not total.violations and (deviations is None or number <= deviations):
                following: list[Choices] = []
                for found in explore(_batches(level)):
                    total.add(found)
                    following += found.branches
                    if total.violations:
                        break
                if progress:
                    print(f"{number:3} unusual choices: {total.states:9,} states, {total.paths:9,} paths", flush=True)
                level, number = following, number + 1
        total.left = len(level)
        if not total.violations:
            total.endless = self._states.endless()
        return total

    @contextmanager
    def _workers(self, jobs: int) -> Iterator[Any]:
        if jobs == 1:
            with quiet_product(self._rule):
                yield lambda batches: map(self.explore, batches)
            return
        global _search  # noqa: PLW0603  inherited by the workers, as it holds shared memory
        _search = self
        with multiprocessing.get_context("fork").Pool(jobs, _prepare_worker, [self._rule]) as pool:
            yield lambda batches: pool.imap_unordered(_explore, batches)

    def explore(self, starts: Iterable[Choices]) -> Found:
        """Follow some paths to their ends."""
        total = Found()
        for start in starts:
            found = self._follow(start)
            total.add(found)
            total.branches += found.branches
            if total.violations:
                break
        return total

    def _follow(self, start: Choices) -> Found:
        found, world, last = Found(paths=1), World(self._scope), 0
        try:
            for choice in start:
                world.take(world.events()[choice])
            choices = bytearray(start)
            while True:
                problem = world.problem()
                if len(choices) > _MOST_EVENTS:
                    problem = f"rows {list(world.database.rows)} still wait after {_MOST_EVENTS} events"
                number = world.fingerprint()
                if last:
                    self._states.follow(last, number)
                if not problem and not self._states.add(number):
                    break
                found.states += 1
                events = [] if problem else world.events()
                if not events:
                    self._end(found, problem or world.final_problem(), number, bytes(choices))
                    break
                found.waits += len(events) == 1 and events[0].label == "time passes"
                found.branches += [bytes(choices) + bytes([other]) for other in range(1, len(events))]
                world.take(events[0])
                choices.append(0)
                last = number
            found.events, found.longest = len(choices), len(choices)
        finally:
            world.close()
        return found

    def _end(self, found: Found, problem: str, number: int, choices: Choices) -> None:
        found.ended = 1
        if problem:
            found.violations.append((problem, choices))
        else:
            self._states.follow(number, _END)


def _batches(paths: Sequence[Choices]) -> Iterator[Sequence[Choices]]:
    return (paths[place : place + _AT_ONCE] for place in range(0, len(paths), _AT_ONCE))


_search: Search


def _prepare_worker(rule: str) -> None:
    global _context  # noqa: PLW0603  it lasts as long as the process
    _context = quiet_product(rule)
    _context.__enter__()


_context: Any = None


def _explore(starts: Sequence[Choices]) -> Found:
    return _search.explore(starts)


@contextmanager
def quiet_product(rule: str) -> Iterator[None]:
    """Run the product in the small world, without a log, with a rule broken if one is named."""
    logging.disable(logging.CRITICAL)
    before, collected = sys.getrecursionlimit(), gc.get_threshold()
    sys.setrecursionlimit(10_000)
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # a path leaves little behind
    try:
        with product_in_small_world(), broken(rule):
            yield
    finally:
        sys.setrecursionlimit(before)
        gc.set_threshold(*collected)
        gc.unfreeze()
        logging.disable(logging.NOTSET)


def trace(scope: Scope, choices: Choices, rule: str = "") -> list[str]:
    """Return the events of a path; those that are not the ordinary ones are marked."""
    lines = []
    with quiet_product(rule):
        world = World(scope)
        for choice in choices:
            event = world.events()[choice]
            lines.append(f"{'*' if choice else ' '} {event.label}")
            world.take(event)
        world.close()
    return lines


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="make explore", description=__doc__)
    for each in fields(Scope):
        kind = (lambda text: text == "1") if each.type == "bool" else int
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default)
    parser.add_argument("--rule", type=rule_named(*RULES), default="", help="a rule of the product to break")
    parser.add_argument("--deviations", default="2", help="the most unusual choices on a path, or all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    scope = replace(Scope(), **{each.name: getattr(given, each.name) for each in fields(Scope)})
    most = None if given.deviations == "all" else int(given.deviations)
    began = time.monotonic()
    found = Search(scope, given.rule).run(given.jobs, most, progress=True)
    spent = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(each.ru_utime + each.ru_stime for each in spent)
    print(
        f"{found.states:,} distinct states ({found.waits:,} of them mere waits), {found.paths:,} paths, "
        f"{found.ended:,} of them to an end of their own; the longest has {found.longest} events; "
        f"{time.monotonic() - began:.0f} s, {cpu:.0f} s of CPU"
    )
    if found.left and not found.violations:
        print(f"{found.left:,} branches have more unusual choices, and were not followed")
    if found.endless:
        print(f"the ordinary course never ends from {found.endless} states")
    if found.violations:
        problem, choices = min(found.violations, key=lambda each: len(each[1]))
        print(*trace(scope, choices, given.rule), problem, sep="\n")
    return 1 if found.violations or found.endless else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts must be the same in each path's repetition
        arguments = [sys.executable, "-m", "tests.simulation.exhaustive", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
