"""Two slots at the head of the list that share it: outliers in one, what pairs well with the bound of the other there.

Where the longest sample forces the time of the first slot, the next samples are often too short to use that time and
too long to pair under it. Given one bound for each of two slots, every group takes the bound that it uses better.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_balance.partition.problem import Problem

# Groups filled over all heads that are tried: a few milliseconds.
_MOST_GROUPS = 8192
# With more samples fewer heads are tried.
_MANY = 1024
_PREFERENCES = (1.0, 0.9, 1.1)


class Head(NamedTuple):
    """The groups of two slots."""

    starts: list[int]
    """Starts of the groups, then where the last one ends."""
    time: float
    """Sum of the bounds of both slots."""


def two_slot_heads(problem: Problem, num_after: int) -> list[Head]:
    """Return ways to fill two slots from the longest sample on, the first bound as small as can be.

    Args:
        problem: the problem; only for costs that are linear in the count, otherwise there are no heads.
        num_after: slots that follow, each of whose groups needs a sample.
    """
    if problem.cost.linear is None:
        return []
    singles = problem.single_costs
    first = float(singles[0])
    lowest = float(singles[min(problem.num_ranks, problem.num_samples - 1)])
    most = 72 if problem.num_samples <= _MANY else 10
    num_heads = min(max(_MOST_GROUPS // (2 * problem.num_ranks), 8), most)
    preferences = _PREFERENCES if num_heads == 72 else _PREFERENCES[:1]
    limit = problem.num_samples - num_after * problem.num_ranks
    heads = []
    for second in np.geomspace(lowest, first, min(num_heads // len(preferences), 24)).tolist():
        for preference in preferences:
            starts = _fill_two(problem, limit, first, second, preference)
            if len(starts) > 2 * problem.num_ranks or starts[-1] == limit:
                heads.append(Head(starts, first + second))
    return heads


def _fill_two(problem: Problem, limit: int, first: float, second: float, preference: float) -> list[int]:
    """Fill groups under either of two bounds, the one used better first, as long as each has groups left."""
    model = problem.cost.linear
    assert model is not None
    units, largest = problem.lists
    rooms = first * (1 + 1e-12) - model.intercept, second * (1 + 1e-12) - model.intercept
    weight = preference * rooms[0] / rooms[1] if rooms[1] > 0 else 0.0
    left = [problem.num_ranks, problem.num_ranks]
    starts, position = [0], 0
    while position < limit and (left[0] or left[1]):
        most = largest[position]
        wide, narrow = int(rooms[0] / units[position]) or 1, int(rooms[1] / units[position])
        wide, narrow = wide if wide < most else most, narrow if narrow < most else most
        if left[1] and narrow and (not left[0] or wide <= weight * narrow):
            left[1] -= 1
            position += narrow
        elif left[0]:
            left[0] -= 1
            position += wide
        else:
            break  # too long for the second bound, and the first has no group left
        starts.append(position if position < limit else limit)
    return starts
