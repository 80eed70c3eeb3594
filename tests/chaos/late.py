"""Late requests: one is taken off its connection, the client repeats it on another, and the first copy arrives later.

What librdkafka sends twice without a word, and in which order brokers may see it, is told in
`devstack.frame_proxy`. Here is which requests of an outbox can be late, and when they are delivered.
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
        comes_with: what makes a harvester send it: "load", "bad-record" (which aborts a transaction) or "new-leader".
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
    """What became of a late request.

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
        proxies: where the request may come along.
        make_rule: makes the rule at a proxy.
    """

    def __init__(self, proxies: list[FrameProxy], make_rule: Callable[[FrameProxy], Trap]) -> None:
        self._traps = [(proxy, make_rule(proxy)) for proxy in proxies]
        self.caught: Trap | None = None

    def wait(self, timeout: float) -> Trap | None:
        """The first request that was caught; None if none was in time."""

        def look() -> bool:
            self.caught = next((trap for _, trap in self._traps if trap.wait_until_held(0)), None)
            return self.caught is not None

        wait_until(look, timeout, _POLL_SECONDS)
        return self.caught

    def watched(self, timeout: float) -> bool:
        """Whether a request came along in time, of a rule that only watches."""
        return wait_until(lambda: any(trap.wait_until_delivered(0) for _, trap in self._traps), timeout, _POLL_SECONDS)

    def close(self) -> None:
        """Take the rules away, and lose what else they have caught."""
        for proxy, trap in self._traps:
            proxy.forget(trap)
            if trap is not self.caught:
                trap.drop()


@contextmanager
def caught_in(net: Net) -> Iterator[Net]:
    """Close a net in the end, whatever happens."""
    try:
        yield net
    finally:
        net.close()


def of_transactions(api: Api, transactional_id: str, *, commits: bool | None = None, nth: int = 1) -> Match:
    """Requests about a transactional.id."""
    return Match(api, commits=commits, transactional_id=transactional_id, nth=nth)


def of_clients(api: Api, prefix: str, *, mentions: bytes = b"") -> Match:
    """Requests of clients whose names begin so, with these bytes in them."""

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
