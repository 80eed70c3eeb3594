"""`python -m tests.spark.faults.run`: pipelines on a cluster, faults while they work, and what arrived.

Records are stashed in as many parts as there are faults; each fault comes while a part is being published.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

from deltalake import DeltaTable

from tests.kafka_reader import read_topic
from tests.spark.faults.world import PIPELINES, REPLAYED, TOPIC, World

_PAUSE_SECONDS = 8.0
_READ_SECONDS = 600.0


def kill_executor(world, chance):
    """An executor of any pipeline dies."""
    _send(world, chance, world.spark.executors, signal.SIGKILL)


def kill_python(world, chance):
    """A Python process of an executor dies."""
    _send(world, chance, world.spark.pythons, signal.SIGKILL)


def pause_executor(world, chance):
    """An executor stands still, long enough for a second attempt at its tasks."""
    pid = _send(world, chance, world.spark.executors, signal.SIGSTOP)
    time.sleep(_PAUSE_SECONDS)
    with suppress(ProcessLookupError):  # it was replaced meanwhile
        os.kill(pid, signal.SIGCONT)


def lose_worker(world, chance):
    """A worker dies with its executors, and another machine takes its place."""
    world.spark.kill(chance.choice(world.spark.workers))
    world.spark.start_worker(f"worker-{time.monotonic_ns()}")


def kill_driver(world, _):
    """The driver that runs longest dies, and starts anew: each has its turn."""
    name = next(iter(world.running))
    world.kill_driver(name)
    world.start(name)


def restart_broker(world, _):
    """The broker dies, and comes back."""
    world.stack.kafka.kill()
    world.stack.kafka.start()


def restart_database(world, _):
    """The database dies, and recovers."""
    world.stack.postgres.restart("immediate")


KINDS = (kill_executor, lose_worker, kill_driver, kill_python, restart_broker, restart_database, pause_executor)


def _send(world, chance, find, number):
    """Send a signal to one of the processes that are found, as soon as there is one; return its pid."""
    hit = []

    def sends():
        for pid in chance.sample(found := sorted(find()), k=len(found)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                hit.append(pid)
                return True
        return False

    world.wait_for("a process to send a signal to", sends)
    return hit[0]


def run(world, *, records, faults, seed, say=lambda _: None):
    """Write the records through these faults, let everything arrive, and return the numbers of what went wrong."""
    chance, done = random.Random(seed), Counter()
    for name in PIPELINES:
        world.start(name)
    world.write(records - faults * (records // (faults + 1)))
    world.wait_for("the first records", lambda: world.waiting() == 0)
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    chance.shuffle(kinds)
    for number, kind in enumerate(kinds):
        part = records // (faults + 1)
        world.write(part)
        world.wait_for("records on their way", lambda part=part: (world.waiting() or 0) < part)
        kind(world, chance)
        done[kind.__name__] += 1
        say(f"{number + 1} of {faults}: {kind.__name__}; {world.written:,} records written, {world.waiting()} waiting")
        world.wait_for("an empty outbox", lambda: world.waiting() == 0)
    for name in PIPELINES:
        world.finish(name, "--once")
    audit, replay = world.finish("audit"), world.finish("replay", "--publish")
    say(audit.splitlines()[-1])
    say(replay.splitlines()[-1])
    wrong = {}
    for count in (partial(_of_topic, world, TOPIC), partial(_of_topic, world, REPLAYED), partial(_of_targets, world)):
        counted = count()
        say(f"wrong: {counted}")  # at once: the next may fail
        wrong |= counted
    return done, wrong


def _of_topic(world, topic):
    """Count what readers of committed records find wrong: by key, and by the numbers in the values."""
    messages = list(read_topic(world.servers, topic, timeout=_READ_SECONDS))
    found = [(message.key, int(message.value.partition(b":")[2].strip(b" }"))) for message in messages]
    return compared(topic, [number for _, number in found], world.written) | {
        f"{topic}: reordered": count_reordered(found)
    }


def _of_targets(world):
    projected = [n for (n,) in world.query("SELECT n FROM projected")]
    archived = DeltaTable(str(world.directory / "shared" / "archive")).to_pyarrow_table(columns=["value"])["value"]
    values = [int(value.partition(b":")[2].strip(b" }")) for value in archived.to_pylist()]
    return compared("table", projected, world.written) | compared("archive", values, world.written)


def compared(where, numbers, written):
    """Count what of 1, 2, ..., written is lost or repeated, and what is not of it."""
    found, expected = set(numbers), set(range(1, written + 1))
    return {
        f"{where}: lost": len(expected - found),
        f"{where}: repeated": len(numbers) - len(found),
        f"{where}: unexpected": len(found - expected),
    }


def count_reordered(found):
    """Count the numbers that come after a greater one of their key; found is pairs of key and number, as read."""
    seen = defaultdict(list)
    for key, number in found:
        seen[key].append(number)
    return sum(after < before for of_key in seen.values() for before, after in pairwise(of_key))


def main():
    """Run, and print the numbers; return 0 if all are zero."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark.faults.run", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--brokers", type=int, choices=[1, 3], default=1)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    directory, began = Path(tempfile.mkdtemp(prefix="outbox-spark-faults-")), time.monotonic()

    def say(text):
        sys.stdout.write(f"{time.monotonic() - began:6.0f} s  {text}\n")
        sys.stdout.flush()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its services would outlive it
    say(f"seed {seed}, logs in {directory}")
    with World(directory, brokers=options.brokers) as world:
        done, wrong = run(world, records=options.records, faults=options.faults, seed=seed, say=say)
    say(f"{options.records:,} records, {sum(done.values())} faults: {dict(done)}")
    if any(wrong.values()):
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
