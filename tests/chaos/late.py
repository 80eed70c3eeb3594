"""Late requests: one is taken off its connection, the client repeats it on another, and the first copy arrives later.

`devstack.frame_proxy` describes the requests that librdkafka repeats silently, and the order in which brokers may see
them. This module lists the requests of an outbox that can be late, and delivers them at a chosen time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from devstack.frame_proxy import Api, FrameProxy, Match, Request, Trap
from devstack.processes import wait_until
from tests.chaos.schedule import Fault

_POLL_SECONDS = 0.005
_ANSWER_SECONDS = 5.0
_VICTIM_SECONDS = 4.0
_LONGEST_DELAY_SECONDS = 4.0


@dataclass(frozen=True)
class LateKind:
    """A kind of request that can be late.

    Attributes:
        api: its API key.
        commits: of EndTxn, whether it commits.
        comes_with: its cause: "load", "bad-record" (which aborts a transaction) or "new-leader".
    """

    api: Api
    commits: bool | None = None
    comes_with: str = "load"


LATE_KINDS = {
    "end-txn-commit": LateKind(Api.END_TXN, commits=True),
    "end-txn-abort": LateKind(Api.END_TXN, commits=False, comes_with="bad-record"),
    "produce": LateKind(Api.PRODUCE),
    "add-partitions": LateKind(Api.ADD_PARTITIONS_TO_TXN),
    "init-producer-id": LateKind(Api.INIT_PRODUCER_ID, comes_with="new-leader"),
    "fetch": LateKind(Api.FETCH),
    "list-offsets": LateKind(Api.LIST_OFFSETS, comes_with="new-leader"),
}


@dataclass(frozen=True)
class LateArrival:
    """A late request and its fate.

    Attributes:
        request: its name.
        seconds: between its being caught and its delivery.
        code: of the broker's answer to an EndTxn or InitProducerId: 0 if it took effect; None if unknown.
        end: "answered", "delivered" without an answer, or "lost".
    """

    request: str
    seconds: float
    code: int | None
    end: str


class Net:
    """The same rule at several proxies, of which one request is wanted.

    Args:
        proxies: the proxies that the request may pass.
        make_rule: makes the rule at a proxy.
    """

    def __init__(self, proxies: list[FrameProxy], make_rule: Callable[[FrameProxy], Trap]) -> None:
        self._traps = [(proxy, make_rule(proxy)) for proxy in proxies]
        self.caught: Trap | None = None

    def wait(self, timeout: float) -> Trap | None:
        """Return the first request that was caught, and catch no more; None if none came in time."""

        def look() -> bool:
            self.caught = next((trap for _, trap in self._traps if trap.wait_until_held(0)), None)
            return self.caught is not None

        wait_until(look, timeout, _POLL_SECONDS)
        self.close()
        return self.caught

    def watched(self, timeout: float) -> bool:
        """Tell whether a request came along in time, for a rule that only watches."""
        return wait_until(lambda: any(trap.wait_until_delivered(0) for _, trap in self._traps), timeout, _POLL_SECONDS)

    def close(self) -> None:
        """Remove the rules, and drop other requests that they have caught. May be called again."""
        for proxy, trap in self._traps:
            proxy.forget(trap)
            if trap is not self.caught:
                trap.drop()


@contextmanager
def caught_in(net: Net) -> Iterator[Net]:
    """Close a net at the end of the context."""
    try:
        yield net
    finally:
        net.close()


def of_transactions(api: Api, transactional_id: str, *, commits: bool | None = None, nth: int = 1) -> Match:
    """Match requests about a transactional.id."""
    return Match(api, commits=commits, transactional_id=transactional_id, nth=nth)


def of_clients(api: Api, prefix: str, *, mentions: bytes = b"") -> Match:
    """Match requests with these bytes from clients whose names begin with the prefix."""

    def is_wanted(request: Request) -> bool:
        return (request.client_id or "").startswith(prefix) and mentions in request.frame

    return Match(api, where=is_wanted)


def deliver(trap: Trap, fault: Fault, proxies: list[FrameProxy], transactional_id: str | None) -> LateArrival:
    """Deliver a request at the moment that the fault has drawn.

    More often than not while a later transaction is open: once one of its next requests with records is under way.
    """
    caught_at = time.monotonic()
    if transactional_id is not None and fault.share < 0.7:
        later = of_transactions(Api.PRODUCE, transactional_id, nth=fault.count)
        with caught_in(Net(proxies, lambda proxy: proxy.watch(later))) as net:
            net.watched(_VICTIM_SECONDS)
        time.sleep(0.03 * fault.share)
    else:
        time.sleep(_LONGEST_DELAY_SECONDS * fault.share)
    seconds = time.monotonic() - caught_at
    trap.deliver()
    answered = trap.wait_until_answered(_ANSWER_SECONDS)
    end = "answered" if answered else "lost" if trap.is_lost else "delivered"
    assert trap.request is not None
    return LateArrival(trap.request.name, round(seconds, 3), trap.error_code, end)
