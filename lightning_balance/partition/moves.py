"""Equal counts, then one sample at a time from the most expensive group to the cheapest: the published search.

The method of transformers' ``BatchRebalanceSampler`` ("poor man's batch rebalance", transformers 5.24): it balances all
groups, not slots, and stops in a local optimum, but where many lengths are equal or groups hold few samples, so that
costs are far apart whatever is done, its optimum may be one that no slots of neighbours reach. It is one more start for
:mod:`lightning_balance.partition.polish`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem

# The search takes as many rounds as there are samples and more. It is worth them in small steps; in larger ones where
# there are few groups or many samples per group (a move is then a small one), where few distinct lengths make costs
# far apart whatever is done, or where no sample comes near the mean cost of a group, so that all groups can be even.
# Elsewhere it hardly ever won.
_FEW_SAMPLES, _MANY_SAMPLES = 1536, 8192
_FEW_GROUPS, _MANY_GROUPS = 192, 512
_SAMPLES_PER_GROUP, _SAMPLES_PER_LENGTH, _SMALL_SHARE = 12, 4, 0.45


def is_worth_moves(problem: Problem, num_groups: int) -> bool:
    """Return whether the search may find what others do not, in a time that a step can spare."""
    num_samples = problem.num_samples
    if num_samples <= _FEW_SAMPLES:
        return True
    if num_samples > _MANY_SAMPLES or num_groups > _MANY_GROUPS:
        return False
    num_lengths = 1 + np.count_nonzero(np.diff(problem.padded))
    mean = float(problem.single_costs.sum()) / num_groups
    return (
        num_groups <= _FEW_GROUPS
        or num_samples >= _SAMPLES_PER_GROUP * num_groups
        or num_samples >= _SAMPLES_PER_LENGTH * num_lengths
        or float(problem.single_costs[0]) <= _SMALL_SHARE * mean
    )


def balanced_by_moves(problem: Problem, num_groups: int) -> list[NDArray[np.int64]]:
    """Return the cut with the smallest difference between the costs of any two groups; none if the cap forbids it."""
    base, more = divmod(problem.num_samples, num_groups)
    counts = np.full(num_groups, base, dtype=np.int64)
    counts[:more] += 1
    is_active = np.ones(num_groups, dtype=bool)
    best, best_spread = counts.copy(), np.inf
    seen: set[bytes] = set()
    for _ in range(max(30 * num_groups, problem.num_samples)):
        key = counts.tobytes()
        if key in seen:
            break
        seen.add(key)
        costs = _costs(problem, counts)
        active = np.flatnonzero(is_active)
        if len(active) <= 1:
            break
        heaviest, lightest = active[costs[active].argmax()], active[costs[active].argmin()]
        spread = costs[heaviest] - costs[lightest]
        if spread < best_spread:
            best, best_spread = counts.copy(), spread
        if spread <= 0:
            break
        if counts[heaviest] > 1:
            counts[heaviest] -= 1
            counts[lightest] += 1
        else:
            _fill_slot_of(problem, counts, costs, int(heaviest), is_active)
    starts = np.concatenate([[0], np.cumsum(best)])
    return [starts] if (best <= problem.largest[starts[:-1]]).all() else []


def _fill_slot_of(
    problem: Problem, counts: NDArray[np.int64], costs: NDArray[np.float64], single: int, is_active: NDArray[np.bool_]
) -> None:
    """Fill the slot whose time one sample sets up to that time, from the cheapest groups outside, and leave it be."""
    by_cost = np.argsort(-costs, kind="stable")
    slot = int(np.flatnonzero(by_cost == single)[0]) // problem.num_ranks
    members = by_cost[slot * problem.num_ranks : (slot + 1) * problem.num_ranks]
    is_donor = is_active.copy()
    is_donor[members] = False
    limit = costs[single]
    for group in members[is_active[members] & (members != single)].tolist():
        while True:
            start = int(counts[:group].sum())
            if float(problem.cost(counts[group] + 1, problem.padded[start])) > limit:
                break
            donors = np.flatnonzero(is_donor & (counts > 1))
            if not len(donors):
                break
            counts[donors[_costs(problem, counts)[donors].argmin()]] -= 1
            counts[group] += 1
    is_active[members] = False


def _costs(problem: Problem, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return problem.cost(counts, problem.padded[np.cumsum(counts) - counts])
