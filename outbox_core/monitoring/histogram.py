"""Histograms that count many equal observations in one call, and quantiles of their counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds, of everything that one statement or one send takes."""

DELIVERY_BUCKETS = (*LATENCY_BUCKETS, 60.0, 300.0, 1800.0, 7200.0)
"""Upper bounds in seconds, of the whole way of a record, which may wait for hours."""

BATCH_BUCKETS = (1, 10, 50, 100, 500, 1000, 2000, 5000, 10_000, 20_000)
"""Upper bounds of numbers of records."""


class WeightedHistogram:
    """Counts of observations by upper bound; one call observes any number of equal values."""

    def __init__(self, bounds: Iterable[float] = LATENCY_BUCKETS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value`: O(log of the number of buckets)."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def merge(self, other: WeightedHistogram) -> None:
        """Add the observations of a histogram with the same bounds."""
        self._counts = [mine + more for mine, more in zip(self._counts, other.counts, strict=True)]
        self._sum += other._sum

    @property
    def counts(self) -> tuple[int, ...]:
        """The observations of each bucket; the last one has no upper bound."""
        return tuple(self._counts)

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Write the counts into a family, cumulated as Prometheus wants them."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return a quantile of a histogram's counts, interpolated within its bucket; None without observations.

    A quantile in the last bucket, which has no upper bound, is the highest bound.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    seen = 0
    for position, count in enumerate(counts[:-1]):
        if seen + count >= wanted:
            lower = bounds[position - 1] if position else 0.0
            return lower + (bounds[position] - lower) * (wanted - seen) / count
        seen += count
    return bounds[-1]
