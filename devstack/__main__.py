"""`python -m devstack up | status | down`: the stack from a shell.

`up` prints exactly two lines to stdout, so a script can `eval` them, and leaves the services running; everything else
goes to stderr. All three work on one directory, `.devstack` here unless `--dir` says otherwise.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console

from devstack.cluster import KafkaCluster
from devstack.errors import DevstackError
from devstack.stack import DevStack


def main() -> int:
    """Run one command; return the exit code."""
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupted start stops what it started
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if arguments.command == "up":
            _up(
                arguments.dir, embedded=True if arguments.embedded else None, brokers=arguments.brokers, console=console
            )
            return 0
        if arguments.command == "down":
            _down(arguments.dir, console)
            return 0
        return _status(arguments.dir)
    except DevstackError as error:
        console.print(f"devstack: {error}", markup=False, style="red")
    except OSError as error:
        console.print(f"devstack: {error}", markup=False, style="red")
    except KeyboardInterrupt:
        console.print("devstack: interrupted")
        return 130
    return 2


def _up(directory: Path, *, embedded: bool | None, brokers: Literal[1, 3] | None, console: Console) -> None:
    with console.status("looking around") as progress:

        def report(step: str) -> None:
            progress.update(step)
            if step.startswith("Kafka: ") or not console.is_terminal:
                console.print(step, markup=False)

        stack = DevStack(directory, embedded, brokers=brokers, report=report)
        stack.start()
    sys.stdout.write(f"OUTBOX_POSTGRES_DSN={stack.postgres.dsn}\nOUTBOX_KAFKA_BOOTSTRAP={stack.kafka.bootstrap}\n")


def _down(directory: Path, console: Console) -> None:
    if directory.is_dir():
        with console.status("stopping"):
            DevStack(directory).stop()


def _status(directory: Path) -> int:
    """Print the running services; return 0 if both run, 3 otherwise (as `systemctl status`)."""
    stack = DevStack(directory)
    postgres = stack.postgres
    running = postgres.is_running
    print(f"Postgres: {f'{postgres.version}, {postgres.dsn} (pid {postgres.pid})' if running else 'not running'}")
    if not stack.is_broker_running:
        print("Kafka: not running")
        return 3
    kafka = stack.kafka
    pids = ", ".join(map(str, kafka.pids)) if isinstance(kafka, KafkaCluster) else kafka.pid
    print(f"Kafka: {kafka.description}, {kafka.bootstrap} (pid {pids})")
    return 0 if running else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m devstack", description="A Postgres and a Kafka broker, here.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start both, print how to reach them, leave them running")
    kinds = up.add_mutually_exclusive_group()
    kinds.add_argument("--embedded", action="store_true", help="use the embedded broker, which needs no Java")
    kinds.add_argument(
        "--brokers", type=int, choices=[1, 3], help="3: a cluster with replication factor 3 and min ISR 2 (default: 1)"
    )
    down = commands.add_parser("down", help="stop both; keeps their data")
    status = commands.add_parser("status", help="print what runs")
    for command in (up, down, status):
        command.add_argument("--dir", type=Path, default=Path(".devstack"), help="where they live (default: .devstack)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
