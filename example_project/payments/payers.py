"""Made-up payers: they keep the service busy from many concurrent sessions, as a day's traffic would.

Each payment is a transaction of its own. Some roll back after everything was written and stashed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from sqlalchemy import select

from example_project.payments.database import Sessions, open_sessions
from example_project.payments.messages import ENTRIES, PAYMENTS
from example_project.payments.models import Account
from example_project.payments.paying import pay

_ACCOUNTS = 200
_BALANCE_CENTS = 100_000_000


@dataclass
class Tally:
    """The result of a run: payments made, and the number of stashed records that were rolled back, by topic."""

    paid: int = 0
    rolled_back: Counter[str] = field(default_factory=Counter)


async def open_accounts(sessions: Sessions) -> list[int]:
    """Return the ids of all accounts; if there are none yet, open some."""
    async with sessions() as session, session.begin():
        ids = list(await session.scalars(select(Account.id)))
        if not ids:
            ids = list(range(1, _ACCOUNTS + 1))
            session.add_all(Account(id=n, owner=f"customer {n}", balance_cents=_BALANCE_CENTS) for n in ids)
    return ids


async def make_payments(count: int, *, concurrency: int, rollback_share: float, rate: float | None) -> Tally:
    """Make exactly `count` payments from `concurrency` tasks.

    Args:
        count: payments that commit; those that roll back come on top.
        concurrency: tasks, each with a session of its own.
        rollback_share: share of payments before which a transaction rolls back, from 0 to 1.
        rate: payments per second at most, or None for as many as possible.
    """
    tally = Tally()
    turns = _Turns(count, rate)
    async with open_sessions(concurrency) as sessions, asyncio.TaskGroup() as payers:
        accounts = await open_accounts(sessions)
        for _ in range(concurrency):
            payers.create_task(_pay_and_pay(sessions, turns, accounts, rollback_share, tally))
    return tally


class _Turns:
    """A source of `count` turns, no faster than `rate` a second."""

    def __init__(self, count: int, rate: float | None) -> None:
        self._numbers = iter(range(count))
        self._seconds_each = 1 / rate if rate else 0.0
        self._began = asyncio.get_running_loop().time()

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in self._numbers:
            due = self._began + number * self._seconds_each
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            yield number


async def _pay_and_pay(
    sessions: Sessions, turns: _Turns, accounts: list[int], rollback_share: float, tally: Tally
) -> None:
    async for _ in turns:
        if random.random() < rollback_share:
            tally.rolled_back.update(await _change_ones_mind(sessions, accounts))
        async with sessions() as session, session.begin():
            await pay(session, *random.sample(accounts, 2), random.randint(1, 100))
        tally.paid += 1


async def _change_ones_mind(sessions: Sessions, accounts: list[int]) -> Counter[str]:
    """Make a payment in a transaction that rolls back at the very end; return its stashed records."""
    async with sessions() as session:
        await pay(session, *random.sample(accounts, 2), random.randint(1, 100))
        await session.rollback()
    return Counter({PAYMENTS: 1, ENTRIES: 2})
