"""The best plan there is, found by trying or by dynamic programming, without a line of the planner's code.

Both oracles take the cap as given: ``count * longest <= cap`` for every micro-batch of more than one sample.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction


def best_by_trying(
    lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, cost: CostFunction, cap: int, sync: str
) -> float:
    """Return the least modelled time over every way to put samples into micro-batches, and these on ranks and slots.

    Micro-batches may hold any samples, not only neighbours in length. Fewer samples than micro-batches leave each
    sample alone and fill up with copies of the shortest. ``inf`` where the cap allows nothing.

    >>> best_by_trying(np.array([3, 1, 1]), num_ranks=2, num_slots=1, cost=lambda n, s: n * s, cap=9, sync="step")
    3.0
    """
    num_groups = num_ranks * num_slots
    if len(lengths) <= num_groups:
        filled = np.concatenate([lengths, np.full(num_groups - len(lengths), lengths.min())])
        costs = np.asarray(cost(np.ones(num_groups), filled), dtype=np.float64)[None]
    else:
        costs = _costs_of_partitions(lengths, num_groups, cost, cap)
    if not len(costs):
        return np.inf
    if sync == "micro_batch":  # for given groups the heaviest together are best
        return float((-np.sort(-costs, axis=1))[:, ::num_ranks].sum(axis=1).min())
    assignments = _assignments(num_groups, num_ranks)
    return float(min(costs[:, assignment].sum(axis=2).max(axis=1).min() for assignment in assignments))


def best_of_slots(lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, cost: CostFunction, cap: int) -> float:
    """Return the least sum over slots of the slowest rank when every slot takes neighbours in length; exact.

    ``cost[i, j]`` of the group ``[i, j)`` of sorted samples is a matrix whose ``num_ranks``-th power, with min for plus
    and max for times, holds the best slowest rank of a slot ``[i, j)``; slots are then chained with plus. Takes
    ``O(n**3 log num_ranks)``.

    >>> best_of_slots(np.array([5, 3, 2, 1]), num_ranks=2, num_slots=2, cost=lambda n, s: n * s, cap=9)
    7.0
    """
    slot = _power(_cost_matrix(lengths, cost, cap), num_ranks)
    time = np.full(len(lengths) + 1, np.inf)
    time[0] = 0.0
    for _ in range(num_slots):
        time = (time[:, None] + slot).min(axis=0)
    return float(time[-1])


def _cost_matrix(lengths: NDArray[np.int64], cost: CostFunction, cap: int) -> NDArray[np.float64]:
    padded = np.append(-np.sort(-lengths), 1)
    size = len(padded)
    counts = np.arange(size)[None, :] - np.arange(size)[:, None]
    allowed = (counts == 1) | ((counts > 1) & (counts * padded[:, None] <= cap))
    values = np.asarray(cost(np.maximum(counts, 1), np.broadcast_to(padded[:, None], counts.shape)), dtype=np.float64)
    return np.where(allowed, values, np.inf)


def _power(matrix: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    result = None
    while exponent:
        if exponent & 1:
            result = matrix if result is None else _min_max(result, matrix)
        exponent >>= 1
        if exponent:
            matrix = _min_max(matrix, matrix)
    assert result is not None
    return result


def _min_max(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``min over k of max(left[i, k], right[k, j])``."""
    return np.stack([np.maximum(row[:, None], right).min(axis=0) for row in left])


def _costs_of_partitions(
    lengths: NDArray[np.int64], num_groups: int, cost: CostFunction, cap: int
) -> NDArray[np.float64]:
    """Return the group costs of every partition that the cap allows, of shape ``(num_partitions, num_groups)``."""
    labels = _partitions(len(lengths), num_groups)
    inside = labels[:, :, None] == np.arange(num_groups)
    counts = inside.sum(axis=1)
    longest = np.where(inside, lengths[None, :, None], 0).max(axis=1)
    allowed = ((counts == 1) | (counts * longest <= cap)).all(axis=1)
    return np.asarray(cost(counts[allowed], longest[allowed]), dtype=np.float64).reshape(-1, num_groups)


@lru_cache(maxsize=64)
def _partitions(num_samples: int, num_groups: int) -> NDArray[np.int64]:
    """Return every way to put samples into groups, none of them empty, up to the order of groups."""
    rows: list[list[int]] = [[0]]
    for _ in range(num_samples - 1):
        rows = [[*row, label] for row in rows for label in range(min(max(row) + 2, num_groups))]
    return np.array([row for row in rows if max(row) == num_groups - 1], dtype=np.int64)


@lru_cache(maxsize=64)
def _assignments(num_groups: int, num_ranks: int) -> NDArray[np.int64]:
    """Return every way to give groups to ranks, of shape ``(num_assignments, num_ranks, num_slots)``."""
    num_slots = num_groups // num_ranks

    def give(left: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
        if not left:
            return [[]]
        found = []
        for others in combinations(left[1:], num_slots - 1):
            own = (left[0], *others)
            rest = tuple(group for group in left if group not in own)
            found += [[own, *ranks] for ranks in give(rest)]
        return found

    return np.array(give(tuple(range(num_groups))), dtype=np.int64)
