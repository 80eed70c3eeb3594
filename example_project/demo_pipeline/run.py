"""The demo itself: services, shop, harvesters, pipeline, clients, two kills, and the comparison."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import yaml
from confluent_kafka.admin import AdminClient, NewTopic

from devstack.ports import LOCALHOST, free_ports
from devstack.spark import SparkCluster, python_of_workers
from devstack.stack import DevStack
from example_project.demo.applications import CHECKOUT, SHOP
from example_project.demo.children import Child, Children, DemoError, child_environment, run_all
from example_project.demo.harvesters import Harvesters
from example_project.demo.screen import Screen
from example_project.demo_pipeline.clients import Clients
from outbox_spark.runtime.java import find_java

_CLIENTS = 4
_TICK_SECONDS = 0.5
_SECONDS_TO_START = 120
_SECONDS_IN_ALL = 600
_SECONDS_BETWEEN_LINES = 5.0
_PARTITIONS = 3
_TOPICS = ("shop.orders", "shop.stock")

_APPLICATION = dataclasses.replace(SHOP, harvest=(*SHOP.harvest, "--delivery=exactly-once"))
_SHOP = (sys.executable, "-m", "uvicorn", "--factory", "django.core.asgi:get_asgi_application", "--lifespan=off")
_SPARK = (sys.executable, "-m", "outbox_spark")
_REVENUE = CHECKOUT / "example_project/revenue.yaml"

_FROM_ORDERS = """
SELECT l.product_id, date_trunc('hour', o.placed_at, 'UTC'), sum(l.quantity), sum(l.quantity * l.price_cents)
FROM shop_orderline AS l JOIN shop_order AS o ON o.id = l.order_id
WHERE o.status = 'placed' GROUP BY 1, 2
"""
_FROM_PIPELINE = "SELECT product, hour, quantity, cents FROM shop_revenue"
_HAS_PIPELINE = "SELECT to_regclass('shop_revenue') IS NOT NULL"
_PRODUCTS = 20

Figures = Mapping[tuple[object, ...], tuple[int, int]]
"""(product, hour) -> (pieces, cents)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of the demo.

    Attributes:
        orders: number of placed orders.
        cancelled: number of cancelled ones among them.
        from_orders: revenue straight from the orders table.
        from_pipeline: revenue as the pipeline has it.
        shown: the total on the shop's page, in cents.
        kills: the killed processes.
    """

    orders: int
    cancelled: int
    from_orders: Figures
    from_pipeline: Figures
    shown: int | None
    kills: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Tell whether all figures are equal, to the cent, after both kills."""
        return self.from_orders == self.from_pipeline and self.shown == cents(self.from_orders) and len(self.kills) == 2


def cents(figures: Figures) -> int:
    """Return the total."""
    return sum(earned for _, earned in figures.values())


def run(orders: int, screen: Screen, log_directory: Path, *, on_cluster: bool = False) -> Outcome:
    """Run the demo; with `on_cluster` the pipeline on a standalone cluster of two workers.

    Raises:
        DemoError: something failed that has nothing to do with delivery.
        DevstackError: PostgreSQL or the broker cannot be had.
    """
    with DevStack(embedded=False, report=screen.say) as stack:
        dsn = stack.postgres.create_database("shop")
        _make_topics(stack.kafka.bootstrap)
        environment = child_environment(
            {
                "SHOP_DATABASE_DSN": dsn,
                "OUTBOX_POSTGRES_DSN": dsn,
                "OUTBOX_KAFKA_BOOTSTRAP": stack.kafka.bootstrap,
                "REVENUE_CHECKPOINT": str(log_directory / "checkpoint"),
            }
        )
        with ExitStack() as services, Children(log_directory, environment) as children:
            run_all([children.start("migrate", _APPLICATION.migrate)], _SECONDS_TO_START)
            file = _REVENUE
            if on_cluster:
                screen.say("starting a Spark cluster of two workers, and packing what they need")
                cluster = SparkCluster(log_directory / "spark", find_java().home_for_spark())
                services.enter_context(cluster).start(workers=2)
                packages = log_directory / "packages.tar.gz"
                run_all([children.start("pack", [*_SPARK, "pack", "-o", str(packages)])], _SECONDS_TO_START)
                file = _for_cluster(cluster.url, packages)
            database = services.enter_context(psycopg.connect(dsn, autocommit=True))
            return _Demo(orders, screen, children, database, [*_SPARK, "project", "-f", str(file)]).run()


def _for_cluster(master: str, packages: Path) -> Path:
    """Write the pipeline's file for a cluster, beside its packages; return its path."""
    document = yaml.safe_load(_REVENUE.read_text())
    document["spark"]["master"] = master
    document["spark"]["settings"] |= {
        "spark.driver.host": LOCALHOST,
        "spark.executor.memory": "512m",
        "spark.pyspark.python": python_of_workers(),
        "spark.archives": f"{packages}#packages",
        "spark.executorEnv.PYTHONPATH": "packages",
    }
    file = packages.with_name("revenue.yaml")
    file.write_text(yaml.safe_dump(document))
    return file


def _make_topics(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([NewTopic(topic, _PARTITIONS, 1) for topic in _TOPICS])
    for result in made.values():
        result.result(30)


class _Demo:
    """The demo while it runs."""

    def __init__(
        self, orders: int, screen: Screen, children: Children, database: psycopg.Connection, command: list[str]
    ) -> None:
        self._orders = orders
        self._screen = screen
        self._children = children
        self._database = database
        self._command = command
        self._kills: list[str] = []
        self._harvesters: Harvesters
        self._pipeline: Child
        self._next_line_at = 0.0

    def run(self) -> Outcome:
        """Start everything, watch it, compare."""
        with self._shop() as url:
            self._screen.say("starting two exactly-once harvesters and the Spark pipeline")
            self._harvesters = Harvesters(_APPLICATION, self._children)
            self._pipeline = self._children.start("pipeline-1", self._command)
            self._wait_for_leader()
            clients = Clients(
                url,
                self._fill_shelves(),
                orders=self._orders,
                threads=_CLIENTS,
                seconds=min(60.0, max(20.0, self._orders / 50)),
            )
            self._screen.say(f"{_CLIENTS} clients place {self._orders:,} orders over HTTP and cancel every seventh")
            clients.start()
            self._watch(clients)
            page = httpx.get(f"{url}/revenue/", trust_env=False).raise_for_status().text
            return Outcome(
                orders=clients.placed,
                cancelled=clients.cancelled,
                from_orders=self._figures(_FROM_ORDERS),
                from_pipeline=self._figures(_FROM_PIPELINE),
                shown=_total_on(page),
                kills=tuple(self._kills),
            )

    @contextmanager
    def _shop(self) -> Iterator[str]:
        """Start the shop's API as a process of its own; return its URL."""
        port = free_ports(1)[0]
        shop = self._children.start("shop", [*_SHOP, f"--host={LOCALHOST}", f"--port={port}", "--log-level=warning"])
        url, deadline = f"http://{LOCALHOST}:{port}", time.monotonic() + _SECONDS_TO_START
        while True:
            shop.check()
            try:
                httpx.get(f"{url}/", trust_env=False).raise_for_status()
            except httpx.HTTPError:
                if time.monotonic() > deadline:
                    raise DemoError("the shop does not answer") from None
                time.sleep(_TICK_SECONDS)
            else:
                yield url
                return

    def _fill_shelves(self) -> list[int]:
        self._database.execute(
            "INSERT INTO shop_product (name, price_cents, stock, movements_count) "
            "SELECT 'Product ' || i, 99 + 7 * i, 1000000, 0 FROM generate_series(1, %s) AS i",
            (_PRODUCTS,),
        )
        return [row[0] for row in self._database.execute("SELECT id FROM shop_product ORDER BY id")]

    def _wait_for_leader(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not self._harvesters.are_ready:
            if time.monotonic() > deadline:
                raise DemoError(f"no harvester became leader within {_SECONDS_TO_START} s")
            time.sleep(_TICK_SECONDS)
            self._harvesters.look()

    def _watch(self, clients: Clients) -> None:
        """Kill the leader and the driver while orders come in; return once the figures are equal, or never will be."""
        deadline = time.monotonic() + _SECONDS_IN_ALL
        while time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
            self._pipeline.check()
            self._harvesters.look()
            has_figures = self._database.execute(_HAS_PIPELINE).fetchone() == (True,)
            pipeline = self._figures(_FROM_PIPELINE) if has_figures else {}
            self._tell(clients, pipeline)
            share = clients.placed / self._orders
            if not self._harvesters.killed and self._harvesters.leader is not None and share > 1 / 3:
                victim = self._harvesters.kill_leader()
                self._kill_said(f"{victim.name} (pid {victim.pid}), the leading harvester")
            if len(self._kills) == 1 and pipeline and share > 0.45:
                self._kill_driver()
                clients.second_half.set()
            done = clients.are_done
            if (
                done
                and len(self._kills) == 2
                and pipeline
                and self._figures(_FROM_ORDERS) == self._figures(_FROM_PIPELINE)
            ):
                return

    def _kill_driver(self) -> None:
        """Kill Spark with everything that belongs to it, and start it again."""
        os.killpg(self._pipeline.pid, signal.SIGKILL)
        self._kill_said(f"the Spark driver (pid {self._pipeline.pid}); starting it again")
        self._pipeline.wait(_SECONDS_TO_START)
        self._pipeline = self._children.start("pipeline-2", self._command)

    def _kill_said(self, whom: str) -> None:
        self._kills.append(whom)
        self._screen.say(f"SIGKILL to {whom}")

    def _tell(self, clients: Clients, pipeline: Figures) -> None:
        if time.monotonic() < self._next_line_at:
            return
        self._next_line_at = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._screen.say(
            f"  {clients.placed:,} orders placed, {clients.cancelled:,} cancelled; revenue by the orders table "
            f"{cents(self._figures(_FROM_ORDERS)):,} cents, by the pipeline {cents(pipeline):,}"
        )

    def _figures(self, query: str) -> Figures:
        rows = self._database.execute(query)
        return {(product, hour): (int(pieces), int(earned)) for product, hour, pieces, earned in rows}


def _total_on(page: str) -> int | None:
    """Read the total from the shop's page."""
    shown = page.partition('<strong id="total">')[2].partition("<")[0]
    return int(shown) if shown.isdecimal() else None
