"""The two applications as the demo sees them: commands to run, topics to read, and a ledger to compare with.

The ledger is what the applications themselves committed: their histories of orders, stock, payments and entries. Each
row of it is one message. The outbox's own table is not asked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]

_MANAGE = (sys.executable, "example_project/manage.py")
_ALEMBIC = (sys.executable, "-m", "alembic", "-c", "example_project/payments/alembic.ini")
_OUTBOX = (sys.executable, "-m", "outbox_core")
_PAYMENTS = (sys.executable, "-m", "example_project.payments")

_SHOP_LEDGER = """
SELECT 'shop.orders' AS topic, order_id::text AS key, number, id::text AS event_id FROM shop_orderevent
UNION ALL
SELECT 'shop.stock', product_id::text, number, id::text FROM shop_stockmovement
"""

_PAYMENTS_LEDGER = """
SELECT 'payments.payments' AS topic, id::text AS key, 1 AS number, id::text AS event_id FROM payment
UNION ALL
SELECT 'payments.entries', account_id::text, number, id::text FROM entry
"""


class Batch(NamedTuple):
    """A number of transactions of one kind that stash a known number of records."""

    transactions: int
    records: int


@dataclass(frozen=True, kw_only=True)
class Application:
    """One of the two.

    Attributes:
        name: its name, and its database's.
        dsn_variable: environment variable in which it finds that.
        topics: the topics of its messages.
        ledger: SQL for its committed records: topic, key, number within the key, event id.
        migrate: command that makes its tables.
        harvest: command that publishes its outbox.
        load: command that runs its transactions; `--count` and so on are added.
        batch: the smallest number of its transactions that stash a whole number of records.
    """

    name: str
    dsn_variable: str
    topics: tuple[str, ...]
    ledger: str
    migrate: Sequence[str]
    harvest: Sequence[str]
    load: Sequence[str]
    batch: Batch

    def batch_for(self, records: int) -> Batch:
        """Return a batch that stashes at least so many records."""
        times = math.ceil(records / self.batch.records)
        return Batch(self.batch.transactions * times, self.batch.records * times)


SHOP = Application(
    name="shop",
    dsn_variable="SHOP_DATABASE_DSN",
    topics=("shop.orders", "shop.stock"),
    ledger=_SHOP_LEDGER,
    migrate=(*_MANAGE, "migrate", "--verbosity=0"),
    harvest=(*_MANAGE, "run_harvester"),
    load=(*_MANAGE, "place_orders"),
    # Ten orders of four lines, one of them cancelled.
    batch=Batch(transactions=10, records=55),
)

PAYMENTS = Application(
    name="payments",
    dsn_variable="PAYMENTS_DATABASE_DSN",
    topics=("payments.payments", "payments.entries"),
    ledger=_PAYMENTS_LEDGER,
    migrate=(*_ALEMBIC, "upgrade", "head"),
    harvest=(*_OUTBOX, "harvest", "-f", "example_project/payments/harvest.yaml"),
    load=(*_PAYMENTS, "place"),
    # A payment, and an entry for each of two accounts.
    batch=Batch(transactions=1, records=3),
)

APPLICATIONS = (SHOP, PAYMENTS)
