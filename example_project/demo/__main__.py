"""`python -m example_project.demo`: exit code 0 if all is well, 1 if records were lost, 2 if it could not run."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psycopg
from confluent_kafka import KafkaException

from devstack.errors import DevstackError
from example_project.demo.children import DemoError
from example_project.demo.run import Options, run
from example_project.demo.screen import Result, Screen

_EXIT_BAD = 1
_EXIT_CANNOT_RUN = 2
_EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the demo; return the exit code."""
    options = _options()
    screen = Screen()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    log_directory = Path(tempfile.mkdtemp(prefix="kafka-outbox-demo-"))
    wants_logs = False
    try:
        results = run(options, screen, log_directory)
    except (DemoError, DevstackError, psycopg.Error, KafkaException, OSError) as error:
        wants_logs = isinstance(error, DemoError)
        sys.stderr.write(f"demo: error: {error}\n")
        return _EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        screen.say("interrupted; everything is stopped")
        return _EXIT_INTERRUPTED
    finally:
        if not wants_logs:
            shutil.rmtree(log_directory, ignore_errors=True)
    screen.show(results)
    return _conclude(results, screen)


def _conclude(results: Sequence[Result], screen: Screen) -> int:
    verdicts = [verdict for result in results for verdict in result.verdicts]
    invented = sum(verdict.invented for verdict in verdicts)
    if invented:
        screen.say(f"{invented} records were received that no transaction had committed.", style="bold red")
    if not all(verdict.is_good for verdict in verdicts):
        screen.say("Records were lost or changed their order.", style="bold red")
        return _EXIT_BAD
    screen.say("Nothing was lost, nothing changed its order, and nothing that was rolled back got out.", style="green")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, once: a second Ctrl-C must not interrupt the stopping of processes."""
    del number, frame
    for ours in _SIGNALS:
        signal.signal(ours, signal.SIG_IGN)
    raise KeyboardInterrupt


def _options() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description="Two applications stash records from concurrent transactions, two harvesters each publish them, "
        "the leaders are killed half-way, and a consumer checks that all arrived in order.",
    )
    parser.add_argument(
        "--records", type=_count, default=20_000, metavar="N", help="stash at least so many (default: 20000)"
    )
    parser.add_argument("--embedded", action="store_true", help="use the embedded broker, which needs no Java")
    parser.add_argument("--keep", action="store_true", help="leave Postgres and the broker running")
    arguments = parser.parse_args()
    return Options(records=arguments.records, embedded=arguments.embedded, keep=arguments.keep)


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= 10_000_000:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 10000000, got {text!r}")
    return count


if __name__ == "__main__":
    sys.exit(main())
