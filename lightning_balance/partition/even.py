"""Cuts with one target cost for all groups, met by rounding: dealt by cost they waste little where groups are small."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.problem import Problem

# A group takes one sample more where at least 1 - rounding of it fits; 0 never exceeds the target.
_ROUNDINGS = (0.0, 0.2, 0.4, 0.6, 0.8)
_PRECISION = 2e-3


def even_cuts(problem: Problem, num_slots: int) -> list[NDArray[np.int64]]:
    """Return cuts into the wanted number of groups, each with the smallest target under which so many are enough.

    Where outliers force the time of the first slots, those are filled up to it, and the rest is cut evenly.
    """
    head = _forced_slots(problem, num_slots)
    cuts = []
    for taken in {0, len(head) - 1}:
        starts = head[: taken + 1]
        num_groups = (num_slots * problem.num_ranks) - taken
        for rounding in _ROUNDINGS:
            tail = _smallest_target(problem, starts[-1], num_groups, rounding)
            if tail is not None:
                cuts.append(np.array(starts[:-1] + split_heaviest(problem, tail, num_groups), dtype=np.int64))
    return cuts


def _forced_slots(problem: Problem, num_slots: int) -> list[int]:
    """Return starts of the groups of the first slots whose longest sample alone is above the mean cost of the rest."""
    starts, num_samples, num_ranks = [0], problem.num_samples, problem.num_ranks
    for num_after in range(num_slots - 1, 0, -1):
        begin = starts[-1]
        bound = float(problem.single_costs[begin])
        mean = float(problem.work[-1] - problem.work[begin]) / ((num_after + 1) * num_ranks) + problem.price
        if bound <= mean:
            break
        slot = problem.fill(begin, num_samples - num_after * num_ranks, bound, num_ranks)
        if len(slot) <= num_ranks:
            break
        starts += slot[1:]
    return starts


def _smallest_target(problem: Problem, begin: int, num_groups: int, rounding: float) -> list[int] | None:
    end = problem.num_samples
    mean = float(problem.work[end] - problem.work[begin]) / num_groups + problem.price
    mean = max(mean, float(problem.single_costs[-1]))  # behind an outlier differences of sums may vanish
    low, high = mean / 2, mean
    best: list[int] | None = None
    while best is None or low < high * (1 - _PRECISION):
        target = high if best is None else (low + high) / 2
        starts = problem.fill_near(begin, target, num_groups, rounding)
        if starts[-1] == end:
            high, best = target, starts
        elif best is None:
            if high >= problem.enough:
                return None
            low, high = high, high * 1.15
        else:
            low = target
    return best


def split_heaviest(problem: Problem, starts: list[int], num_groups: int) -> list[int]:
    """Split the most expensive groups in two equal parts until there are ``num_groups``."""
    missing = num_groups - (len(starts) - 1)
    edges = list(starts)
    if missing:
        costs = problem.group_costs(np.array(starts)).tolist()
        heap = [
            (-cost, begin, end) for cost, (begin, end) in zip(costs, pairwise(starts), strict=True) if end - begin > 1
        ]
        heapq.heapify(heap)
        for _ in range(missing):
            _, begin, end = heapq.heappop(heap)
            middle = (begin + end) // 2
            edges.append(middle)
            for left, right in ((begin, middle), (middle, end)):
                if right - left > 1:
                    cost = float(problem.cost(right - left, problem.padded[left]))
                    heapq.heappush(heap, (-cost, left, right))
    return sorted(edges)
