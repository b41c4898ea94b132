"""All methods beside each other: how much faster, and how much of what they process is data."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lightning_balance.console import format_value
from lightning_balance.what_if.comparison import Comparison
from lightning_balance.what_if.drawing.style import COLOURS, INK, MUTED, clear_axes

__all__ = ["draw_bars"]


def draw_bars(axes: Axes, comparison: Comparison) -> None:
    """Draw the speed-up over plain shuffle of every method, with its pad efficiency."""
    outcomes = comparison.outcomes
    places = range(len(outcomes))
    speed_ups = [outcome.speed_up for outcome in outcomes]
    bars = axes.barh(places, speed_ups, height=0.66, color=[COLOURS[outcome.method.kind] for outcome in outcomes])
    for bar, outcome in zip(bars, outcomes, strict=True):
        if outcome.method.lookahead > 1:
            bar.set(hatch="///", edgecolor="white", linewidth=0)
        label = axes.annotate(
            f"{outcome.speed_up:.2f} x",
            (outcome.speed_up, bar.get_y() + bar.get_height() / 2),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            weight="bold",
        )
        axes.annotate(
            f"pad eff. {format_value(outcome.summary.pad_efficiency, 'percent')}",
            (1, 0.5),
            xycoords=label,
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=MUTED,
            fontsize=9,
        )
    axes.set_yticks(places, [outcome.method.name for outcome in outcomes], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(speed_ups))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    axes.set_xlabel("samples in the same modelled time, plain shuffle = 1")
    axes.set_title("How much faster")
    clear_axes(axes, grid="x")
    axes.spines["left"].set_visible(False)
