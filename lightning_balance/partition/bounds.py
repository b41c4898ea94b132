"""Cost bounds: those worth trying for a slot, and the smallest under which a slot holds its samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_balance.partition.problem import Problem

# The first grid has about this many entries (bounds by samples by slots): more bounds where there are few samples,
# since a slot's bound is then one of few values and a rough grid misses the good ones.
_TABLE_SIZE = 131_072
_OFFSETS = np.array([0.6, 0.75, 0.86, 0.93, 0.97, 0.985, 1.0, 1.015, 1.03, 1.07, 1.15, 1.35, 1.6])
_FEW_OFFSETS = np.array([0.8, 0.94, 0.98, 1.0, 1.02, 1.06, 1.2])
_FEWEST, _MOST = 60, 1024
# Bounds by samples, at most: thousands of samples make do with fewer bounds, and plan in tens of milliseconds.
_LARGEST_TABLE = 327_680


def first_bounds(problem: Problem, num_slots: int) -> NDArray[np.float64]:
    """Return bounds that span what a slot may need, ascending: every possible group cost where these are few.

    Slots near the mean cost are covered evenly (their errors add up, so absolute distances count), more expensive ones
    (an outlier, or a slot that takes over the work of others) geometrically.
    """
    fewest = min(_FEWEST, max(_LARGEST_TABLE // problem.num_samples, _FEWEST // 2))
    num_bounds = min(max(_TABLE_SIZE // (problem.num_samples * num_slots), fewest), _MOST)
    every = _every_group_cost(problem, 2 * num_bounds)
    if every is not None and len(every) <= num_bounds:
        return every
    if problem.enough == 0:
        return np.zeros(1)
    singles = problem.single_costs
    lowest, highest = float(singles[-1]), float(singles[0])
    mean = float((singles - problem.price).sum()) / (num_slots * problem.num_ranks) + problem.price
    mean = max(mean, lowest)
    usual, high = 2.2 * mean, 1.1 * highest
    top = min(max(1.3 * num_slots * mean, usual, min(num_slots, 4) * highest), problem.enough)
    share = num_bounds // 5
    parts = [
        np.linspace(lowest, usual, 2 * share),
        np.geomspace(max(lowest, mean / 256), mean, share),
        np.array([highest, problem.enough]),
    ]
    if high > usual:
        parts.append(np.linspace(usual, high, share))
    if top > max(usual, high):
        parts.append(np.geomspace(max(usual, high), top, share))
    return np.unique(np.concatenate(parts))


def bounds_around(bounds: ArrayLike, num_samples: int) -> NDArray[np.float64]:
    """Return bounds around those of a solution, close ones and some far ones; fewer where there are many samples.

    >>> bounds_around([100.0], num_samples=64).round(1)
    array([ 60. ,  75. ,  86. ,  93. ,  97. ,  98.5, 100. , 101.5, 103. ,
           107. , 115. , 135. , 160. ])
    """
    distinct = np.unique(bounds)
    offsets = _OFFSETS if len(distinct) * len(_OFFSETS) * num_samples <= _TABLE_SIZE else _FEW_OFFSETS
    return np.unique(np.outer(distinct, offsets))


def smallest_bound(problem: Problem, begin: int, end: int, num_groups: int, enough: float) -> float:
    """Return the smallest bound under which some groups hold the samples ``[begin, end)``; ``enough`` is one that does.

    Exact: bisection between the cost of the worst group of a fill that fits and the smallest bound that changes a fill
    that does not.
    """
    low = float(problem.single_costs[begin])
    if problem.cost.linear is not None:  # padding only adds to the work
        low = max(low, float(problem.work[end] - problem.work[begin]) / num_groups + problem.price)
    high = problem.bounds_of(problem.fill(begin, end, enough, num_groups), end)[0]
    bound = low
    while low < high * (1 - 1e-11):
        starts = problem.fill(begin, end, bound, num_groups)
        worst, next_bound = problem.bounds_of(starts, end)
        if starts[-1] == end:
            high = min(worst, high)
        else:
            low = next_bound
        bound = (low + high) / 2
    return high


def small_bound(problem: Problem, begin: int, end: int, num_groups: int, enough: float, tolerance: float) -> float:
    """Return a bound under which some groups hold the samples ``[begin, end)``, hardly larger than need be.

    Samples that alone are above it are groups of their own.
    """
    # a sample that leads the last slot by itself sets its time: a bound below that saves nothing
    floor = float(problem.single_costs[min(begin + num_groups - problem.num_ranks, end - 1)])
    low, high = 0.0, enough
    while low < high * (1 - tolerance) and floor < high:
        bound = (low + high) / 2 if low else max(0.9 * high, floor)
        if problem.holds(begin, end, bound, num_groups):
            high = bound
        else:
            low = bound
    return high


def _every_group_cost(problem: Problem, most: int) -> NDArray[np.float64] | None:
    """Return the distinct costs of all groups the cap allows, or None where there are many more than ``most``."""
    num_samples = problem.num_samples
    if num_samples * (num_samples + 1) > 8 * most:
        return None
    starts, last = np.triu_indices(num_samples)
    counts = last - starts + 1
    allowed = counts <= problem.largest[starts]
    return np.unique(problem.cost(counts[allowed], problem.padded[starts[allowed]]))
