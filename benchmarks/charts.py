"""The charts of docs/images, drawn from the benchmarks' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.stage import ROOT

IMAGES = ROOT / "docs" / "images"
Series = Mapping[str, Sequence[tuple[float, float]]]


def backlog(rates: Series, memory: Series, path: Path = IMAGES / "throughput-over-backlog.png") -> Path:
    """Draw throughput and memory while a backlog shrinks, by delivery mode: (millions of rows left, value)."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    _lines(above, rates)
    above.set_ylabel("records/s")
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _lines(below, memory)
    below.set_ylabel("resident memory, MiB")
    below.set_xlabel("million records left in the outbox")
    below.invert_xaxis()
    above.set_title("One harvester drains a backlog")
    return _save(figure, path)


def latency(percentiles: Mapping[str, Series], path: Path = IMAGES / "latency-over-rate.png") -> Path:
    """Draw latency over the rate of commits, a panel for each percentile, a line for each way: (records/s, ms)."""
    figure, panels = plt.subplots(1, len(percentiles), figsize=(10, 4), sharey=True)
    for panel, (name, series) in zip(panels, percentiles.items(), strict=True):
        _lines(panel, series, marker="o")
        panel.set_title(name)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("records/s")
    panels[0].set_ylabel("ms from commit to consumer")
    return _save(figure, path)


def pressure(panels: Mapping[str, Series], title: str, path: Path) -> Path:
    """Draw what happens over time, two panels in a row, with a line for each scenario: (minutes, value)."""
    figure, grid = plt.subplots(len(panels) // 2, 2, figsize=(11, 9), sharex=True)
    for panel, (name, series) in zip(grid.flat, panels.items(), strict=True):
        _lines(panel, series)
        panel.set_title(name)
        # A burst is hundreds of times what is usual; what is usual must be seen beside it.
        panel.set_yscale("symlog")
    for panel in grid[-1]:
        panel.set_xlabel("minutes")
    figure.suptitle(title)
    return _save(figure, path)


def _lines(panel: Axes, series: Series, marker: str = "") -> None:
    for name, points in series.items():
        panel.plot([x for x, _ in points], [y for _, y in points], label=name, marker=marker)
    panel.set_ylim(bottom=0) if not marker else None
    panel.grid(visible=True, alpha=0.3)
    panel.legend()


def _save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
