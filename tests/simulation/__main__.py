"""`make simulate`: many seeds on all processors, or one seed with its trace, shrunk if it breaks a promise."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from multiprocessing import Pool
from statistics import median

from tests.simulation.broken_consuming_rules import CONSUMER_RULES, consumers_broken
from tests.simulation.broken_queue_rules import QUEUE_RULES, queue_broken
from tests.simulation.broken_rules import RULES, broken, plan_of, rule_named, shows
from tests.simulation.consuming_simulation import CONSUMER_SENTINELS, ConsumerPlan
from tests.simulation.consuming_simulation import MODE as CONSUMERS
from tests.simulation.consuming_simulation import run as run_consumers
from tests.simulation.queue_simulation import MODE as QUEUE
from tests.simulation.queue_simulation import QUEUE_SENTINELS, QueuePlan
from tests.simulation.queue_simulation import run as run_queues
from tests.simulation.simulation import MODES, SENTINELS, Outcome, Plan, run

_TRACED = 400
_SECONDS_PER_HOUR = 3600
_CHUNK = 4
_CHUNKS_OF_A_PROCESS = 10  # then another one takes its place: a seed leaves 10 MB of garbage
_MOST_SECONDS = 3600  # of a chunk: a process that was killed never answers
_TELL_SECONDS = 60.0
_KINDS = 16  # one seed in so many is a long run with rare faults, another one has four harvesters and long outages, and
# in two of them one harvester or another is ill alone, for minutes
_CALM = 4  # one seed in so many of consumers is a long run with rare faults
_MOST_SEEDS = 600  # for a broken rule: about two minutes on two processors
_APART = 10_000  # between the ranges of seeds of one rule
_ALL = "all"


def outcome_of(plan: Plan, rule: str = "", *, trace: int = 0) -> Outcome:
    """Run a plan, with a rule of the product broken if one is named."""
    if isinstance(plan, ConsumerPlan):
        with consumers_broken(rule):
            return run_consumers(plan, trace=trace)
    if isinstance(plan, QueuePlan):
        with queue_broken(rule):
            return run_queues(plan, trace=trace)
    with broken(rule):
        return run(plan, trace=trace)


def _plan_of(seed: int, mode: str, rule: str) -> Plan:
    """Draw a plan."""
    if mode == CONSUMERS or rule in CONSUMER_RULES:
        consumers = ConsumerPlan.of(seed)
        return consumers.calm() if not rule and seed % _CALM == _CALM - 1 else consumers
    if mode == QUEUE or rule in QUEUE_RULES:
        return QueuePlan.of(seed)
    plan = plan_of(seed, mode, rule)
    if rule:
        return plan
    return {3: plan.lone, 7: plan.crowded, 11: plan.lone, 15: plan.quiet}.get(seed % _KINDS, lambda: plan)()


def _keep_garbage() -> None:
    """Collect no garbage in this process, which takes half of its time otherwise."""
    gc.freeze()
    gc.disable()


def shrink(plan: Plan, rule: str = "") -> Plan:
    """Return a smaller plan that breaks a promise, too: fewer faults, harvesters, writers, and less time."""
    while True:
        for smaller in plan.smaller():
            if shows(rule, outcome_of(smaller, rule).problem):
                plan = smaller
                break
        else:
            return plan


def _outcomes(arguments: tuple[int, int, str, str]) -> list[Outcome]:
    first, number, mode, rule = arguments
    return [outcome_of(_plan_of(seed, mode, rule), rule) for seed in range(first, first + number)]


def one(seed: int, mode: str, rule: str) -> int:
    """Run a seed in each mode or the given one, shrink it if it fails, and print the trace."""
    for each in [mode] if mode else MODES if rule else (*MODES, QUEUE, CONSUMERS):
        plan = _plan_of(seed, each, rule)
        outcome = outcome_of(plan, rule, trace=_TRACED)
        if shows(rule, outcome.problem):
            plan = shrink(plan, rule)
            outcome = outcome_of(plan, rule, trace=_TRACED)
        print(*outcome.trace, sep="\n")
        print(plan)
        print(outcome.problem or "every promise held")
        if outcome.problem:
            return 1
    return 0


def _results(mode: str, rule: str, first: int) -> Iterator[Outcome]:
    """Run seeds on all processors, for as long as somebody asks for outcomes; return them in the order of seeds."""
    chunks = ((start, _CHUNK, mode, rule) for start in count(first, _CHUNK))
    processes = os.cpu_count() or 1
    with Pool(processes, _keep_garbage, maxtasksperchild=_CHUNKS_OF_A_PROCESS) as pool:
        running = deque(pool.apply_async(_outcomes, (next(chunks),)) for _ in range(8 * processes))
        while True:
            yield from running.popleft().get(_MOST_SECONDS)
            running.append(pool.apply_async(_outcomes, (next(chunks),)))


def _progress(seeds: int, seconds: float, began: float) -> str:
    took = time.monotonic() - began
    hours = seconds / _SECONDS_PER_HOUR
    return f"{seeds} seeds, {hours:.2f} virtual hours in {took:.0f} s: {seconds / took:.0f} times real time"


def many(hours: float, mode: str, rule: str, first: int) -> int:
    """Run seeds until so many virtual hours have passed; print what was found."""
    began, seconds, seeds = time.monotonic(), 0.0, 0
    told_at, found = began, False
    seen: Counter[str] = Counter()
    for outcome in _results(mode, rule, first):
        seeds += 1
        seconds += outcome.virtual_seconds
        seen += outcome.seen
        if shows(rule, outcome.problem):
            found = True
            print(f"SEED={outcome.plan.seed} MODE={outcome.plan.mode}: {outcome.problem}", flush=True)
        if seconds >= hours * _SECONDS_PER_HOUR or (rule and found):
            break
        if time.monotonic() - told_at > _TELL_SECONDS:
            told_at = time.monotonic()
            print(_progress(seeds, seconds, began), flush=True)
    print(_progress(seeds, seconds, began))
    for sentinel in {QUEUE: QUEUE_SENTINELS, CONSUMERS: CONSUMER_SENTINELS}.get(mode, SENTINELS):
        print(f"{seen[sentinel]:9}  {sentinel}{'' if seen[sentinel] else '   NEVER REACHED'}")
    return 1 if found else 0


def _seeds_until_found(arguments: tuple[str, int]) -> tuple[int, float, str]:
    """Return how many seeds from a first one on it takes until a broken rule shows, CPU seconds, and the problem."""
    rule, first = arguments
    began = time.process_time()
    for number in range(1, _MOST_SEEDS + 1):
        problem = outcome_of(_plan_of(first + number - 1, "", rule), rule).problem
        if shows(rule, problem):
            return number, time.process_time() - began, problem
        if not number % _CHUNK:
            gc.collect()
    return _MOST_SEEDS, time.process_time() - began, ""


def medians(rule: str, ranges: int) -> int:
    """Print how long it takes to find a rule broken, or each of them, from the first seeds of some ranges on."""
    names = [*RULES, *QUEUE_RULES, *CONSUMER_RULES] if rule == _ALL else [rule]
    was_missed = False
    print("| Broken rule | Median of seeds | Most | Median of CPU seconds | What it shows |\n|---|---|---|---|---|")
    with Pool(os.cpu_count(), _keep_garbage) as pool:
        for name in names:
            found = list(pool.map(_seeds_until_found, [(name, place * _APART) for place in range(ranges)], 1))
            seeds, seconds = [each[0] for each in found], median(each[1] for each in found)
            missed = sum(not problem for _, _, problem in found)
            was_missed = was_missed or bool(missed)
            what = f"missed in {missed} of {ranges} ranges" if missed else found[0][2]
            print(f"| {name} | {median(seeds):.0f} | {max(seeds)} | {seconds:.0f} | {what} |", flush=True)
    return 1 if was_missed else 0


def _mode_of(rule: str, mode: str, parser: argparse.ArgumentParser) -> str:
    """Return the mode in which a rule counts, '' for several; end the command if another one was asked for."""
    counts_in = QUEUE if rule in QUEUE_RULES else CONSUMERS if rule in CONSUMER_RULES else ""
    counts_in = counts_in or (RULES[rule].mode if rule in RULES else "")
    if rule and mode and (mode != counts_in if counts_in else mode not in MODES):
        parser.error(f"the rule {rule!r} counts in {counts_in or ' and '.join(MODES)}, not in {mode}")
    return counts_in or mode


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.1, help="virtual hours to run")
    parser.add_argument(
        "--mode", choices=("", *MODES, QUEUE, CONSUMERS), default="", help="by default each seed draws a delivery"
    )
    parser.add_argument("--seed", type=int, help="run this seed alone, with a trace")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument(
        "--rule",
        type=rule_named(_ALL, *RULES, *QUEUE_RULES, *CONSUMER_RULES),
        default="",
        help="a rule of the product to break, as named in broken_*rules.py; or 'all'",
    )
    parser.add_argument(
        "--median", type=int, help="in so many ranges of seeds, count those that it takes to find the rule broken"
    )
    given = parser.parse_args()
    if given.median is not None or given.rule == _ALL:
        return medians(given.rule or _ALL, given.median or 1)
    mode = _mode_of(given.rule, given.mode, parser)
    if given.seed is not None:
        return one(given.seed, mode, given.rule)
    return many(given.hours, mode, given.rule, given.first)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is part of what a seed decides
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
