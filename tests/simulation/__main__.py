"""`make simulate`: many seeds on all processors, or one seed with its trace, shrunk if it breaks a promise."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import count

from tests.simulation.broken_queue_rules import QUEUE_RULES, queue_broken
from tests.simulation.broken_rules import RULES, broken
from tests.simulation.queue_simulation import MODE as QUEUE
from tests.simulation.queue_simulation import QUEUE_SENTINELS, QueuePlan
from tests.simulation.queue_simulation import run as run_queues
from tests.simulation.simulation import MODES, SENTINELS, Outcome, Plan, run

_TRACED = 400
_SECONDS_PER_HOUR = 3600
_CHUNK = 2


def outcome_of(plan: Plan, rule: str = "", *, trace: int = 0) -> Outcome:
    """Run a plan, with a rule of the product broken if one is named."""
    if isinstance(plan, QueuePlan):
        with queue_broken(rule):
            return run_queues(plan, trace=trace)
    with broken(rule):
        return run(plan, trace=trace)


def plan_of(seed: int, mode: str) -> Plan:
    """Draw a plan."""
    return QueuePlan.of(seed) if mode == QUEUE else Plan.of(seed, mode)


def shrink(plan: Plan, rule: str = "") -> Plan:
    """Return a smaller plan that breaks a promise, too: fewer faults, harvesters, writers, and less time."""
    while True:
        for smaller in _smaller(plan):
            if outcome_of(smaller, rule).problem:
                plan = smaller
                break
        else:
            return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    if isinstance(plan, QueuePlan):
        yield from plan.smaller()
        return
    for fault in plan.faults:
        yield replace(plan, faults=tuple(other for other in plan.faults if other != fault))
    if plan.harvesters > 1:
        yield replace(plan, harvesters=plan.harvesters - 1)
    if plan.writers > 1:
        yield replace(plan, writers=1)
    if plan.seconds > 10:
        yield replace(plan, seconds=plan.seconds / 2)
    if plan.late:
        yield replace(plan, late=0.0)
    if plan.drift:
        yield replace(plan, drift=0.0)
    most = min(plan.most_faults, 64)
    for fewer in (most // 2, most - 1):
        if 0 <= fewer < plan.most_faults:
            yield replace(plan, most_faults=fewer)


def _outcomes(arguments: tuple[int, int, str, str]) -> list[Outcome]:
    first, number, mode, rule = arguments
    return [outcome_of(plan_of(seed, mode), rule) for seed in range(first, first + number)]


def one(seed: int, mode: str, rule: str) -> int:
    """Run a seed in each mode or the given one, shrink it if it fails, and print the trace."""
    for each in [mode] if mode else (*MODES, QUEUE):
        plan = plan_of(seed, each)
        outcome = outcome_of(plan, rule, trace=_TRACED)
        if outcome.problem:
            plan = shrink(plan, rule)
            outcome = outcome_of(plan, rule, trace=_TRACED)
        print(*outcome.trace, sep="\n")
        print(plan)
        print(outcome.problem or "every promise held")
        if outcome.problem:
            return 1
    return 0


def many(hours: float, mode: str, rule: str, first: int) -> int:
    """Run seeds until so many virtual hours have passed; print what was found."""
    began, seconds, seeds = time.monotonic(), 0.0, 0
    seen: Counter[str] = Counter()
    found: list[Outcome] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        chunks = ((start, _CHUNK, mode, rule) for start in count(first, _CHUNK))
        while seconds < hours * _SECONDS_PER_HOUR and not (rule and found):
            batch = [next(chunks) for _ in range(os.cpu_count() or 1)]
            for outcome in (each for outcomes in pool.map(_outcomes, batch) for each in outcomes):
                seeds += 1
                seconds += outcome.virtual_seconds
                seen += outcome.seen
                if outcome.problem:
                    found.append(outcome)
                    print(f"SEED={outcome.plan.seed} MODE={outcome.plan.mode}: {outcome.problem}", flush=True)
    took = time.monotonic() - began
    passed = seconds / _SECONDS_PER_HOUR
    print(f"{seeds} seeds, {passed:.2f} virtual hours in {took:.0f} s: {seconds / took:.0f} times real time")
    for sentinel in QUEUE_SENTINELS if mode == QUEUE else SENTINELS:
        print(f"{seen[sentinel]:9}  {sentinel}{'' if seen[sentinel] else '   NEVER REACHED'}")
    return 1 if found else 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.1, help="virtual hours to run")
    parser.add_argument("--mode", choices=("", *MODES, QUEUE), default="", help="by default each seed draws a delivery")
    parser.add_argument("--seed", type=int, help="run this seed alone, with a trace")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--rule", choices=("", *RULES, *QUEUE_RULES), default="", help="a rule of the product to break")
    given = parser.parse_args()
    if given.seed is not None:
        return one(given.seed, QUEUE if given.rule in QUEUE_RULES else given.mode, given.rule)
    mode = QUEUE if given.rule in QUEUE_RULES else given.mode
    return many(given.hours, mode, given.rule, given.first)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of what a seed decides
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
