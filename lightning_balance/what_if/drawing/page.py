"""A page with tables and drawings in one file: no script, no network, nothing to install for its reader."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from importlib import resources
from string import Template

import matplotlib as mpl
from matplotlib.figure import Figure

import lightning_balance
from lightning_balance.console import format_value
from lightning_balance.what_if import tables
from lightning_balance.what_if.comparison import Comparison, Outcome
from lightning_balance.what_if.drawing.bars import draw_bars
from lightning_balance.what_if.drawing.lengths import draw_lengths
from lightning_balance.what_if.drawing.style import COLOURS, RC
from lightning_balance.what_if.drawing.sweep import draw_sweep
from lightning_balance.what_if.drawing.waiting import draw_waiting
from lightning_balance.what_if.methods import Method
from lightning_balance.what_if.timeline import timeline_of

__all__ = ["as_page"]


def as_page(comparison: Comparison, source: str) -> str:
    """Return the page as HTML.

    Args:
        comparison: the comparison.
        source: where the lengths come from, in the user's words.
    """
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    randomness = tables.randomness_table(comparison)
    return template.substitute(
        source=html.escape(source),
        lengths=html.escape(tables.describe_lengths(comparison, source)),
        run=html.escape(tables.describe_run(comparison)),
        planned=html.escape(tables.describe_planned(comparison)),
        cards=_cards(comparison),
        figures=_table(tables.figures_table(comparison), comparison),
        randomness=""
        if randomness is None
        else f"<h2>{html.escape(randomness.title)}</h2>" + _table(randomness, comparison),
        notes="\n".join(f"<li>{html.escape(note)}</li>" for note in tables.notes(comparison)),
        drawing_of_lengths=_svg(
            (6.6, 4.2), lambda figure: draw_lengths(figure.subplots(), comparison), "Histogram of lengths"
        ),
        drawing_of_speed=_svg(
            (6.6, 4.2), lambda figure: draw_bars(figure.subplots(), comparison), "Speed-up of each method"
        ),
        drawing_of_waiting=_svg(
            (13.2, 5.2), lambda figure: _draw_waiting(figure, comparison), "Ranks that work and wait"
        ),
        drawing_of_budgets=_svg(
            (13.2, 4.2), lambda figure: draw_sweep(figure.subplots(1, 3), comparison), "Token budgets"
        ),
        version=lightning_balance.__version__,
    )


def _draw_waiting(figure: Figure, comparison: Comparison) -> None:
    plain, rebalance = figure.subplots(1, 2, sharey=True)
    draw_waiting(plain, rebalance, timeline_of(comparison))


def _svg(size: tuple[float, float], draw: Callable[[Figure], None], title: str) -> str:
    """Return a drawing as an element of a page: without prologue, metadata and name spaces, which hold addresses."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    head = rf'<svg viewBox="\1" role="img" aria-label="{title}">'
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', head, text, count=1)


def _cards(comparison: Comparison) -> str:
    plain, rebalance = (_outcome(comparison, Method(kind=kind)) for kind in ("plain_shuffle", "rebalance"))
    before, after = plain.summary, rebalance.summary
    cards = [
        (
            "faster than plain shuffle",
            format_value(rebalance.speed_up, "factor"),
            "with rebalance: the same samples per step",
        ),
        ("pad efficiency", *_change(before.pad_efficiency, after.pad_efficiency, "percent")),
        ("cost spread of ranks", *_change(before.cost_spread, after.cost_spread, "percent")),
        (
            "largest micro-batch, padded tokens",
            tables.format_largest(rebalance),
            f"plain shuffle: {format_value(before.largest_micro_batch, 'count')}",
        ),
    ]
    return "\n".join(
        f'<div class="card"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="before">{before_}</div></div>'
        for name, value, before_ in cards
    )


def _change(before: float, after: float, unit: str) -> tuple[str, str]:
    return format_value(after, unit), f"plain shuffle: {format_value(before, unit)}"


def _outcome(comparison: Comparison, method: Method) -> Outcome:
    return next(outcome for outcome in comparison.outcomes if outcome.method == method)


def _table(table: tables.Table, comparison: Comparison) -> str:
    colours = {outcome.method.name: COLOURS[outcome.method.kind] for outcome in comparison.outcomes}
    head = "".join(f"<th>{html.escape(column).replace(chr(10), '<br>')}</th>" for column in table.columns)
    body = "\n".join(
        f'<tr><th scope="row"><span class="dot" style="background:{colours[name]}"></span>{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
