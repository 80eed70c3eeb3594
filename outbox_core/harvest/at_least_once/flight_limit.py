"""A limit of the records in flight, once Kafka has been slow: as many as it acknowledges in time.

A producer gives up a record after its delivery timeout, even if it has only waited behind others. On a slow link, under
a client quota or with a busy broker a full window would so end in failures, and what arrived all the same be repeated.
So what is in flight is limited by its bytes, with a KiB more for each record. There is no limit at first. It

- falls in proportion when acknowledgements take more than a third of the timeout, and again after as long;
- falls to a quarter when records time out and none has arrived for as long;
- grows by what is acknowledged in half of that third, if records waited for it, but doubles in four seconds at most: a
  quota lets the next burst pass before it holds up all.

A partition that is away does not lower it, nor do the few records that are late when it is back; and what later
records have overtaken takes no room. The limit belongs to the harvest thread, and outlives leaderships.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outbox_core.stores.interface import NO_LIMIT

_log = logging.getLogger(__name__)

_LEAST_BYTES = 2**18  # so few do not wait for each other
_BYTES_OF_A_RECORD = 2**10  # besides its own: a small one costs time, too
_DOUBLE_SECONDS, _DOUBLINGS = 4.0, 20
_LOG_AGAIN_SECONDS = 60.0


class FlightLimit:
    """The limit; durations are in seconds. `is_reached` is for its user to set when records wait for room."""

    def __init__(self) -> None:
        self.is_reached = False
        self._bytes = self._slow_bytes = NO_LIMIT
        self._record_bytes = _BYTES_OF_A_RECORD
        self._slow_at = self._lowered_at = self._arrived_at = self._logged_at = float("-inf")

    def room(self, queued: int, mean_bytes: int) -> int:
        """Return the number of records of such a size that may be sent beside those that wait in the producer."""
        self._record_bytes = _BYTES_OF_A_RECORD + mean_bytes
        return max(0, max(1, self._bytes // self._record_bytes) - queued)

    def acknowledged(self, sent: Sequence[tuple[float, int]], time: float, queued: int, timeout: float) -> None:
        """Take in how many records of each time of sending have arrived by now; `queued` more have not."""
        self._arrived_at = time
        number, longest = sum(n for _, n in sent), timeout / 3
        size = (queued + number) * self._record_bytes
        latency = min(timeout, sum((time - at) * n for at, n in sent) / number) if size > _LEAST_BYTES else 0.0
        if latency > longest and time - self._lowered_at >= longest:
            self._lower(min(self._bytes, size) * longest / latency, time)
            if time - self._logged_at >= _LOG_AGAIN_SECONDS:
                self._logged_at = time
                most = self._bytes // 2**10
                _log.info("Kafka acknowledges after %.1f s: %d KiB are in flight at most for now", latency, most)
        elif latency > longest / 2:
            self._slow_at, self._slow_bytes = time, self._bytes
        elif self.is_reached:
            doublings = min(_DOUBLINGS, (time - self._slow_at) / _DOUBLE_SECONDS)
            self._bytes = min(self._bytes + number * self._record_bytes, int(self._slow_bytes * 2**doublings))
            self.is_reached = False

    def timed_out(self, number: int, time: float, timeout: float) -> None:
        """Take in that records have timed out, of so many that were in flight."""
        size = number * self._record_bytes
        if size > _LEAST_BYTES and self._lowered_at <= self._arrived_at < time - timeout:  # once, until one arrives
            self._lower(min(self._bytes, size) / 4, time)

    def _lower(self, size: float, time: float) -> None:
        self._bytes = self._slow_bytes = max(_LEAST_BYTES, int(size))
        self._slow_at = self._lowered_at = time
