"""Cut and deal: which samples form a group, and which rank runs the group in which slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.greedy import greedy_starts, split_groups
from lightning_balance.partition.problem import Problem

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
    """Cut into ``num_slots * num_ranks`` groups and deal them, for the least modelled time."""
    num_groups = num_slots * problem.num_ranks
    low, high = 0.0, float(problem.group_costs(np.array([0, len(problem.padded)])).max())
    best = greedy_starts(
        np.append(
            np.minimum(np.arange(len(problem.padded)) + problem.largest, len(problem.padded)), len(problem.padded)
        )
    )
    for _ in range(40):
        middle = (low + high) / 2
        ends = problem.ends_within(np.array([middle]))[0]
        if ends[0] == 0:
            low = middle
            continue
        starts = greedy_starts(ends)
        if len(starts) - 1 <= num_groups:
            best, high = starts, middle
        else:
            low = middle
    starts = split_groups(best, problem.padded, num_groups)
    costs = problem.group_costs(starts)
    deal = np.full(num_groups, FILLER, dtype=np.int64)
    deal[: len(costs)] = np.argsort(-costs, kind="stable")
    return Cut(starts=starts, deal=deal.reshape(num_slots, problem.num_ranks))
