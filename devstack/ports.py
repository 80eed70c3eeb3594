"""Free TCP ports on 127.0.0.1.

Ports are drawn below the kernel's ephemeral range. A service that restarts wants its port back, and while it is down a
port of the ephemeral range can be taken by any outgoing connection; worse, a client that keeps trying to reach such a
port may connect to itself.
"""

import random
import socket

from devstack.errors import DevstackError

LOCALHOST = "127.0.0.1"
_RANGE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports."""
    found: list[int] = []
    candidates = random.SystemRandom().sample(_RANGE, k=2_000)
    for port in candidates:
        if len(found) == count:
            return found
        if is_free(port):
            found.append(port)
    raise DevstackError(f"found no {count} free TCP ports between {_RANGE.start} and {_RANGE.stop}")


def free_port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


def is_free(port: int) -> bool:
    """Tell whether that port of 127.0.0.1 has no listener."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError:
            return False
    return True
