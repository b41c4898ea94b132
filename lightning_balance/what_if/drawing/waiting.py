"""Who waits for whom: what each rank does, step after step, on one scale for plain shuffle and for rebalance."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from lightning_balance.console import format_value
from lightning_balance.what_if.drawing.style import ACCENT, COLOURS, INK, MUTED, clear_axes, thousands
from lightning_balance.what_if.timeline import Lane, Timeline

__all__ = ["draw_waiting"]

_BUSY = (COLOURS["rebalance"], "#56b4e9")
_WAITING = "#fdeee2"


def draw_waiting(plain: Axes, rebalance: Axes, timeline: Timeline) -> None:
    """Draw both lanes on axes that share their scale, with one legend."""
    end = max(timeline.plain.end, timeline.rebalance.end)
    for axes, name, lane in ((plain, "Plain shuffle", timeline.plain), (rebalance, "Rebalance", timeline.rebalance)):
        _draw_lane(axes, lane, timeline.ranks)
        axes.set_xlim(0, end)
        axes.set_title(f"{name}: ranks wait {format_value(lane.waiting_share, 'percent')} of the time")
        axes.set_xlabel(f"modelled time in the unit of the cost, {_which_steps(timeline)}")
    plain.set_ylabel("rank")
    if timeline.rebalance.end < 0.8 * end:
        _draw_saving(rebalance, timeline.rebalance.end, end)
    handles = [
        Patch(color=_BUSY[0], label="busy"),
        Patch(color=_BUSY[1], label="busy with the next micro-batch"),
        Patch(facecolor=_WAITING, edgecolor=ACCENT, hatch="////", linewidth=0, label="waits for the slowest rank"),
        Line2D([], [], color=INK, linewidth=1.6, label="an optimizer step ends"),
    ]
    plain.figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=1.6)


def _which_steps(timeline: Timeline) -> str:
    first, last = timeline.step_indices[0], timeline.step_indices[-1]
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    num_drawn = len(timeline.ranks)
    return steps if num_drawn == timeline.num_ranks else f"{steps}, {num_drawn} of {timeline.num_ranks:,} ranks"


def _draw_saving(axes: Axes, start: float, end: float) -> None:
    axes.annotate(
        "",
        (start, 0.5),
        xytext=(end, 0.5),
        xycoords=axes.get_xaxis_transform(),
        textcoords=axes.get_xaxis_transform(),
        arrowprops={"arrowstyle": "<->", "color": MUTED, "shrinkA": 4, "shrinkB": 4},
    )
    axes.annotate(
        f"the same samples, {format_value(end / start, 'factor')} faster",
        ((start + end) / 2, 0.5),
        xycoords=axes.get_xaxis_transform(),
        ha="center",
        va="center",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 5},
    )


def _draw_lane(axes: Axes, lane: Lane, ranks: NDArray[np.int64]) -> None:
    gap = 0.14 if len(ranks) <= 16 else 0.08 if len(ranks) <= 32 else 0.0
    rows = np.arange(len(ranks))
    starts, costs = lane.starts[:, ranks], lane.costs[:, ranks]
    ends = starts + costs
    next_starts = np.concatenate([lane.starts[1:, ranks], np.full((1, len(ranks)), lane.end)])
    for slot in range(len(costs)):
        _boxes(axes, rows, starts[slot], ends[slot], gap, color=_BUSY[slot % 2], linewidth=0)
        waits = next_starts[slot] - ends[slot] > 1e-9 * lane.end
        _boxes(
            axes, rows[waits], ends[slot][waits], next_starts[slot][waits], gap,
            facecolor=_WAITING, edgecolor=ACCENT, hatch="////", linewidth=0,
        )  # fmt: skip
    for time in lane.synchronisations:
        axes.axvline(time, color=INK, linewidth=1.6, clip_on=False)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    shown = rows if len(rows) <= 16 else rows[:: -(-len(rows) // 8)]
    axes.set_yticks(shown, [str(ranks[row]) for row in shown])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    clear_axes(axes, grid="x")


def _boxes(
    axes: Axes,
    rows: NDArray[np.int64],
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    gap: float,
    **style: Any,
) -> None:
    top, bottom = rows - 0.5 + gap / 2, rows + 0.5 - gap / 2
    corners = np.stack([starts, top, ends, top, ends, bottom, starts, bottom], axis=-1).reshape(-1, 4, 2)
    axes.add_collection(PolyCollection(list(corners), **style))
