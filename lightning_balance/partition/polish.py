"""Local search on a cut: move one sample from a group that sets its slot's time to some other group.

Slots of neighbours are nearly optimal, but not quite: a slot that has to hold an outlier has room for many short samples
in its other groups. With groups dealt to slots by cost any group may become any slot's, so the search finds such cuts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem

# Above this many numbers per round (moves by groups) a round takes milliseconds and gains next to nothing.
_TABLE_SIZE = 40_000
_MOST_ROUNDS = 64


def polish_slots(problem: Problem, starts: NDArray[np.int64], num_slots: int) -> NDArray[np.int64]:
    """Return a cut with the same number of groups whose time, dealt by cost, is not above that of ``starts``.

    Every round takes the best move of one sample from the heaviest group of a slot to any group; the groups between
    shift by one sample. Returns ``starts`` where the table of moves would be large.
    """
    counts = np.diff(starts)
    num_groups = len(counts)
    if num_groups * num_groups * num_slots > _TABLE_SIZE or num_groups == problem.num_samples:
        return starts
    time = _times(problem, counts[None], num_slots)[0]
    for _ in range(_MOST_ROUNDS):
        moved = _moves(problem, counts, num_slots)
        times = _times(problem, moved, num_slots)
        best = int(times.argmin())
        if not times[best] < time * (1 - 1e-9):
            break
        counts, time = moved[best], times[best]
    return np.concatenate([[0], np.cumsum(counts)])


def _moves(problem: Problem, counts: NDArray[np.int64], num_slots: int) -> NDArray[np.int64]:
    num_groups = len(counts)
    costs = _costs(problem, counts[None])[0]
    givers = np.argsort(-costs, kind="stable")[:: problem.num_ranks]
    giver = np.repeat(givers, num_groups)
    taker = np.tile(np.arange(num_groups), len(givers))
    moved = np.repeat(counts[None], len(giver), axis=0)
    rows = np.arange(len(giver))
    np.add.at(moved, (rows, giver), -1)
    np.add.at(moved, (rows, taker), 1)
    return moved


def _times(problem: Problem, counts: NDArray[np.int64], num_slots: int) -> NDArray[np.float64]:
    costs = -np.sort(-_costs(problem, counts), axis=1)
    return costs[:, :: problem.num_ranks].sum(axis=1)


def _costs(problem: Problem, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return costs of rows of counts; infinite where a group is empty or larger than the cap allows."""
    starts = np.minimum(np.cumsum(counts, axis=1) - counts, problem.num_samples - 1)
    allowed = (counts >= 1) & (counts <= problem.largest[starts])
    return np.where(allowed, problem.cost(np.maximum(counts, 1), problem.padded[starts]), np.inf)
