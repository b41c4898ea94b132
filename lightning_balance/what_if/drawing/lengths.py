"""The histogram of lengths: samples, and the tokens that they bring."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lightning_balance.what_if.comparison import Comparison
from lightning_balance.what_if.drawing.style import ACCENT, COLOURS, INK, MUTED, clear_axes, thousands
from lightning_balance.what_if.histogram import histogram_of

__all__ = ["draw_lengths"]


def draw_lengths(axes: Axes, comparison: Comparison) -> None:
    """Draw the share of samples and the share of tokens by length."""
    histogram, lengths = histogram_of(comparison.lengths), comparison.lengths
    widths = np.diff(np.log(histogram.edges) if histogram.is_logarithmic else histogram.edges)
    widths /= np.median(widths)  # between few whole numbers the bars of a logarithmic axis cannot be equally wide
    samples = 100 * histogram.num_samples / histogram.num_samples.sum() / widths
    tokens = 100 * histogram.num_tokens / histogram.num_tokens.sum() / widths
    axes.stairs(samples, histogram.edges, fill=True, color=COLOURS["rebalance"], alpha=0.75, label="samples")
    axes.stairs(tokens, histogram.edges, color=ACCENT, linewidth=1.6, label="tokens they bring")
    axes.set_ylim(0, 1.28 * max(samples.max(), tokens.max()))
    if histogram.is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value) if value >= 1 else ""))
    axes.set_xlim(histogram.edges[0], histogram.edges[-1])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("share of all (%)")
    if lengths.min() < lengths.max():
        _mark(axes, float(lengths.mean()), f"mean {thousands(round(float(lengths.mean())))}")
    _mark(axes, float(lengths.max()), f"longest {thousands(int(lengths.max()))}")
    axes.legend(loc="upper left", ncols=2, borderaxespad=0.1, handlelength=1.4, columnspacing=1.4)
    axes.set_title("How long the samples are")
    clear_axes(axes, grid="y")


def _mark(axes: Axes, value: float, text: str) -> None:
    axes.axvline(value, ymax=0.84, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    is_right = axes.transAxes.inverted().transform(axes.transData.transform((value, 0)))[0] > 0.5
    axes.annotate(
        text,
        (value, 0.84),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-4 if is_right else 4, -2),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="top",
        fontsize=9,
        color=MUTED,
    )
