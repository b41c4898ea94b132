"""Every formula that says how well a cut works, and how random its steps are.

Metrics, the planning report and the benchmarks call these functions, so a figure means the same thing wherever it is
printed. Only numpy is needed.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_balance.validation import check_choice, check_positive_int

__all__ = [
    "cost_spread",
    "length_correlation",
    "mean_step_distance",
    "model_efficiency",
    "modelled_time",
    "moved_share",
    "pad_efficiency",
    "slot_efficiency",
]


def pad_efficiency(real_tokens: npt.ArrayLike, padded_tokens: npt.ArrayLike) -> float:
    """Share of the processed tokens that are data: ``sum(real_tokens) / sum(padded_tokens)``.

    Guarantee:
        1.0 exactly when nothing is padded. A filler counts with 0 real and all its padded tokens, so copies that only
        keep ranks in step lower the figure.

    Shapes and units:
        Both in tokens, scalars or arrays of any shape; all entries are summed. No padded tokens at all give ``nan``:
        nothing was processed, which is neither good nor bad.

    Example:
        >>> pad_efficiency(90, 100)
        0.9
        >>> pad_efficiency([60, 30], [60, 60])  # two micro-batches
        0.75
        >>> pad_efficiency(0, 0)
        nan
    """
    padded = np.sum(padded_tokens)
    return float(np.sum(real_tokens) / padded) if padded else float("nan")


def cost_spread(costs: npt.ArrayLike) -> float:
    """Relative distance of the ranks inside one synchronisation: ``mean((max - min) / mean)``.

    ``max``, ``min`` and ``mean`` run over the ranks (last axis), the outer mean over everything else.

    Guarantee:
        0.0 exactly when all ranks cost the same in every synchronisation; at most ``num_ranks``.

    Shapes and units:
        costs: ``(..., num_ranks)``, any unit, >= 0. Ranks that all cost 0 are equal, hence a spread of 0. No
        synchronisation at all gives ``nan``.

    Raises:
        ValueError: a cost is negative or not finite, or there is no axis of ranks.

    Example:
        >>> cost_spread([3.0, 1.0])
        1.0
        >>> cost_spread([[3.0, 1.0], [2.0, 2.0]])  # two slots of two ranks
        0.5
    """
    ranks = _without_scale(_costs_per_rank(costs))
    if ranks.size == 0:
        return float("nan")
    mean = ranks.mean(axis=-1)
    spread = np.divide(np.ptp(ranks, axis=-1), mean, out=np.zeros_like(mean), where=mean != 0)
    return float(spread.mean())


def slot_efficiency(costs: npt.ArrayLike) -> float:
    """Share of the time in which ranks work instead of waiting for the slowest: ``mean(mean / max)``.

    ``mean / max`` runs over the ranks (last axis) of one slot, the outer mean gives every slot the same weight.

    Guarantee:
        In ``[1 / num_ranks, 1]``; 1.0 exactly when no rank waits.

    Shapes and units:
        costs: ``(..., num_ranks)``, any unit, >= 0. A slot whose costs are all 0 counts as 1; no slot gives ``nan``.

    Raises:
        ValueError: a cost is negative or not finite, or there is no axis of ranks.

    Example:
        >>> slot_efficiency([4.0, 2.0])
        0.75
        >>> slot_efficiency([[4.0, 2.0], [1.0, 1.0]])
        0.875
    """
    ranks = _without_scale(_costs_per_rank(costs))
    if ranks.size == 0:
        return float("nan")
    slowest = ranks.max(axis=-1)
    return float(np.divide(ranks.mean(axis=-1), slowest, out=np.ones_like(slowest), where=slowest != 0).mean())


def modelled_time(costs: npt.ArrayLike, sync: Literal["micro_batch", "step"] = "micro_batch") -> float:
    """Cost of the slowest path through one optimizer step.

    ``micro_batch``: ranks wait for each other in every slot (FSDP, DDP under Lightning), ``sum over slots of max over
    ranks``.
    ``step``: they wait once, after the last slot (DDP accumulation by itself), ``max over ranks of sum over slots``.

    Guarantee:
        ``step`` never exceeds ``micro_batch``.

    Shapes and units:
        costs: ``(num_slots, num_ranks)``; the result has the unit of the costs. No slots give 0.

    Raises:
        ValueError: a cost is negative or not finite, costs is not two-dimensional, or `sync` is neither of the two
            words.

    Example:
        >>> modelled_time([[4.0, 2.0], [1.0, 3.0]])
        7.0
        >>> modelled_time([[4.0, 2.0], [1.0, 3.0]], sync="step")
        5.0
    """
    check_choice("sync", sync, ("micro_batch", "step"))
    ranks = _costs_per_rank(costs)
    if ranks.ndim != 2:
        raise ValueError(f"costs must have the shape (num_slots, num_ranks), got {ranks.shape}")
    if ranks.size == 0:
        return 0.0
    return float(ranks.max(axis=1).sum() if sync == "micro_batch" else ranks.sum(axis=0).max())


def model_efficiency(useful_cost: float, modelled_time: float, num_ranks: int) -> float:
    """Padding and waiting in one figure: ``useful_cost / (num_ranks * modelled_time)``.

    ``useful_cost`` is the sum of ``cost(1, length)`` over the samples, what the work would cost without any padding;
    ``modelled_time`` is the slowest path over all steps, which every rank is paid for.

    Trade-off:
        At most 1 for a cost without a fixed part. With ``intercept > 0`` each sample brings its own intercept into the
        useful cost while a micro-batch pays it once, so values above 1 are possible and only comparisons count.

    Shapes and units:
        Both costs in the same unit. No modelled time gives ``nan``.

    Raises:
        ValueError: `num_ranks` is below 1.

    Example:
        >>> model_efficiency(useful_cost=9.0, modelled_time=5.0, num_ranks=2)
        0.9
    """
    check_positive_int("num_ranks", num_ranks)
    return useful_cost / (num_ranks * modelled_time) if modelled_time else float("nan")


def moved_share(steps: npt.ArrayLike, plain_steps: npt.ArrayLike) -> float:
    """Share of the samples that are in another step than the plain shuffle puts them in.

    Shapes and units:
        Number of the step of every sample, both ``(num_samples,)``; no samples give ``nan``.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> moved_share([0, 0, 1, 2], [0, 0, 1, 1])
        0.25
    """
    distances = _step_distances(steps, plain_steps)
    return float(np.count_nonzero(distances) / distances.size) if distances.size else float("nan")


def mean_step_distance(steps: npt.ArrayLike, plain_steps: npt.ArrayLike) -> float:
    """How many steps away from its step in the plain shuffle a sample is served, on average over all samples.

    Guarantee:
        0.0 exactly when no sample moves; below ``lookahead``, as samples stay in their window of that many steps.

    Shapes and units:
        Number of the step of every sample, both ``(num_samples,)``; no samples give ``nan``.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> mean_step_distance([0, 0, 3, 2], [0, 0, 1, 1])
        0.75
    """
    distances = _step_distances(steps, plain_steps)
    return float(distances.mean()) if distances.size else float("nan")


def length_correlation(lengths: npt.ArrayLike, steps: npt.ArrayLike) -> float:
    """Correlation between the lengths of two samples of the same step (one-way analysis of variance).

    Guarantee:
        0 in expectation for steps drawn at random, 1 where each step has a length of its own, below 0 where the means
        of steps differ less than chance would make them.

    Shapes and units:
        Both ``(num_samples,)``, lengths in tokens. ``nan`` where it is not defined: fewer than two steps, no step of
        two samples, or all lengths equal.

    Raises:
        ValueError: the shapes differ, or the number of a step is negative.

    Source:
        Intraclass correlation ICC(1): Shrout and Fleiss, "Intraclass correlations", 1979, with the mean group size for
        groups of unequal sizes (Donner, 1986).

    Example:
        >>> length_correlation([1, 1, 5, 5], [0, 0, 1, 1])
        1.0
    """
    values, groups = np.asarray(lengths, dtype=np.float64), _checked_steps(steps, np.shape(lengths))
    counts = np.bincount(groups)
    num_samples, num_steps = values.size, np.count_nonzero(counts)
    if num_steps < 2 or num_steps == num_samples or np.ptp(values) == 0:
        return float("nan")
    means = np.bincount(groups, weights=values) / np.maximum(counts, 1)
    between = float(np.dot(counts, (means - values.mean()) ** 2)) / (num_steps - 1)
    deviations = values - means[groups]
    within = float(np.dot(deviations, deviations)) / (num_samples - num_steps)
    size = (num_samples - float(np.dot(counts, counts)) / num_samples) / (num_steps - 1)
    return float((between - within) / (between + (size - 1) * within))


def _step_distances(steps: npt.ArrayLike, plain_steps: npt.ArrayLike) -> npt.NDArray[np.int64]:
    distances: npt.NDArray[np.int64] = np.abs(_checked_steps(steps, np.shape(plain_steps)) - np.asarray(plain_steps))
    return distances


def _checked_steps(steps: npt.ArrayLike, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    array = np.asarray(steps, dtype=np.int64)
    if array.shape != shape or array.ndim != 1:
        raise ValueError(f"steps must hold one step per sample, shape (num_samples,) = {shape}, got {array.shape}")
    return array


def _costs_per_rank(costs: npt.ArrayLike) -> npt.NDArray[np.float64]:
    ranks = np.asarray(costs, dtype=np.float64)
    if ranks.ndim == 0:
        raise ValueError(f"costs must have the ranks as its last axis, got the single number {costs!r}")
    if ranks.size and not ranks.min() >= 0:  # the smallest of values with a nan among them is nan
        raise ValueError(f"costs must be at least 0, got {ranks.min():g}")
    if ranks.size and np.isinf(ranks.max()):
        raise ValueError("costs must be finite, got inf")
    return ranks


def _without_scale(ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divide the costs of each row by a power of two that brings the largest below 1: ratios stay, sums are finite."""
    _, exponents = np.frexp(ranks.max(axis=-1, keepdims=True, initial=0.0))
    scaled: npt.NDArray[np.float64] = np.ldexp(ranks, -exponents)
    return scaled
