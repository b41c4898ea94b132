"""Cut and deal: which samples form a group, and which rank runs the group in which slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.even import even_cuts
from lightning_balance.partition.exhaustive import best_for_slots, best_for_step, is_small
from lightning_balance.partition.polish import polish_slots
from lightning_balance.partition.prices import improve_by_prices
from lightning_balance.partition.problem import Problem
from lightning_balance.partition.ranks import balance_ranks
from lightning_balance.partition.slots import dealt_time, slot_cuts

FILLER = -1


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

    Fewer samples than groups become a group each, and the other places fillers: copies of the shortest sample.

    Args:
        problem: sorted samples, cost and cap; the cap must allow so many groups.
        num_slots: groups per rank.
        sync: ``"micro_batch"``: least sum over slots of the slowest rank; ``"step"``: least sum of the slowest rank.
    """
    num_groups = num_slots * problem.num_ranks
    if problem.num_samples <= num_groups:
        starts = np.arange(problem.num_samples + 1)
        return _with_fillers(problem, starts, num_slots, sync)
    if sync == "step" and num_slots > 1:
        starts, deal = _cut_for_step(problem, num_slots)
        return Cut(starts=starts, deal=deal)
    if is_small(problem, num_groups, "micro_batch"):
        starts = best_for_slots(problem, num_groups)
    else:
        starts = cut_for_slots(problem, num_slots)
    return Cut(starts=starts, deal=deal_by_cost(problem.group_costs(starts), problem.num_ranks))


def cut_for_slots(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Return the best cut found for the sum over slots of the slowest rank."""
    cuts = slot_cuts(problem, num_slots)
    if num_slots > 1:
        cuts += even_cuts(problem, num_slots)
    cuts.sort(key=lambda starts: dealt_time(problem, starts))
    if num_slots > 1:
        cuts = [improve_by_prices(problem, starts, num_slots) for starts in cuts[:PRI]] + cuts[PRI:]
    polished = [polish_slots(problem, starts) for starts in cuts[:POL]]
    return min(polished, key=lambda starts: dealt_time(problem, starts))


PRI = 1
POL = 3


def deal_by_cost(costs: NDArray[np.float64], num_ranks: int) -> NDArray[np.int64]:
    """Deal groups to slots by cost, heaviest first: for given groups the least sum over slots of the slowest rank.

    >>> deal_by_cost(np.array([1.0, 4.0, 3.0, 2.0]), num_ranks=2)
    array([[1, 2],
           [3, 0]])
    """
    return np.argsort(-costs, kind="stable").reshape(-1, num_ranks)


def _cut_for_step(problem: Problem, num_slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    num_groups = num_slots * problem.num_ranks
    if is_small(problem, num_groups, "step"):
        return best_for_step(problem, num_groups)
    starts = cut_for_slots(problem, num_slots)
    return balance_ranks(problem, starts, num_slots)[:2]


def _with_fillers(problem: Problem, starts: NDArray[np.int64], num_slots: int, sync: str) -> Cut:
    num_groups = num_slots * problem.num_ranks
    costs = problem.group_costs(starts)
    with_copies = np.concatenate([costs, np.full(num_groups - len(costs), costs[-1])])
    if sync == "step":
        from lightning_balance.partition.ranks import assign

        deal = assign(with_copies, problem.num_ranks)
    else:
        deal = deal_by_cost(with_copies, problem.num_ranks)
    return Cut(starts=starts, deal=np.where(deal < len(costs), deal, FILLER))
