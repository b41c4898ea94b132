"""Local search on a cut: move one sample from a group that sets its slot's time to some other group.

Slots of neighbours are nearly optimal, but not quite: a slot that has to hold an outlier has room for many short
samples in its other groups. With groups dealt to slots by cost any group may become any slot's, so the search finds
such cuts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem

# Numbers (moves by groups) looked at in one round, and in all rounds together: some milliseconds.
_ROUND_SIZE = 32_768
_TOTAL_SIZE = 524_288


def polish_slots(problem: Problem, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a cut with the same number of groups whose time, dealt by cost, is not above that of ``starts``.

    Every round takes the best move of one sample from the heaviest group of a slot to a group that stays cheaper; the
    groups between shift by one sample. Where several groups are as heavy as the first of their slot, a move that leaves
    fewer of them counts as progress too.
    """
    counts = np.diff(starts)
    costs = _sorted_costs(problem, counts[None])
    num_looked_at = 0
    while num_looked_at < _TOTAL_SIZE:
        moved = _moves(problem, counts)
        if not len(moved):
            break
        found = _sorted_costs(problem, moved)
        leaders = costs[0, :: problem.num_ranks]
        times = found[:, :: problem.num_ranks].sum(axis=1)
        time = leaders.sum()
        best = int(times.argmin())
        if times[best] >= time * (1 - 1e-9):
            # as fast: count the groups that are as heavy as a leader
            as_heavy = sum(((found >= leader * (1 - 1e-9)).sum(axis=1) for leader in leaders), np.zeros(len(found)))
            as_heavy[times > time * (1 + 1e-12)] = np.inf
            best = int(as_heavy.argmin())
            if as_heavy[best] >= sum(int((costs[0] >= leader * (1 - 1e-9)).sum()) for leader in leaders):
                break
        counts, costs = moved[best], found[best : best + 1]
        num_looked_at += moved.size
    return np.concatenate([[0], np.cumsum(counts)])


def _moves(problem: Problem, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows of counts, each after one move; the closest moves where there are too many."""
    starts = np.cumsum(counts) - counts
    padded, largest = problem.padded[starts], problem.largest[starts]
    costs, costs_with_one_more = problem.cost(counts, padded), problem.cost(counts + 1, padded)
    givers = np.argsort(-costs, kind="stable")[:: problem.num_ranks]
    givers = givers[counts[givers] > 1]
    useful = (costs_with_one_more < costs[givers][:, None] * (1 - 1e-9)) & (counts < largest)
    which, takers = np.nonzero(useful)
    givers = givers[which]
    most = max(_ROUND_SIZE // len(counts), 1)
    if len(givers) > most:
        closest = np.argsort(np.abs(givers - takers), kind="stable")[:most]
        givers, takers = givers[closest], takers[closest]
    moved = np.repeat(counts[None], len(givers), axis=0)
    rows = np.arange(len(givers))
    moved[rows, givers] -= 1
    moved[rows, takers] += 1
    return moved


def _sorted_costs(problem: Problem, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the costs of rows of counts, descending; infinite where a group is larger than the cap allows."""
    starts = np.cumsum(counts, axis=1) - counts
    costs = problem.cost(counts, problem.padded[starts])
    costs[counts > problem.largest[starts]] = np.inf
    return -np.sort(-costs, axis=1)
