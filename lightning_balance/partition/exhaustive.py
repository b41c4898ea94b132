"""Small problems: every cut and every assignment."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import comb, factorial

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem

_MOST_TRIED = 8192


def num_cuts(num_samples: int, num_groups: int) -> int:
    """Return how many ways there are to cut sorted samples into groups that are not empty."""
    return comb(num_samples - 1, num_groups - 1)


def all_cuts(problem: Problem, num_groups: int) -> NDArray[np.int64]:
    """Return the starts of every cut that the cap allows, of shape ``(num_cuts, num_groups + 1)``."""
    inner = np.array(list(combinations(range(1, problem.num_samples), num_groups - 1)), dtype=np.int64)
    inner = inner.reshape(num_cuts(problem.num_samples, num_groups), num_groups - 1)
    edges = np.full((len(inner), 1), problem.num_samples)
    starts = np.concatenate([np.zeros_like(edges), inner, edges], axis=1)
    allowed = (np.diff(starts, axis=1) <= problem.largest[starts[:, :-1]]).all(axis=1)
    cuts: NDArray[np.int64] = starts[allowed]
    return cuts


def is_small(problem: Problem, num_groups: int, sync: str) -> bool:
    """Return whether every cut and assignment can be tried."""
    if problem.num_samples < num_groups:
        return False
    tried = num_cuts(problem.num_samples, num_groups)
    if sync == "step":
        tried *= num_assignments(num_groups, problem.num_ranks)
    return tried * num_groups <= _MOST_TRIED * 8


def best_for_slots(problem: Problem, num_groups: int) -> NDArray[np.int64]:
    """Return the cut with the least sum over slots of the slowest rank; dealing by cost is the best assignment."""
    cuts = all_cuts(problem, num_groups)
    costs = problem.cost(np.diff(cuts, axis=1), problem.padded[cuts[:, :-1]])
    times = -np.sort(-costs, axis=1)[:, :: problem.num_ranks]
    best: NDArray[np.int64] = cuts[times.sum(axis=1).argmin()]
    return best


def best_for_step(problem: Problem, num_groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cut and the groups of each rank, of shape ``(num_slots, num_ranks)``, with the least slowest rank."""
    cuts = all_cuts(problem, num_groups)
    costs = problem.cost(np.diff(cuts, axis=1), problem.padded[cuts[:, :-1]])
    assignments = all_assignments(num_groups, problem.num_ranks)
    times = costs[:, assignments].sum(axis=3).max(axis=2)
    cut, assignment = np.unravel_index(times.argmin(), times.shape)
    return cuts[cut], assignments[assignment].T


def is_small_assignment(num_groups: int, num_ranks: int) -> bool:
    """Return whether every assignment of given groups can be tried."""
    return num_assignments(num_groups, num_ranks) <= _MOST_TRIED


def best_assignment(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Return the groups of each rank, of shape ``(num_slots, num_ranks)``, with the least slowest rank.

    >>> best_assignment(np.array([3.0, 3.0, 2.0, 2.0, 2.0, 0.0]), 2).T.tolist()
    [[0, 1, 5], [2, 3, 4]]
    """
    assignments = all_assignments(len(costs), num_ranks)
    best: NDArray[np.int64] = assignments[costs[assignments].sum(axis=2).max(axis=1).argmin()].T
    return best


def num_assignments(num_groups: int, num_ranks: int) -> int:
    """Return how many ways there are to give groups to ranks, as many to each, up to the order of ranks and slots."""
    num_orders: int = factorial(num_groups // num_ranks) ** num_ranks * factorial(num_ranks)
    return factorial(num_groups) // num_orders


@lru_cache(maxsize=64)
def all_assignments(num_groups: int, num_ranks: int) -> NDArray[np.int64]:
    """Return each of them as groups of ranks, of shape ``(num_assignments, num_ranks, num_slots)``.

    >>> all_assignments(4, 2).tolist()
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]]
    """
    found: list[list[list[int]]] = []
    _extend(list(range(num_groups)), num_groups // num_ranks, [], found)
    return np.array(found, dtype=np.int64)


def _extend(left: list[int], num_slots: int, ranks: list[list[int]], found: list[list[list[int]]]) -> None:
    if not left:
        found.append(list(ranks))
        return
    for others in combinations(left[1:], num_slots - 1):
        rest = [group for group in left[1:] if group not in others]
        _extend(rest, num_slots, [*ranks, [left[0], *others]], found)
