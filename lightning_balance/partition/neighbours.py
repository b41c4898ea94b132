"""The best slots of neighbours, exactly, where there are few samples.

The cost of a group ``[i, j)`` is a matrix. Its ``num_ranks``-th power, with min for plus and max for times, holds the
slowest rank of the best slot ``[i, j)``; slots are then chained by their sums. Cubic in the samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem
from lightning_balance.partition.slots import Run, fill_runs

MOST_SAMPLES = 128


def best_neighbours(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Return the cut into slots of neighbours with the least sum of their slowest ranks.

    Needs at least as many samples as groups, and a cap that so many groups can hold.

    Returns:
        Starts of the groups, then the number of samples.
    """
    slot_times = _power(_group_costs(problem), problem.num_ranks)
    least = np.full(problem.num_samples + 1, np.inf)
    least[0] = 0.0
    choices: list[NDArray[np.int64]] = []
    for _ in range(num_slots):
        times = least[:, None] + slot_times
        choices.append(times.argmin(axis=0))
        least = times.min(axis=0)
    runs: list[Run] = []
    end = problem.num_samples
    for choice in reversed(choices):
        begin = int(choice[end])
        runs.append(Run(begin, end, 1, float(slot_times[begin, end])))
        end = begin
    assert end == 0
    return fill_runs(problem, runs[::-1])


def _group_costs(problem: Problem) -> NDArray[np.float64]:
    """Return the cost of the group from each start to each end; infinite where there is none or the cap forbids it."""
    size = problem.num_samples + 1
    starts, ends = np.triu_indices(size, 1)
    counts = ends - starts
    allowed = counts <= problem.largest[starts]
    costs = np.full((size, size), np.inf)
    starts, ends, counts = starts[allowed], ends[allowed], counts[allowed]
    costs[starts, ends] = problem.cost(counts, problem.padded[starts])
    return costs


def _power(matrix: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    result: NDArray[np.float64] | None = None
    while True:
        if exponent & 1:
            result = matrix if result is None else _least_of_worst(result, matrix)
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        matrix = _least_of_worst(matrix, matrix)


def _least_of_worst(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``min over k of max(left[i, k], right[k, j])``, with nothing below the diagonal in either."""
    rows = [np.maximum(row[start:, None], right[start:]).min(axis=0) for start, row in enumerate(left)]
    return np.stack(rows)
