"""Cut and assign when ranks wait once a step: least sum over its slots of the slowest rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem

_MOST_MOVES_PER_GROUP = 4


def assign(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Give groups to ranks, as many to each: by cost, the heaviest of each slot to the rank that has least so far.

    Returns:
        Groups of shape ``(num_slots, num_ranks)``.

    >>> assign(np.array([4.0, 3.0, 2.0, 1.0]), num_ranks=2)
    array([[0, 1],
           [3, 2]])
    """
    by_cost = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    sums = np.zeros(num_ranks)
    deal = np.empty_like(by_cost)
    for slot, groups in enumerate(by_cost):
        lightest = np.argsort(sums, kind="stable")
        deal[slot, lightest] = groups
        sums[lightest] += costs[groups]
    return deal


def balance_groups(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Assign given groups to ranks, as many to each, until no exchange of two groups helps the slowest rank.

    >>> balance_groups(np.array([5.0, 4.0, 3.0, 2.0]), num_ranks=2).T.tolist()
    [[0, 3], [1, 2]]
    """
    deal = assign(costs, num_ranks)
    rank_of = np.empty(len(costs), dtype=np.int64)
    rank_of[deal] = np.arange(num_ranks)
    sums = costs[deal].sum(axis=0)
    for _ in range(_MOST_MOVES_PER_GROUP * len(costs)):
        slowest = int(sums.argmax())
        if not _swap(costs, deal, rank_of, sums, slowest, sums[slowest] * (1 - 1e-9)):
            break
    return deal


def balance_ranks(problem: Problem, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assign the groups of a cut to ranks and improve both, until the slowest rank cannot be helped by one move.

    A move exchanges a group of the slowest rank for one of another rank, or moves the border between one of its groups
    and a neighbour by one sample. No move raises the slowest rank's sum, which starts at or below that of any deal by
    cost slot by slot.

    Returns:
        Starts, and groups of shape ``(num_slots, num_ranks)``.
    """
    starts = starts.copy()
    costs = problem.group_costs(starts)
    deal = assign(costs, problem.num_ranks)
    rank_of = np.empty(len(costs), dtype=np.int64)
    rank_of[deal] = np.arange(problem.num_ranks)
    sums = costs[deal].sum(axis=0)
    for _ in range(_MOST_MOVES_PER_GROUP * len(costs)):
        slowest = int(sums.argmax())
        limit = sums[slowest] * (1 - 1e-9)
        if not (
            _swap(costs, deal, rank_of, sums, slowest, limit)
            or _move_border(problem, starts, costs, deal[:, slowest], rank_of, sums, slowest, limit)
        ):
            break
    return starts, deal


def _swap(
    costs: NDArray[np.float64],
    deal: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    sums: NDArray[np.float64],
    slowest: int,
    limit: float,
) -> bool:
    own = costs[deal[:, slowest]]
    less = own[:, None, None] - costs[deal][None]  # own slot, other slot, other rank
    after = np.maximum(sums[slowest] - less, sums + less)
    after[:, :, slowest] = np.inf
    mine, slot, rank = np.unravel_index(after.argmin(), after.shape)
    if not after[mine, slot, rank] < limit:
        return False
    change = less[mine, slot, rank]
    deal[mine, slowest], deal[slot, rank] = deal[slot, rank], deal[mine, slowest]
    rank_of[deal[mine, slowest]], rank_of[deal[slot, rank]] = slowest, rank
    sums[slowest] -= change
    sums[rank] += change
    return True


def _move_border(
    problem: Problem,
    starts: NDArray[np.int64],
    costs: NDArray[np.float64],
    own: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    sums: NDArray[np.float64],
    slowest: int,
    limit: float,
) -> bool:
    # border b lies between groups b - 1 and b
    borders = np.concatenate([own, own + 1])
    shifts = np.repeat([1, -1], len(own))
    inside = (borders > 0) & (borders < len(costs))
    borders, shifts = borders[inside], shifts[inside]
    left, right, where = borders - 1, borders, starts[borders] + shifts
    left_count, right_count = where - starts[left], starts[right + 1] - where
    allowed = (left_count >= 1) & (right_count >= 1)
    allowed &= left_count <= problem.largest[starts[left]]
    where_in = np.minimum(where, problem.num_samples - 1)
    allowed &= right_count <= problem.largest[where_in]
    left_change = problem.cost(np.maximum(left_count, 1), problem.padded[starts[left]]) - costs[left]
    right_change = problem.cost(np.maximum(right_count, 1), problem.padded[where_in]) - costs[right]
    left_after = sums[rank_of[left]] + left_change
    right_after = sums[rank_of[right]] + right_change
    same = rank_of[left] == rank_of[right]
    both = sums[rank_of[left]] + left_change + right_change
    after = np.where(same, both, np.maximum(left_after, right_after))
    after[~allowed] = np.inf
    if not len(after):
        return False
    best = int(after.argmin())
    if not after[best] < limit:
        return False
    for group, change in ((left[best], left_change[best]), (right[best], right_change[best])):
        costs[group] += change
        sums[rank_of[group]] += change
    starts[borders[best]] = where[best]
    return True
