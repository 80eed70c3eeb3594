"""The network of one process: ways of its own to each broker and to the database, which can be faulty one by one.

    links = Links(cluster.proxied(3), TcpProxy(LOCALHOST, postgres.port))
    ...                                                     # a process that knows only `links.brokers.bootstrap`
    with faulty([links.brokers.of[2]], LinkFault.ANSWERS_LOST):
        ...                                                 # broker 2 hears it, and it does not hear broker 2

Lost bytes have been acknowledged by the proxy's kernel, as by a gateway whose way on is gone, so TCP's own time limits
end nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from devstack.broker import Proxy
from devstack.cluster import ProxyGroup
from devstack.proxy import Direction, TcpProxy


class LinkFault(StrEnum):
    """The ways in which a link fails. All but the first leave connections open."""

    REFUSE = "refuse"
    HOLE = "hole"
    REQUESTS_LOST = "requests-lost"
    ANSWERS_LOST = "answers-lost"
    SLOW = "slow"


@dataclass(frozen=True)
class Links:
    """The links of one process.

    Attributes:
        brokers: To each broker, by its number.
        database: To the database.
    """

    brokers: ProxyGroup
    database: TcpProxy


@contextmanager
def faulty(links: Sequence[Proxy], fault: LinkFault, *, drop: bool = False, delay: float = 0.5) -> Iterator[None]:
    """Let links fail within the context.

    Args:
        links: The links.
        fault: The fault.
        drop: Whether bytes that do not pass are lost with their connections, which break at the end; otherwise they
            arrive in the end.
        delay: Seconds by which a slow link delays each piece of a connection's bytes.
    """
    for link in links:
        _begin(link, fault, drop=drop, delay=delay)
    try:
        yield
    finally:
        for link in links:
            if drop:
                link.reset()  # a connection with a gap is of no use
            link.restore()
            link.resume()


def _begin(link: Proxy, fault: LinkFault, *, drop: bool, delay: float) -> None:
    match fault:
        case LinkFault.REFUSE:
            link.reset()
        case LinkFault.HOLE:
            link.cut(drop=drop)
        case LinkFault.REQUESTS_LOST:
            link.cut(drop=drop, only=Direction.REQUESTS)
        case LinkFault.ANSWERS_LOST:
            link.cut(drop=drop, only=Direction.ANSWERS)
        case LinkFault.SLOW:
            link.slow(delay)
        case _:
            assert_never(fault)
