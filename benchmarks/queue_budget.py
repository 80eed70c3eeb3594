"""The CPU time that a message of a queue costs, by thread, in turn with another version (`make bench-queue-budget`).

    python -m benchmarks.queue_budget [--other CHECKOUT] [--messages 60000] [--rounds 5] [--transactional]

Each version is a process of its own that sends messages of 100 bytes, receives and acknowledges them one by one with a
handler that does nothing, and then has a tracker read their markers from the beginning. *bare* are Kafka clients alone
in that place, which read the messages, and produce two records of the sizes of markers for each. All run on the same
broker, one right after the other, in every second round in the other order. The figures are medians of the rounds; the
first round, which warms the broker, does not count.

Rates drift with the machine's other work, and CPU times less so: compare the columns of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.queue import bare_receive, fresh_queue, send
from benchmarks.stage import ROOT, machine
from devstack.stack import DevStack
from outbox_queue import Queue
from outbox_queue.redelivery.tracker import RedeliveryTracker

_PATIENCE_SECONDS = 60
_THREADS = {
    "outbox-queue-bench": "consumer: reading",
    "MainThread": "consumer: receive, ack",
    "outbox-queue-alive-bench": "consumer: keep-alives",
    "outbox-queue-tracker": "tracker",
}
_CLIENTS = "Kafka clients"
_ROWS = ("messages/s", *_THREADS.values(), f"consumer: {_CLIENTS}", f"tracker: {_CLIENTS}", "broker")
Budget = dict[str, float]


def cpu_microseconds(pid: int | str = "self") -> dict[int, float]:
    """Return the CPU time of each thread of a process, by its id."""
    used = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            used[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1000
        except OSError:  # it has just ended
            continue
    return used


class Meter:
    """A measurement of the CPU time of this process's threads, and of the broker's, from its making on."""

    def __init__(self, broker: int) -> None:
        self._broker = broker
        self._broker_before = sum(cpu_microseconds(broker).values())
        self._before = cpu_microseconds()
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Return the time since then."""
        return time.monotonic() - self._began

    def budget(self, part: str, messages: int) -> Budget:
        """Return the microseconds of each of so many messages, and those of clients' threads as a part's."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        budget: Budget = {}
        for thread, used in cpu_microseconds().items():
            row = _THREADS.get(names.get(thread, ""), f"{part}: {_CLIENTS}")
            budget[row] = budget.get(row, 0.0) + (used - self._before.get(thread, 0.0)) / messages
        budget["broker"] = (sum(cpu_microseconds(self._broker).values()) - self._broker_before) / messages
        return budget


def measure_queue(queue: Queue, messages: int, broker: int) -> Budget:
    """Receive and acknowledge, and have a tracker read the markers."""
    with queue.consumer() as consumer:
        rest = messages - messages // 5
        for number in range(messages):
            if number == messages - rest:  # connected, and the prefetch has found its size
                meter = Meter(broker)
            message = consumer.receive(_PATIENCE_SECONDS)
            if message is None:
                raise SystemExit("a message is missing")
            message.ack()
        seconds = meter.seconds()
        time.sleep(0.5)  # the last markers are sent
        budget = {**meter.budget("consumer", rest), "messages/s": rest / seconds}
    meter = Meter(broker)
    with RedeliveryTracker(queue.config) as tracker:
        while not tracker.is_caught_up:
            time.sleep(0.01)
        ours = meter.budget("tracker", messages)
    return budget | {row: ours[row] for row in ("tracker", f"tracker: {_CLIENTS}")}


def measure_bare(queue: Queue, messages: int, broker: int) -> Budget:
    """Read, and write two markers for each message, with nothing around the clients."""
    meter = Meter(broker)
    rate, cpu = bare_receive(queue, messages)
    return {"messages/s": rate, f"consumer: {_CLIENTS}": cpu, "broker": meter.budget("consumer", messages)["broker"]}


def _run_here(what: str, bootstrap: str, messages: int, broker: int, settings: dict[str, object]) -> None:
    with fresh_queue(bootstrap, **settings) as queue:
        send(queue, messages)
        print(json.dumps((measure_bare if what == "bare" else measure_queue)(queue, messages, broker)))


def _run(what: str, checkout: Path, *arguments: str) -> Budget:
    """Measure in a process of its own, with the code of a checkout."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--here", what, *arguments],  # not beside queue.py, which hides Python's own
        env={**os.environ, "PYTHONPATH": str(checkout)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    budget: Budget = json.loads(done.stdout.splitlines()[-1])
    return budget


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="a checkout of the version to compare with (git worktree add ...)")
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transactional", action="store_true")
    parser.add_argument("--here", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        what, bootstrap, messages, broker, settings = options.here
        _run_here(what, bootstrap, int(messages), int(broker), json.loads(settings))
        return
    versions = {"this": ROOT, "bare": ROOT} | ({"other": options.other} if options.other else {})
    rounds: list[dict[str, Budget]] = []
    console = Console(width=110)
    console.print(machine())
    with DevStack(embedded=False) as stack:
        stack.start_kafka()
        settings = json.dumps({"transactional": options.transactional})
        arguments = (stack.kafka.bootstrap, str(options.messages), str(stack.kafka.pid), settings)
        for number in range(options.rounds + 1):
            names = list(versions)[:: 1 if number % 2 else -1]
            rounds.append({name: _run(name, versions[name], *arguments) for name in names})
            console.print({name: round(budget["messages/s"]) for name, budget in rounds[-1].items()}, highlight=False)
    _show(console, list(versions), rounds[1:])


def _show(console: Console, versions: list[str], rounds: list[dict[str, Budget]]) -> None:
    table = Table(title="Microseconds of CPU for each message")
    table.add_column("")
    for name in versions:
        table.add_column(name, justify="right")
    for row in _ROWS:
        medians = [statistics.median(budgets[name].get(row, 0.0) for budgets in rounds) for name in versions]
        table.add_row(row, *(f"{median:,.0f}" if row == "messages/s" else f"{median:.1f}" for median in medians))
    console.print(table)


if __name__ == "__main__":
    main()
