"""What a token budget decides: padding, time and memory against the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from lightning_balance.what_if.comparison import Comparison, Outcome
from lightning_balance.what_if.drawing.style import COLOURS, clear_axes, thousands
from lightning_balance.what_if.methods import Kind

__all__ = ["SWEEP_PANELS", "draw_sweep"]

Value = Callable[[Outcome], float]

_LINES: dict[Kind, str] = {"rebalance": "--", "length_grouped": "-.", "plain_shuffle": ":"}

SWEEP_PANELS: Sequence[tuple[str, str, Value]] = (
    ("Padding against the budget", "pad efficiency (%)", lambda outcome: 100 * outcome.summary.pad_efficiency),
    ("Time against the budget", "speed-up (x)", lambda outcome: outcome.speed_up),
    (
        "Memory against the budget",
        "largest micro-batch (tokens)",
        lambda outcome: float(outcome.summary.largest_micro_batch),
    ),
)


def draw_sweep(panels: Sequence[Axes], comparison: Comparison) -> None:
    """Draw one panel per figure: budgets as points, methods without a budget as lines across; one legend for all."""
    for axes, (title, label, value) in zip(panels, SWEEP_PANELS, strict=True):
        _draw_panel(axes, comparison, value)
        axes.set_title(title)
        axes.set_ylabel(label)
    figure = panels[0].figure
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, handlelength=2.6)


def _draw_panel(axes: Axes, comparison: Comparison, value: Value) -> None:
    swept = [outcome for outcome in comparison.outcomes if _budget(outcome) and outcome.method.lookahead == 1]
    budgets = [_budget(outcome) for outcome in swept]
    axes.plot(budgets, [value(outcome) for outcome in swept], "o-", color=COLOURS["token_budget"], label="token budget")
    for marker, outcome in zip(
        "DsP^v", (out for out in comparison.outcomes if out.method.lookahead > 1 and _budget(out)), strict=False
    ):
        axes.plot(
            _budget(outcome), value(outcome), marker, color="white", markeredgecolor=COLOURS["token_budget"],
            markeredgewidth=1.6, label=f"token budget, lookahead {outcome.method.lookahead}",
        )  # fmt: skip
    for kind, style in _LINES.items():
        outcome = next(out for out in comparison.outcomes if out.method.kind == kind)
        axes.axhline(
            value(outcome), color=COLOURS[kind], linewidth=1.6, linestyle=style, label=outcome.method.name, zorder=1
        )
    axes.set_ylim(0, 1.1 * max(value(outcome) for outcome in comparison.outcomes))
    axes.set_xscale("log")
    axes.set_xlim(min(budgets) / 1.15, max(budgets) * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(_spaced(budgets)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    for label in axes.get_xticklabels():
        label.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set_xlabel("token budget (padded tokens per micro-batch)")
    clear_axes(axes, grid="y")


def _budget(outcome: Outcome) -> int:
    return outcome.method.max_tokens or 0


def _spaced(budgets: Sequence[int]) -> list[int]:
    """Return the budgets whose labels have room on a logarithmic axis: both ends, and what is far enough between."""
    room = np.log(budgets[-1] / budgets[0]) / 7
    chosen = [budgets[0]]
    for budget in budgets[1:-1]:
        if np.log(budget / chosen[-1]) > room < np.log(budgets[-1] / budget):
            chosen.append(budget)
    return sorted({*chosen, budgets[-1]})
