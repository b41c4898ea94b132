"""Where to cut when ranks wait in every slot: least sum over slots of the slowest rank.

Samples are sorted from longest to shortest, slots take neighbours. Under a cost bound ``T`` a slot that starts at sample
``i`` reaches ``F_T(i)``: the groups of its ranks are filled one after another as far as ``T`` allows. That is the
``num_ranks``-fold power of a map, found for all starts at once by repeated squaring. With ``H_s(i)`` the least time of
``s`` slots for the samples from ``i`` on, ``H_s(i) = min over T of T + H_{s-1}(F_T(i))``. Bounds come from a grid that is
then refined around the solution; every pass ends with the exact smallest bound of each slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.bounds import bounds_around, first_bounds
from lightning_balance.partition.greedy import split_groups
from lightning_balance.partition.problem import Problem

# Slots begin at one of at most this many positions in a pass; later passes choose them around the solution.
_MOST_POSITIONS = 256
# Each pass finds the bounds of its slots up to such a part.
_TOLERANCES = (0.01, 0.001, 0.001)


class SlotCut(NamedTuple):
    """Where slots begin, and the cost bound of each."""

    begins: list[int]
    """Starts of the slots, then the number of samples."""
    bounds: list[float]

    @property
    def time(self) -> float:
        """Sum over slots of the slowest rank."""
        return sum(self.bounds)


def cut_slots(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Return starts of the groups, ``num_ranks`` per slot from the longest samples on, then the number of samples.

    Needs at least as many samples as groups, and a cap that so many groups can hold.
    """
    bounds, positions = first_bounds(problem, num_slots), _spread(problem, num_slots)
    best = _solve(problem, num_slots, bounds, positions, _TOLERANCES[0])
    for number, tolerance in enumerate(_TOLERANCES[1:], start=1):
        bounds, positions = bounds_around(best.bounds, number), _near(best.begins, problem.num_samples)
        best = min(best, _solve(problem, num_slots, bounds, positions, tolerance), key=lambda cut: cut.time)
    return _fill(problem, best)


def smallest_bound(
    problem: Problem, begin: int, end: int, num_groups: int, enough: float, tolerance: float = 1e-11
) -> float:
    """Return the smallest bound under which some groups hold the samples ``[begin, end)``; ``enough`` is one that does.

    With the default tolerance exact: bisection between the cost of the worst group of a fill that fits and the smallest
    bound that changes a fill that does not.
    """
    low = float(problem.single_costs[begin])
    high = problem.bounds_of(problem.fill(begin, end, enough, num_groups), end)[0]
    if problem.cost.linear is not None:  # padding only adds to it
        low = max(low, float(problem.work[end] - problem.work[begin]) / num_groups + problem.price)
    bound = low
    while low < high * (1 - tolerance):
        starts = problem.fill(begin, end, bound, num_groups)
        worst, next_bound = problem.bounds_of(starts, end)
        if starts[-1] == end:
            high = min(worst, high)
        else:
            low = next_bound
        bound = (low + high) / 2
    return high


def _solve(
    problem: Problem, num_slots: int, bounds: NDArray[np.float64], positions: NDArray[np.int64], tolerance: float
) -> SlotCut:
    """Return the best cut with slots that begin at ``positions`` and bounds from a grid, each bound made exact."""
    num_samples, num_ranks = problem.num_samples, problem.num_ranks
    reach = _reach(problem, bounds, positions)
    singles = np.append(problem.single_costs, 0.0)[positions]
    price = np.where(singles > bounds[:, None] * (1 + 1e-12), np.inf, bounds[:, None])
    place = np.searchsorted(positions, np.arange(num_samples + 1), side="right") - 1
    time = np.where(positions == num_samples, 0.0, np.inf)
    choices: list[NDArray[np.int64]] = []
    for num_after in range(num_slots):
        limit = num_samples - num_after * num_ranks  # every later group needs a sample
        landing = place[np.minimum(reach, limit)]
        table = price + np.take(time, landing)
        table[:, positions > limit - num_ranks] = np.inf
        choice = table.argmin(axis=0)
        time = table[choice, np.arange(len(positions))]
        choices.append(choice)
    begins, exact = [0], []
    for num_after in reversed(range(num_slots)):
        bound = float(bounds[choices[num_after][place[begins[-1]]]])
        limit = num_samples - num_after * num_ranks
        end = problem.fill(begins[-1], limit, bound, num_ranks)[-1]
        exact.append(smallest_bound(problem, begins[-1], end, num_ranks, bound, tolerance))
        begins.append(end)
    assert begins[-1] == num_samples
    return SlotCut(begins, exact)


def _reach(problem: Problem, bounds: NDArray[np.float64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the farthest end of a slot for every bound and start, of shape ``(num_bounds, num_positions)``."""
    hop = problem.ends_within(bounds)
    offsets = np.arange(len(bounds))[:, None] * hop.shape[1]
    hop = (hop + offsets).ravel()
    reached = positions + offsets
    num_left = problem.num_ranks
    while True:
        if num_left & 1:
            reached = np.take(hop, reached)
        num_left >>= 1
        if not num_left:
            return reached - offsets
        hop = np.take(hop, hop)


def _fill(problem: Problem, cut: SlotCut) -> NDArray[np.int64]:
    parts = []
    for begin, end, enough in zip(cut.begins[:-1], cut.begins[1:], cut.bounds, strict=True):
        bound = smallest_bound(problem, begin, end, problem.num_ranks, enough)
        starts = np.array(problem.fill(begin, end, bound, problem.num_ranks))
        parts.append(begin + split_groups(starts - begin, problem.padded[begin:end], problem.num_ranks)[:-1])
    return np.append(np.concatenate(parts), problem.num_samples)


def _spread(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Return positions all over the list, and those of slots that are as full as the cap allows: a way that exists."""
    num_samples = problem.num_samples
    if num_samples < _MOST_POSITIONS:
        return np.arange(num_samples + 1)
    begins = [0]
    for num_after in reversed(range(num_slots)):
        limit = num_samples - num_after * problem.num_ranks
        begins.append(problem.fill(begins[-1], limit, problem.enough, problem.num_ranks)[-1])
    return np.union1d(begins, np.linspace(0, num_samples, _MOST_POSITIONS).round().astype(np.int64))


def _near(begins: list[int], num_samples: int) -> NDArray[np.int64]:
    if num_samples < _MOST_POSITIONS:
        return np.arange(num_samples + 1)
    reach = max(_MOST_POSITIONS // (2 * len(begins)), 4)
    near = np.add.outer(np.array(begins), np.arange(-reach, reach + 1)).ravel()
    return np.unique(np.clip(near, 0, num_samples))
