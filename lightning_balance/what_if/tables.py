"""The comparison as cells, and the sentences that belong under them: for the terminal and for the page."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_balance.console import format_value
from lightning_balance.what_if.comparison import Comparison, Outcome

__all__ = [
    "Table",
    "describe_lengths",
    "describe_planned",
    "describe_run",
    "figures_table",
    "format_largest",
    "notes",
    "randomness_table",
]

_AT_LEAST = "≥ "


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts.

    Attributes:
        title: one line above it.
        columns: heads; a line break divides long ones.
        rows: cells, one per column.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]


def describe_lengths(comparison: Comparison, source: str) -> str:
    """Return how many samples there are and how long they are, in one line."""
    lengths = comparison.lengths
    return (
        f"{source}: {len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens, "
        f"mean {lengths.mean():,.1f}, median {np.median(lengths):,.0f}, {lengths.sum():,} in all"
    )


def describe_run(comparison: Comparison) -> str:
    """Return the run that is compared, in one line."""
    options = comparison.options
    waits = {"micro_batch": "ranks wait in every micro-batch", "step": "ranks wait once a step"}
    return (
        f"{options.num_ranks:,} ranks x {options.num_slots:,} accumulated x {options.batch_size:,} samples = "
        f"{options.samples_per_step:,} samples per optimizer step; {waits[options.sync]}"
    )


def describe_planned(comparison: Comparison) -> str:
    """Return how much of the epoch was planned, in one line."""
    if comparison.is_exact:
        return f"all of the epoch's optimizer steps ({comparison.num_steps:,}); times are modelled"
    part = f"{comparison.num_steps_planned:,} of the epoch's {comparison.num_steps:,} optimizer steps"
    return f"{part}, drawn at random; times are modelled"


def figures_table(comparison: Comparison) -> Table:
    """Return the main table: one row per method."""
    columns = [
        "method",
        "pad\nefficiency",
        "cost\nspread",
        "step\ntime",
        "speed-\nup",
        "largest\nmicro-batch",
        "steps",
        "micro-\nbatches",
        "shapes",
    ]
    rows = [_figures(outcome) for outcome in comparison.outcomes]
    return Table(title=describe_run(comparison), columns=columns, rows=rows)


def randomness_table(comparison: Comparison) -> Table | None:
    """Return what the methods that change which samples form a step do to it; ``None`` where there is none."""
    columns = [
        "method",
        "samples\nper step",
        "samples that\nchange step",
        "mean distance\nmoved",
        "correlation of\nlengths in a step",
    ]
    changing = [outcome for outcome in comparison.outcomes if outcome.summary.moved_share > 0]
    if not changing:
        return None
    rows = [_randomness(outcome) for outcome in [comparison.outcomes[0], *changing]]
    title = "Methods that change which samples form a step; all others keep the plain shuffle's"
    return Table(title=title, columns=columns, rows=rows)


def notes(comparison: Comparison) -> list[str]:
    """Return the sentences that a reader of the figures has to know."""
    cost = comparison.options.cost
    found = [
        f"Step time is modelled, not measured: {cost.intercept:g} + n * L + {cost.alpha:g} * n * L**2 for n samples "
        "padded to L tokens, the slowest rank counts; give --intercept and --alpha of your machine.",
        "Largest micro-batch: padded tokens. Micro-batches: per rank and step. Shapes: pairs of sample count and "
        "padded length. Speed-up: samples in the same modelled time.",
        "Length-grouped: the order of transformers' LengthGroupedSampler, dealt to ranks as its Trainer does.",
    ]
    if not comparison.options.shuffle:
        found.append("The loader has shuffle=False: all but length-grouped batches keep the order of the dataset.")
    if comparison.options.drop_last:
        found.append("The loader has drop_last=True: a last step, or plain micro-batch, that is not full is left out.")
    over = [
        f"{count:,} samples exceed the budget of {budget:,}"
        for budget in sorted({out.method.max_tokens for out in comparison.outcomes if out.method.max_tokens})
        if (count := int((comparison.lengths > budget).sum()))
    ]
    if over:
        found.append(f"{'; '.join(over)}: each of them is a micro-batch of its own.")
    if not comparison.is_exact:
        found.append(_sampling_note(comparison))
    return found


def _sampling_note(comparison: Comparison) -> str:
    errors = [out.speed_up_error for out in comparison.outcomes if not out.is_exact]
    how_sure = "" if any(map(math.isnan, errors)) else f" (standard error of the speed-ups: at most {max(errors):.1%})"
    return (
        f"Planned methods: {comparison.num_steps_planned:,} of {comparison.num_steps:,} steps, drawn at random with "
        f"the seed, the same for all{how_sure}; {_AT_LEAST.strip()}: the largest of these steps. "
        f"--steps {comparison.num_steps_planned} gives these figures again, --steps all plans every step."
    )


def _figures(outcome: Outcome) -> list[str]:
    summary = outcome.summary
    at_least = "" if outcome.is_exact else _AT_LEAST
    return [
        outcome.method.name,
        format_value(summary.pad_efficiency, "percent"),
        format_value(summary.cost_spread, "percent"),
        format_value(outcome.step_time, "cost"),
        format_value(outcome.speed_up, "factor"),
        format_largest(outcome),
        format_value(outcome.num_steps, "count"),
        f"{outcome.micro_batches_per_step:.2f}".removesuffix(".00"),
        at_least + format_value(summary.num_shapes, "count"),
    ]


def format_largest(outcome: Outcome) -> str:
    """Return the padded tokens of the largest micro-batch; among steps that were not planned may be a larger one."""
    largest, budget = outcome.summary.largest_micro_batch, outcome.method.max_tokens
    is_lower_bound = not outcome.is_exact and largest != budget
    return (_AT_LEAST if is_lower_bound else "") + format_value(largest, "count")


def _randomness(outcome: Outcome) -> list[str]:
    summary = outcome.summary
    fewest, most = summary.fewest_samples_per_step, summary.most_samples_per_step
    return [
        outcome.method.name,
        f"{fewest:,}" if fewest == most else f"{fewest:,} - {most:,}",
        format_value(summary.moved_share, "percent"),
        format_value(summary.mean_step_distance, "steps"),
        format_value(summary.length_correlation, "correlation"),
    ]
