"""Line plots in one style, as SVG text: few colours, labels at the lines, no clutter."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

COLOURS = ("#0b6e6e", "#d1602d", "#5b5ea6", "#8a8d91", "#b8962e", "#9b2335")


class Line(NamedTuple):
    """One line of a plot; `low` and `high` draw a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def lines(
    drawn: Sequence[Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    zero: bool = False,
    level: float | None = None,
    colours: Sequence[str] = COLOURS,
) -> str:
    """A line plot as SVG; `level` draws a thin horizontal line there."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'nestling[report]'") from error
    mpl.use("svg", force=False)
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}
    style["svg.hashsalt"] = "nestling"  # the same picture has the same ids, so the same text
    with mpl.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
        cycle = [colours[i % len(colours)] for i in range(len(drawn))]
        for colour, line in zip(cycle, drawn, strict=True):
            axes.plot(line.x, line.y, color=colour, linewidth=2, marker="o", markersize=3.5)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, lw=0)
        if level is not None:
            axes.axhline(level, color="#9aa5b8", linewidth=1, zorder=0)
        _dress(axes, x, y, log_x, zero)
        _label(axes, drawn, cycle)
        text = io.StringIO()
        no_trace = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_trace)
        pyplot.close(figure)
    return text.getvalue()


def _dress(axes: Any, x: str, y: str, log_x: bool, zero: bool) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa5b8")
    axes.grid(axis="y", color="#e3e7ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, color="#5c667a")
    axes.set_ylabel(y, color="#5c667a")
    axes.tick_params(colors="#5c667a")
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if zero:
        axes.set_ylim(bottom=0)


def _label(axes: Any, drawn: Sequence[Line], colours: Sequence[str]) -> None:
    """Names at the lines' ends, pushed apart so that they never overlap."""
    low, high = axes.get_ylim()
    gap = 0.07 * (high - low)
    ends = sorted((line.y[-1], i) for i, line in enumerate(drawn))
    heights: list[float] = []
    for end, _ in ends:
        heights.append(max(end, heights[-1] + gap) if heights else end)
    for height, (_, i) in zip(heights, ends, strict=True):
        axes.annotate(
            drawn[i].name,
            xy=(1.01, height),
            xycoords=axes.get_yaxis_transform(),
            color=colours[i],
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )
