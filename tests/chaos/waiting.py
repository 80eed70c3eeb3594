"""The observer: every second it looks for the oldest row that waits although consumers could have it.

A row waits while it is in the table and no reader of committed records has seen it; a row that is published, and whose
purge hangs, does not. Its wait counts from the beginning of its transaction, on the database's clock.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import psycopg

from devstack.processes import wait_until

LONGEST_SECONDS = 45.0
"""The promise: no row waits for longer while at most one harvester is ill."""
_LOOK_SECONDS = 1.0
_CAUGHT_UP_SECONDS = 5.0
_PAGE = 1000


class Wait(NamedTuple):
    """A look at an outbox.

    Attributes:
        at: its time, in seconds since the epoch.
        row: id of the oldest row that waits; None if none does.
        seconds: for which that one has waited.
    """

    at: float
    row: int | None
    seconds: float


class Waiting:
    """An observer of some outboxes on a thread of its own, from `start` to `stop`.

    Args:
        dsn: the database, undisturbed.
        outboxes: their tables.
        on_long_wait: called with the outbox and a wait that is too long, once until it has caught up.
    """

    def __init__(self, dsn: str, outboxes: Iterable[str], on_long_wait: Callable[[str, Wait], None]) -> None:
        self.failure: BaseException | None = None
        self._dsn = dsn
        self._on_long_wait = on_long_wait
        self._looks: dict[str, list[Wait]] = {outbox: [] for outbox in outboxes}
        self._seen: dict[str, set[int]] = {outbox: set() for outbox in self._looks}  # by the reader's thread
        self._is_late = dict.fromkeys(self._looks, False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-waiting", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking.

        Raises:
            Exception: the one that ended it before.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def see(self, outbox: str, row: int) -> None:
        """Note a row that consumers have seen."""
        self._seen[outbox].add(row)

    def longest(self, outbox: str, since: float) -> Wait:
        """Return the longest wait that was seen from a time on, in seconds since the epoch."""
        looks = [look for look in self._looks[outbox] if look.at >= since]
        return max(looks, key=lambda look: look.seconds, default=Wait(since, None, 0.0))

    def catch_up(self, outbox: str, timeout: float) -> bool:
        """Wait until nothing waits for more than some seconds; False after the timeout."""
        asked_at = time.time()

        def has_caught_up() -> bool:
            looks = self._looks[outbox]
            return bool(looks) and looks[-1].at > asked_at and looks[-1].seconds < _CAUGHT_UP_SECONDS

        return wait_until(has_caught_up, timeout, _LOOK_SECONDS / 2)

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                while not self._stopping.wait(_LOOK_SECONDS):
                    for outbox in self._looks:
                        self._look(connection, outbox)
        except BaseException as error:
            self.failure = error

    def _look(self, connection: psycopg.Connection[Any], outbox: str) -> None:
        look = Wait(time.time(), *self._oldest(connection, outbox))
        self._looks[outbox].append(look)
        if look.seconds > LONGEST_SECONDS and not self._is_late[outbox]:
            self._is_late[outbox] = True
            self._on_long_wait(outbox, look)
        elif look.seconds < _CAUGHT_UP_SECONDS:
            self._is_late[outbox] = False

    def _oldest(self, connection: psycopg.Connection[Any], outbox: str) -> tuple[int | None, float]:
        query = (
            f"SELECT id, extract(epoch FROM clock_timestamp() - create_time)::float FROM {outbox} "
            "WHERE id > %s ORDER BY id LIMIT %s"
        )
        last, seen = 0, self._seen[outbox]
        while rows := connection.execute(query, [last, _PAGE]).fetchall():
            for row, seconds in rows:
                if row not in seen:
                    return row, seconds
            last = rows[-1][0]
        return None, 0.0
