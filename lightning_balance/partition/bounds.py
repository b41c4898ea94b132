"""Cost bounds that are worth trying for a slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_balance.partition.problem import Problem

# The first grid has about this many entries per table of bounds by samples: more bounds where there are few samples,
# since a slot's bound is then one of few values and a rough grid misses the good ones.
_TABLE_SIZE = 32768
_FEWEST, _MOST = 48, 1024


def first_bounds(problem: Problem, num_slots: int) -> NDArray[np.float64]:
    """Return bounds that span what a slot may need, ascending: every possible group cost where these are few.

    Slots near the mean cost are covered evenly (their errors add up, so absolute distances count), more expensive ones
    (an outlier, or a slot that takes over the work of others) geometrically.
    """
    num_bounds = min(max(_TABLE_SIZE // problem.num_samples, _FEWEST), _MOST)
    every = _every_group_cost(problem, 2 * num_bounds)
    if every is not None and len(every) <= num_bounds:
        return every
    singles = problem.single_costs
    lowest, highest = float(singles[-1]), float(singles[0])
    mean = float((singles - problem.price).sum()) / (num_slots * problem.num_ranks) + problem.price
    mean = max(mean, lowest)
    usual = 2.2 * mean
    top = min(max(1.3 * num_slots * mean, usual, min(num_slots, 4) * highest), problem.enough)
    parts = [np.linspace(lowest, usual, num_bounds * 2 // 3), np.array([problem.enough])]
    if highest > mean:
        parts.append(singles[:: max(problem.num_ranks // 2, 1)][:12])
    if top > usual:
        parts.append(np.geomspace(usual, top, num_bounds // 3))
    return np.unique(np.concatenate(parts))


def bounds_around(bounds: ArrayLike, pass_number: int) -> NDArray[np.float64]:
    """Return bounds close to those of a solution, closer with every pass.

    >>> bounds_around([100.0], 1).round(1)
    array([ 97. ,  97.5,  98. ,  98.5,  99. ,  99.5, 100. , 100.5, 101. ,
           101.5, 102. , 102.5, 103. ])
    """
    offsets = 1 + np.linspace(-1, 1, 13) * 0.03 / 6 ** (pass_number - 1)
    return np.unique(np.outer(np.unique(bounds), offsets))


def _every_group_cost(problem: Problem, most: int) -> NDArray[np.float64] | None:
    """Return the distinct costs of all groups the cap allows, or None where there are many more than ``most``."""
    num_samples = problem.num_samples
    if num_samples * (num_samples + 1) > 8 * most:
        return None
    starts, last = np.triu_indices(num_samples)
    counts = last - starts + 1
    allowed = counts <= problem.largest[starts]
    return np.unique(problem.cost(counts[allowed], problem.padded[starts[allowed]]))
