"""Cut and deal: which samples form a group, and which rank runs the group in which slot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.bounds import smallest_bound
from lightning_balance.partition.even import even_cuts
from lightning_balance.partition.exhaustive import (
    best_assignment,
    best_for_slots,
    best_for_step,
    is_small,
    is_small_assignment,
)
from lightning_balance.partition.greedy import split_groups
from lightning_balance.partition.moves import balanced_by_moves, is_worth_moves
from lightning_balance.partition.neighbours import MOST_SAMPLES, best_neighbours
from lightning_balance.partition.polish import polish_slots
from lightning_balance.partition.prices import improve_by_prices
from lightning_balance.partition.problem import Problem
from lightning_balance.partition.ranks import balance_groups, balance_ranks
from lightning_balance.partition.slots import dealt_time, slot_cuts

FILLER = -1

# So many of the best cuts are polished: where there are few groups the second best may become the best.
_NUM_POLISHED, _NUM_POLISHED_OF_MANY = 3, 2
# With more samples even cuts are hardly ever the best, and the search by prices was never seen to improve one.
_MANY = 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """Groups of neighbours and their places.

    Attributes:
        starts: starts of the groups, then the number of samples; of shape ``(num_groups + 1,)``.
        deal: group of each slot and rank, ``FILLER`` where there is none; of shape ``(num_slots, num_ranks)``.
    """

    starts: NDArray[np.int64]
    deal: NDArray[np.int64]


def cut(problem: Problem, num_slots: int, sync: str) -> Cut:
    """Cut into ``num_slots * num_ranks`` groups and deal them, for the least modelled time.

    Small problems are solved by trying everything. Fewer samples than groups become a group each, and the other places
    fillers: copies of the shortest sample.

    Args:
        problem: sorted samples, cost and cap; the cap must allow so many groups.
        num_slots: groups per rank.
        sync: ``"micro_batch"``: least sum over slots of the slowest rank; ``"step"``: least sum of the slowest rank.
    """
    num_groups = num_slots * problem.num_ranks
    if problem.num_samples < num_groups:
        return _singles(problem, num_slots, sync)
    if sync == "step" and num_slots > 1:
        if is_small(problem, num_groups, sync):
            starts, deal = best_for_step(problem, num_groups)
        else:
            starts, deal = balance_ranks(problem, _cut_for_slots(problem, num_slots))
        return Cut(starts=starts, deal=deal)
    starts = _cut_for_slots(problem, num_slots)
    return Cut(starts=starts, deal=deal_by_cost(problem.group_costs(starts), problem.num_ranks))


def deal_by_cost(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Deal groups to slots by cost, heaviest first: for given groups the least sum over slots of the slowest rank.

    >>> deal_by_cost(np.array([1.0, 4.0, 3.0, 2.0]), num_ranks=2)
    array([[1, 2],
           [3, 0]])
    """
    return np.argsort(-costs, kind="stable").reshape(-1, num_ranks)


def _cut_for_slots(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Return the best cut found for the sum over slots of the slowest rank."""
    num_groups = num_slots * problem.num_ranks
    if is_small(problem, num_groups, "micro_batch"):
        return best_for_slots(problem, num_groups)
    if num_slots == 1:
        bound = smallest_bound(problem, 0, problem.num_samples, num_groups, problem.enough)
        starts = np.array(problem.fill(0, problem.num_samples, bound, num_groups), dtype=np.int64)
        return split_groups(starts, problem.padded, num_groups)
    is_many = problem.num_samples > _MANY
    cuts = slot_cuts(problem, num_slots) + ([] if is_many else even_cuts(problem, num_slots))
    if problem.num_samples <= MOST_SAMPLES:
        cuts.append(best_neighbours(problem, num_slots))
    if is_worth_moves(problem, num_groups):
        cuts += balanced_by_moves(problem, num_groups)
    cuts.sort(key=lambda starts: dealt_time(problem, starts))
    if not is_many:
        for place in _different(problem, cuts):
            cuts[place] = improve_by_prices(problem, cuts[place], num_slots)
        cuts.sort(key=lambda starts: dealt_time(problem, starts))
    polished = [polish_slots(problem, starts) for starts in cuts[: _NUM_POLISHED_OF_MANY if is_many else _NUM_POLISHED]]
    return min(polished, key=lambda starts: dealt_time(problem, starts))


def _different(problem: Problem, cuts: list[NDArray[np.int64]]) -> list[int]:
    """Return the places of the best cut and of the best one unlike it, whose slowest slot takes another time."""
    slowest = [float(problem.group_costs(starts).max()) for starts in cuts]
    unlike = (place for place, time in enumerate(slowest) if abs(time - slowest[0]) > 0.02 * slowest[0])
    return [0, *islice(unlike, 1)]


def _singles(problem: Problem, num_slots: int, sync: str) -> Cut:
    """Return one group per sample and fillers."""
    num_fillers = num_slots * problem.num_ranks - problem.num_samples
    costs = np.append(problem.single_costs, np.full(num_fillers, problem.single_costs[-1]))
    if sync == "micro_batch":
        deal = deal_by_cost(costs, problem.num_ranks)
    elif is_small_assignment(len(costs), problem.num_ranks):
        deal = best_assignment(costs, problem.num_ranks)
    else:
        deal = balance_groups(costs, problem.num_ranks)
    starts = np.arange(problem.num_samples + 1)
    return Cut(starts=starts, deal=np.where(deal < problem.num_samples, deal, FILLER))
