"""All drawings on one picture."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_balance.what_if import tables
from lightning_balance.what_if.comparison import Comparison
from lightning_balance.what_if.drawing.bars import draw_bars
from lightning_balance.what_if.drawing.lengths import draw_lengths
from lightning_balance.what_if.drawing.style import MUTED, RC
from lightning_balance.what_if.drawing.sweep import draw_sweep
from lightning_balance.what_if.drawing.waiting import draw_waiting
from lightning_balance.what_if.timeline import timeline_of

__all__ = ["as_png"]

_DPI = 110


def as_png(comparison: Comparison, source: str) -> bytes:
    """Return a PNG of all drawings, with the run in its title.

    Args:
        comparison: the comparison.
        source: where the lengths come from, in the user's words.
    """
    with mpl.rc_context(RC):
        figure = Figure(figsize=(14, 15.2), layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.14, wspace=0.05))
        head, top, middle, bottom = figure.subfigures(4, 1, squeeze=False, height_ratios=(1.3, 4.6, 5.2, 4.1))[:, 0]
        head.text(0.01, 0.82, "What balancing would do", fontsize=20, weight="bold", va="center")
        head.text(0.01, 0.26, _title(comparison, source), fontsize=11, color=MUTED, va="center", linespacing=1.6)
        draw_bars_and_lengths = top.subplots(1, 2, width_ratios=(1, 1.1))
        draw_lengths(draw_bars_and_lengths[0], comparison)
        draw_bars(draw_bars_and_lengths[1], comparison)
        plain, rebalance = middle.subplots(1, 2, sharey=True)
        draw_waiting(plain, rebalance, timeline_of(comparison))
        draw_sweep(bottom.subplots(1, 3), comparison)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": "lightning-balance"})
    return file.getvalue()


def _title(comparison: Comparison, source: str) -> str:
    lines = [tables.describe_lengths(comparison, source), tables.describe_run(comparison)]
    return "\n".join([*lines, tables.describe_planned(comparison)])
