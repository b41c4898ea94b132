"""What a plan is expected to achieve, beside plain shuffled batches of the same run; nothing is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction, prepare_cost
from lightning_balance.efficiency import (
    cost_spread,
    length_correlation,
    mean_step_distance,
    model_efficiency,
    moved_share,
    pad_efficiency,
    slot_efficiency,
)
from lightning_balance.epoch import EpochPlan
from lightning_balance.micro_batches import MicroBatches, micro_batches_of
from lightning_balance.shuffle import EpochOrder
from lightning_balance.unbalanced import plain_batches
from lightning_balance.validation import LONGEST_ALLOWED, check_choice, check_positive_int, validate_lengths

__all__ = [
    "PlanSummary",
    "Row",
    "comparison_rows",
    "modelled_speed_up",
    "summarize",
    "summarize_micro_batches",
    "summarize_plain",
]

Unit = Literal["percent", "factor", "cost", "tokens", "count", "steps", "correlation"]


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """Figures of one epoch over all ranks.

    Attributes:
        num_ranks: ranks.
        num_steps: optimizer steps.
        num_micro_batches: micro-batches of each rank.
        num_samples: samples served, copies not counted.
        num_fillers: micro-batches of all ranks that only keep ranks in step.
        num_shapes: distinct pairs of sample count and padded length, what a compiler would see.
        num_padded_lengths: distinct padded lengths.
        real_tokens: tokens of the samples.
        padded_tokens: tokens that are processed, with padding and copies.
        largest_micro_batch: padded tokens of the largest micro-batch, which sets the peak memory.
        modelled_time: slowest path over the epoch, in the unit of the cost.
        pad_efficiency: real over padded tokens.
        cost_spread: (max - min) / mean of the ranks' costs in a synchronisation, averaged.
        slot_efficiency: mean / max of the ranks' costs in a synchronisation, averaged.
        model_efficiency: cost of the samples without padding or waiting, over what all ranks are paid for.
        fewest_samples_per_step: samples of the step that has the fewest, which may be a last one that is not full.
        most_samples_per_step: samples of the step that has the most.
        moved_share: share of the samples that left the step of the plain shuffle; above 0 only with ``lookahead > 1``.
        mean_step_distance: how many steps samples moved, averaged over all of them.
        length_correlation: of two samples of the same step, 0 for random steps; ``nan`` where it is not defined.
    """

    num_ranks: int
    num_steps: int
    num_micro_batches: int
    num_samples: int
    num_fillers: int
    num_shapes: int
    num_padded_lengths: int
    real_tokens: int
    padded_tokens: int
    largest_micro_batch: int
    modelled_time: float
    pad_efficiency: float
    cost_spread: float
    slot_efficiency: float
    model_efficiency: float
    fewest_samples_per_step: int
    most_samples_per_step: int
    moved_share: float
    mean_step_distance: float
    length_correlation: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of a comparison; ``nan`` where a side has no such figure."""

    label: str
    unit: Unit
    planned: float
    plain: float = math.nan


def summarize(
    plan: EpochPlan,
    lengths: Any,
    *,
    cost: CostFunction | None = None,
    sync: Literal["micro_batch", "step"] = "micro_batch",
) -> PlanSummary:
    """Summarise a planned epoch; plans every step of it.

    How far samples moved is counted from the slices that steps of the same sizes would cut from the plain shuffle.

    Args:
        plan: the epoch.
        lengths: length of every sample of the dataset in tokens, as given to the plan.
        cost: the plan's cost, ``None`` for ``CostModel()``; only what the samples cost by themselves is computed with
            it, costs of micro-batches are the plan's.
        sync: when ranks wait for each other, as given to the plan. A synchronisation is a slot for ``"micro_batch"``
            and a step for ``"step"``.

    Raises:
        ValueError: lengths that cannot be, or an unknown `sync`.

    Example:
        >>> from lightning_balance.epoch import plan_epoch
        >>> lengths = [3, 5, 9, 2, 4, 8, 1, 7]
        >>> summarize(plan_epoch(lengths, samples_per_step=8, num_ranks=2, num_slots=2), lengths).num_samples
        8
    """
    check_choice("sync", sync, ("micro_batch", "step"))
    lengths = validate_lengths(lengths)
    steps = [plan.step(index) for index in plan.steps]
    sizes = np.array([len(step.order) for step in steps])
    epoch = micro_batches_of(
        plan, lengths, steps, step_indices=np.arange(len(steps)), first_places=np.cumsum(sizes) - sizes
    )
    return summarize_micro_batches(epoch, cost=cost, sync=sync)


def summarize_plain(
    lengths: Any,
    *,
    batch_size: int,
    num_ranks: int,
    num_slots: int = 1,
    cost: CostFunction | None = None,
    sync: Literal["micro_batch", "step"] = "micro_batch",
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    pad_to_multiple_of: int = 1,
) -> PlanSummary:
    """Summarise the same epoch without balancing: a DataLoader with a DistributedSampler.

    The order is the one that the plan shuffles to. Rank r takes every ``num_ranks``-th sample and cuts its own in
    micro-batches of `batch_size`, each padded to its longest sample. Where the samples do not divide by the ranks the
    first ones are repeated, as DistributedSampler does; copies count as padding.

    Args:
        lengths: length of every sample in tokens.
        batch_size: samples of a micro-batch.
        num_ranks: ranks.
        num_slots: micro-batches that are accumulated in a step.
        cost: modelled cost of a micro-batch, ``None`` for ``CostModel()``.
        sync: when ranks wait for each other.
        seed: seed of the shuffle.
        epoch: number of the epoch.
        shuffle: ``False`` for the dataset's own order.
        drop_last: leave out micro-batches with fewer samples.
        pad_to_multiple_of: padded lengths are rounded up to it.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is below 1, lengths that cannot be, or `drop_last` leaves nothing.

    Example:
        >>> plain = summarize_plain([3, 5, 9, 2], batch_size=2, num_ranks=1, shuffle=False)
        >>> plain.padded_tokens, plain.num_steps
        (28, 2)
    """
    check_choice("sync", sync, ("micro_batch", "step"))
    lengths = validate_lengths(lengths)
    batch_size = check_positive_int("batch_size", batch_size)
    num_ranks = check_positive_int("num_ranks", num_ranks)
    num_slots = check_positive_int("num_slots", num_slots)
    multiple = check_positive_int("pad_to_multiple_of", pad_to_multiple_of, largest=LONGEST_ALLOWED)
    plain = plain_batches(
        lengths,
        EpochOrder(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle),
        batch_size=batch_size,
        num_ranks=num_ranks,
        num_slots=num_slots,
        cost=cost,
        pad_to_multiple_of=multiple,
        drop_last=drop_last,
    )
    return summarize_micro_batches(plain, cost=cost, sync=sync)


def summarize_micro_batches(
    epoch: MicroBatches,
    *,
    cost: CostFunction | None = None,
    sync: Literal["micro_batch", "step"] = "micro_batch",
) -> PlanSummary:
    """Summarise micro-batches of an epoch or of some of its steps.

    Args:
        epoch: the micro-batches, with their costs.
        cost: the cost they were made with, ``None`` for ``CostModel()``; only what the samples cost by themselves is
            computed with it.
        sync: when ranks wait for each other.
    """
    padded_tokens = epoch.padded_tokens
    synchronised = epoch.synchronised_costs(sync)
    time = float(epoch.step_times(sync).sum())
    samples_per_step = epoch.samples_per_step
    steps = np.repeat(epoch.step_indices, samples_per_step)
    shapes = epoch.num_run * (int(epoch.padded_lengths.max()) + 1) + epoch.padded_lengths
    return PlanSummary(
        num_ranks=epoch.num_ranks,
        num_steps=epoch.num_steps,
        num_micro_batches=len(epoch.costs),
        num_samples=int(epoch.counts.sum()),
        num_fillers=int((epoch.counts == 0).sum()),
        num_shapes=len(np.unique(shapes)),
        num_padded_lengths=len(np.unique(epoch.padded_lengths)),
        real_tokens=int(epoch.real_tokens.sum()),
        padded_tokens=int(padded_tokens.sum()),
        largest_micro_batch=int(padded_tokens.max()),
        modelled_time=time,
        pad_efficiency=pad_efficiency(epoch.real_tokens, padded_tokens),
        cost_spread=cost_spread(synchronised),
        slot_efficiency=slot_efficiency(synchronised),
        model_efficiency=model_efficiency(_useful_cost(epoch.lengths, cost), time, epoch.num_ranks),
        fewest_samples_per_step=int(samples_per_step.min()),
        most_samples_per_step=int(samples_per_step.max()),
        moved_share=0.0 if epoch.plain_steps is None else moved_share(steps, epoch.plain_steps),
        mean_step_distance=0.0 if epoch.plain_steps is None else mean_step_distance(steps, epoch.plain_steps),
        length_correlation=length_correlation(epoch.lengths, steps),
    )


def modelled_speed_up(planned: PlanSummary, plain: PlanSummary) -> float:
    """How many times more samples the plan serves in the same modelled time.

    Example:
        >>> plain = summarize_plain([3, 5, 9, 2], batch_size=2, num_ranks=1)
        >>> modelled_speed_up(plain, plain)
        1.0
    """
    return (planned.num_samples / planned.modelled_time) / (plain.num_samples / plain.modelled_time)


def comparison_rows(planned: PlanSummary, plain: PlanSummary, *, with_randomness: bool = True) -> list[Row]:
    """Return the figures of a plan beside those of plain batches, in the order of a table.

    Args:
        planned: figures of the plan.
        plain: figures of plain batches.
        with_randomness: end with how random steps are, which tells something where ``lookahead`` is above 1.

    Example:
        >>> plain = summarize_plain([3, 5, 9, 2], batch_size=2, num_ranks=1)
        >>> comparison_rows(plain, plain)[0].label
        'pad efficiency'
    """
    figures: list[tuple[str, Unit, str]] = [
        ("pad efficiency", "percent", "pad_efficiency"),
        ("cost spread", "percent", "cost_spread"),
        ("slot efficiency", "percent", "slot_efficiency"),
        ("model efficiency", "percent", "model_efficiency"),
        ("modelled time", "cost", "modelled_time"),
        ("largest micro-batch", "tokens", "largest_micro_batch"),
        ("padded tokens", "tokens", "padded_tokens"),
        ("samples", "count", "num_samples"),
        ("optimizer steps", "count", "num_steps"),
        ("micro-batches per rank", "count", "num_micro_batches"),
        ("fillers", "count", "num_fillers"),
        ("shapes", "count", "num_shapes"),
    ]
    if with_randomness:
        figures += [
            ("fewest samples in a step", "count", "fewest_samples_per_step"),
            ("most samples in a step", "count", "most_samples_per_step"),
            ("samples that change step", "percent", "moved_share"),
            ("mean distance moved", "steps", "mean_step_distance"),
            ("correlation of lengths in a step", "correlation", "length_correlation"),
        ]
    rows = [
        Row(label=label, unit=unit, planned=getattr(planned, name), plain=getattr(plain, name))
        for label, unit, name in figures
    ]
    speed_up = Row(label="modelled speed-up", unit="factor", planned=modelled_speed_up(planned, plain), plain=1.0)
    return [*rows[:5], speed_up, *rows[5:]]


def _useful_cost(lengths: NDArray[np.int64], cost: CostFunction | None) -> float:
    unique, counts = np.unique(lengths, return_counts=True)
    return float(np.dot(counts, prepare_cost(cost, unique, max_count=1)(1, unique)))
