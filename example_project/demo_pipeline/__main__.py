"""`python -m example_project.demo_pipeline`: exit code 0 if all is equal, 1 if it is not, 2 if it could not run."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import httpx
import psycopg
from confluent_kafka import KafkaException
from rich.console import Console
from rich.table import Table

from devstack.errors import DevstackError
from example_project.demo.children import DemoError
from example_project.demo.screen import Screen
from example_project.demo_pipeline.run import Outcome, cents, run

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_ROWS = 10


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m example_project.demo_pipeline", description=__doc__)
    parser.add_argument("--orders", type=int, default=2_000, metavar="N", help="orders to place (default: 2000)")
    parser.add_argument("--cluster", action="store_true", help="run the pipeline on a Spark cluster of two workers")
    options = parser.parse_args()
    orders = max(100, options.orders)
    screen = Screen()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    directory, keep = Path(tempfile.mkdtemp(prefix="kafka-outbox-pipeline-")), False
    try:
        outcome = run(orders, screen, directory, on_cluster=options.cluster)
    except (DemoError, DevstackError, psycopg.Error, KafkaException, httpx.HTTPError, OSError) as error:
        keep = isinstance(error, DemoError)
        sys.stderr.write(f"demo-pipeline: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        screen.say("interrupted; everything is stopped")
        return 130
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    return _conclude(outcome, screen)


def _conclude(outcome: Outcome, screen: Screen) -> int:
    table = Table("product", "hour (UTC)", "pieces", "cents, orders table", "cents, pipeline", title="the best of all")
    best = sorted(outcome.from_orders.items(), key=lambda item: -item[1][1])[:_MOST_ROWS]
    for place, (pieces, earned) in best:
        product, hour = place
        of_pipeline = outcome.from_pipeline.get(place, (0, 0))[1]
        table.add_row(str(product), f"{hour:%Y-%m-%d %H:%M}", f"{pieces:,}", f"{earned:,}", f"{of_pipeline:,}")
    Console().print(table)
    screen.say(
        f"{outcome.orders:,} orders, {outcome.cancelled:,} of them cancelled; killed: {' and '.join(outcome.kills)}"
    )
    screen.say(
        f"revenue by the orders table {cents(outcome.from_orders):,} cents, by the pipeline "
        f"{cents(outcome.from_pipeline):,}, on the shop's page {outcome.shown or 0:,}"
    )
    if outcome.is_good:
        screen.say("Equal for every product and hour, to the cent.", style="green")
        return 0
    screen.say("Not equal.", style="bold red")
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    for ours in _SIGNALS:
        signal.signal(ours, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
