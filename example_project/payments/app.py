"""The service over HTTP.

    POST /payments  {"payer": 1, "payee": 2, "amount_cents": 999} -> 201, 400, 404 (no such account), 409 (no money);
                    with the header Idempotency-Key, which a repeated request repeats: the same 201, or 422 if it asks
                    for something else
    GET  /healthz   of the harvester within this process, if there is one -> 200, 503

Run it by `python -m example_project.payments serve`. With PAYMENTS_HARVEST=1 a harvester runs beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypedDict

from sqlalchemy.ext.asyncio import AsyncSession
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from example_project.payments.database import Sessions, open_sessions
from example_project.payments.models import Payment, inbox
from example_project.payments.paying import KeyReused, TooLittleMoney, UnknownAccount, find_payment, pay
from outbox_core.config import load_file
from outbox_core.harvest import EmbeddedHarvester
from outbox_sqlalchemy import idempotent

_LARGEST_AMOUNT = 10**12
_LARGEST_ID = 2**63 - 1


class _State(TypedDict):
    sessions: Sessions
    harvester: EmbeddedHarvester | None


@asynccontextmanager
async def _lifespan(_: Starlette) -> AsyncIterator[_State]:
    async with open_sessions() as sessions, AsyncExitStack() as stack:
        harvester = None
        if os.environ.get("PAYMENTS_HARVEST") == "1":
            config = load_file(Path(__file__).with_name("harvest.yaml"), environ=os.environ)
            harvester = await stack.enter_async_context(EmbeddedHarvester(config))
        yield {"sessions": sessions, "harvester": harvester}


async def healthz(request: Request) -> JSONResponse:
    """Answer for the harvester."""
    harvester = request.state.harvester
    if harvester is None:
        return JSONResponse({"detail": "no harvester runs in this process"})
    health = harvester.health()
    return JSONResponse({"leads": health.leader, "detail": health.detail}, status_code=200 if health.ok else 503)


async def paid_already(request: Request, session: AsyncSession) -> JSONResponse:
    """Answer a request that has made its payment before."""
    try:
        return _paid(await find_payment(session, request.headers["Idempotency-Key"], *await _read_payment(request)))
    except ValueError as error:
        return _problem(400, error)
    except KeyReused as error:
        return _problem(422, error)


@idempotent("payments-api", lambda request: request.state.sessions(), repeated=paid_already, inbox=inbox)
async def payments(request: Request, session: AsyncSession) -> JSONResponse:
    """Make a payment, in the transaction of the decorator."""
    try:
        asked = await _read_payment(request)
        return _paid(await pay(session, *asked, request.headers.get("Idempotency-Key")))
    except ValueError as error:
        return _problem(400, error)
    except UnknownAccount as error:
        return _problem(404, error)
    except TooLittleMoney as error:
        return _problem(409, error)


async def _read_payment(request: Request) -> tuple[int, int, int]:
    """Return payer, payee and amount; ValueError says what is wrong with them."""
    match json.loads(await request.body()):
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


def _paid(payment: Payment) -> JSONResponse:
    return JSONResponse({"payment": str(payment.id)}, status_code=201)


def _problem(status: int, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=status)


app = Starlette(
    routes=[Route("/payments", payments, methods=["POST"]), Route("/healthz", healthz)],
    lifespan=_lifespan,
)
