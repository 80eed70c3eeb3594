"""The service over HTTP.

    POST /payments  {"payer": 1, "payee": 2, "amount_cents": 999} -> 201, 400, 404 (no such account), 409 (no money)

Run it by `python -m example_project.payments serve`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from example_project.payments.database import Sessions, open_sessions
from example_project.payments.paying import TooLittleMoney, UnknownAccount, pay

_LARGEST_AMOUNT = 10**12
_LARGEST_ID = 2**63 - 1


class _State(TypedDict):
    sessions: Sessions


@asynccontextmanager
async def _lifespan(_: Starlette) -> AsyncIterator[_State]:
    async with open_sessions() as sessions:
        yield {"sessions": sessions}


async def payments(request: Request) -> JSONResponse:
    """Make a payment."""
    try:
        payer, payee, amount_cents = _read_payment(await request.body())
        async with request.state.sessions() as session, session.begin():
            payment = await pay(session, payer, payee, amount_cents)
    except ValueError as error:
        return _problem(400, error)
    except UnknownAccount as error:
        return _problem(404, error)
    except TooLittleMoney as error:
        return _problem(409, error)
    return JSONResponse({"payment": str(payment.id)}, status_code=201)


def _read_payment(body: bytes) -> tuple[int, int, int]:
    """Return payer, payee and amount; ValueError says what is wrong with them."""
    match json.loads(body):
        case {"payer": payer, "payee": payee, "amount_cents": amount} if (
            payer != payee
            and _is_number_below(_LARGEST_ID, payer)
            and _is_number_below(_LARGEST_ID, payee)
            and _is_number_below(_LARGEST_AMOUNT, amount)
        ):
            return payer, payee, amount
    raise ValueError('expected {"payer": account, "payee": another account, "amount_cents": more than 0}')


def _is_number_below(limit: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < limit


def _problem(status: int, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=status)


app = Starlette(routes=[Route("/payments", payments, methods=["POST"])], lifespan=_lifespan)
