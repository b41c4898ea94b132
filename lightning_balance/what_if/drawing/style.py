"""Colours and type of all drawings: the Okabe-Ito palette, which colour-blind readers can tell apart."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from lightning_balance.what_if.methods import Kind

__all__ = ["ACCENT", "COLOURS", "GRID", "INK", "MUTED", "PALE", "RC", "clear_axes", "thousands"]

INK, MUTED, GRID, PALE = "#1f2933", "#5f6b7a", "#e4e7eb", "#cbd2d9"
ACCENT = "#d55e00"
COLOURS: dict[Kind, str] = {
    "plain_shuffle": "#7b8794",
    "length_grouped": "#cc79a7",
    "rebalance": "#0072b2",
    "token_budget": "#009e73",
}

RC: Any = {  # matplotlib types its settings by their names, others in every release
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": PALE,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # texts stay texts: searchable, and sharp at any size
    "svg.hashsalt": "lightning-balance",  # the same drawing gives the same file
}


_MILLION = 1_000_000


def thousands(value: float, _: object = None) -> str:
    """Return a number as axes show it.

    >>> thousands(8192.0), thousands(2.5), thousands(4e6)
    ('8,192', '2.5', '4 M')
    """
    if value >= _MILLION and value % (_MILLION / 10) == 0:
        return f"{value / _MILLION:,.3g} M"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def clear_axes(axes: Axes, *, grid: str) -> None:
    """Keep only the grid lines of one axis, ``"x"`` or ``"y"``."""
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x" if grid == "x" else "y")
