"""The service's transaction: a payment from one account to another.

It locks both accounts first, in the order of their ids (no deadlocks), and stashes last: ids of the outbox are then
drawn in the order in which transactions on the same account commit.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from example_project.payments.messages import entry_made, payment_made
from example_project.payments.models import Account, Entry, Payment, outbox


class PaymentError(Exception):
    """A payment that cannot be; nothing was written."""


class UnknownAccount(PaymentError):
    """Payer or payee has no account."""


class TooLittleMoney(PaymentError):
    """The payer has less than the amount."""


class KeyReused(PaymentError):
    """The idempotency key belongs to a request for something else."""


async def pay(
    session: AsyncSession, payer_id: int, payee_id: int, amount_cents: int, idempotency_key: str | None = None
) -> Payment:
    """Move money, in the transaction of the caller.

    `idempotency_key` is that of the request, by which `find_payment` finds the payment.

    Raises:
        UnknownAccount: payer or payee has no account.
        TooLittleMoney: the payer has less than the amount.
    """
    accounts = await _lock_accounts(session, payer_id, payee_id)
    payer, payee = accounts[payer_id], accounts[payee_id]
    if payer.balance_cents < amount_cents:
        raise TooLittleMoney(f"account {payer_id} has {payer.balance_cents} cents, not {amount_cents}")
    payment = Payment(payer_id=payer_id, payee_id=payee_id, amount_cents=amount_cents, idempotency_key=idempotency_key)
    session.add(payment)
    await session.flush()
    entries = [_book(payer, payment, -amount_cents), _book(payee, payment, amount_cents)]
    session.add_all(entries)
    await session.flush()
    await outbox.astash(session, payment_made(payment))
    await outbox.astash_many(session, map(entry_made, entries))
    return payment


async def find_payment(session: AsyncSession, idempotency_key: str, *asked: int) -> Payment:
    """Return the payment that this very request (payer, payee, amount) has made before.

    Raises:
        KeyReused: the key belongs to a payment of something else.
    """
    payment = (await session.scalars(select(Payment).where(Payment.idempotency_key == idempotency_key))).one()
    if (payment.payer_id, payment.payee_id, payment.amount_cents) != asked:
        raise KeyReused(f"the idempotency key {idempotency_key!r} belongs to a request for something else")
    return payment


async def _lock_accounts(session: AsyncSession, *ids: int) -> dict[int, Account]:
    rows = await session.scalars(select(Account).where(Account.id.in_(ids)).order_by(Account.id).with_for_update())
    accounts = {account.id: account for account in rows}
    for account_id in ids:
        if account_id not in accounts:
            raise UnknownAccount(f"there is no account {account_id}")
    return accounts


def _book(account: Account, payment: Payment, amount_cents: int) -> Entry:
    """Change the balance of a locked account, and add an entry for it."""
    account.balance_cents += amount_cents
    account.entries_count += 1
    return Entry(
        account_id=account.id,
        number=account.entries_count,
        payment_id=payment.id,
        amount_cents=amount_cents,
        balance_after_cents=account.balance_cents,
    )
