"""Where to cut when ranks wait in every slot: least sum over slots of the slowest rank.

Samples are sorted from longest to shortest; runs of one or more slots take neighbours. Under a cost bound ``T`` the
groups of a slot that starts at sample ``i`` are filled one after another as far as ``T`` allows, up to ``F_T(i)``.
That is the ``num_ranks``-fold power of a map, found for all starts at once by repeated squaring. With ``H_s(i)`` the
least time of ``s`` slots for the samples from ``i`` on, ``H_s(i) = min over T and r of time_r(T, i) +
H_{s-r}(F_T^r(i))``: a run of ``r`` slots under one bound takes less than ``r * T``, since its groups, dealt to slots
by cost, leave room unused in one slot only. Bounds come from a grid that is then refined around the solution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.bounds import bounds_around, first_bounds, small_bound
from lightning_balance.partition.greedy import split_groups
from lightning_balance.partition.heads import two_slot_heads
from lightning_balance.partition.problem import Problem

# Slots begin at one of at most this many positions in a pass; later passes choose them around the solution.
_MOST_POSITIONS = 256
# How far to believe in what runs of several slots save: not at all (runs of one slot only), or as estimated.
_TRUSTS = (0.0, 1.0)
# A window of tens of thousands of samples in many slots is not refined: tables would take hundreds of megabytes.
_LARGEST_TABLE = 8_000_000
# With more samples two slots are put before one of the solutions only.
_MANY = 1024
# Runs of up to so many slots may have any length, longer ones a few: else many slots would take quadratic time.
_ANY_LENGTH = 8
# Each pass finds the bounds of its runs up to such a part.
_TOLERANCES = (0.04, 0.003)


class Run(NamedTuple):
    """Consecutive slots whose groups share one cost bound."""

    begin: int
    end: int
    num_slots: int
    bound: float


class RunTable(NamedTuple):
    """Runs from every position under every bound; each entry of a list is ``(num_bounds, num_positions)``."""

    bounds: NDArray[np.float64]
    positions: NDArray[np.int64]
    lengths: list[int]
    """Slots of the runs, ascending; the lists have an entry for each."""
    reaches: list[NDArray[np.int64]]
    """Where the run ends."""
    times: list[NDArray[np.float64]]
    """Its time if every group took as long as the bound allows."""
    savings: list[NDArray[np.float64]]
    """How much less it is expected to take because its groups are dealt to slots by cost."""


class Solution(NamedTuple):
    """What the dynamic programme found for 1, 2, ... slots up to the end of the list."""

    place: NDArray[np.int64]
    """The closest position at or before each sample."""
    choices: list[NDArray[np.int64]]
    """The best first run at each position: ``index of its length * num_bounds + bound``."""
    least: list[NDArray[np.float64]]
    """The least time from each position on; the first entry is for no slot."""


def slot_cuts(problem: Problem, num_slots: int) -> list[NDArray[np.int64]]:
    """Return good cuts, best first: starts of the groups from the longest samples on, then the number of samples.

    Needs at least as many samples as groups, and a cap that so many groups can hold.
    """
    bounds, positions = first_bounds(problem, num_slots), _spread(problem, num_slots)
    best: dict[float, tuple[float, list[Run]]] = {}
    cuts: dict[float, NDArray[np.int64]] = {}
    for tolerance in _TOLERANCES:
        if best:
            found = [run for _, runs in best.values() for run in runs]
            bounds = bounds_around([run.bound for run in found], problem.num_samples)
            positions = _near([*(run.begin for run in found), problem.num_samples], problem.num_samples)
            if len(bounds) * problem.num_samples > _LARGEST_TABLE:
                break
        table = _run_table(problem, bounds, positions, num_slots)
        for trust in _TRUSTS:
            solution = _solve(problem, table, num_slots, trust)
            runs = _trace(problem, table, solution, 0, num_slots, tolerance)
            starts = fill_runs(problem, runs)
            if tolerance == _TOLERANCES[0] and (trust == 0 or problem.num_samples <= _MANY):
                cuts.update(_behind_heads(problem, table, solution, num_slots))
            time = dealt_time(problem, starts)
            cuts[time] = starts
            if trust not in best or time < best[trust][0]:
                best[trust] = time, runs
    return [cuts[time] for time in sorted(cuts)]


def _behind_heads(
    problem: Problem, table: RunTable, solution: Solution, num_slots: int
) -> dict[float, NDArray[np.int64]]:
    """Return the cut, by its time, that puts the best slots behind the best head of two slots."""
    heads = two_slot_heads(problem, num_slots - 2)
    if not heads:
        return {}
    least = solution.least[num_slots - 2]
    best = min(heads, key=lambda head: head.time + float(least[solution.place[head.starts[-1]]]))
    begin = best.starts[-1]
    if not np.isfinite(least[solution.place[begin]]):
        return {}
    tail = fill_runs(problem, _trace(problem, table, solution, begin, num_slots - 2, _TOLERANCES[0]))
    num_groups = 2 * problem.num_ranks
    head = split_groups(np.array(best.starts), problem.padded[:begin], num_groups)
    starts = np.concatenate([head[:-1], tail])
    return {dealt_time(problem, starts): starts}


def dealt_time(problem: Problem, starts: NDArray[np.int64]) -> float:
    """Return the sum over slots of the slowest rank when groups are dealt by cost."""
    costs = -np.sort(-problem.group_costs(starts))
    return float(costs[:: problem.num_ranks].sum())


def _solve(problem: Problem, table: RunTable, num_slots: int, trust: float) -> Solution:
    """Return the choices of the dynamic programme."""
    num_samples, num_ranks, positions = problem.num_samples, problem.num_ranks, table.positions
    lengths = table.lengths if trust else table.lengths[:1]
    prices = [time - trust * saved for time, saved in zip(table.times, table.savings, strict=True)]
    place = np.searchsorted(positions, np.arange(num_samples + 1), side="right") - 1
    least = [np.where(positions == num_samples, 0.0, np.inf)]
    choices: list[NDArray[np.int64]] = []
    for num_left in range(1, num_slots + 1):
        options = []
        for index, length in enumerate(lengths):
            if length > num_left:
                break
            limit = num_samples - (num_left - length) * num_ranks  # every later group needs a sample
            landing = place[np.minimum(table.reaches[index], limit)]
            option = prices[index] + np.take(least[num_left - length], landing)
            option[:, positions > limit - length * num_ranks] = np.inf
            options.append(option)
        every = np.concatenate(options)
        choices.append(every.argmin(axis=0))
        least.append(np.take_along_axis(every, choices[-1][None], axis=0)[0])
    return Solution(place, choices, least)


def _trace(
    problem: Problem, table: RunTable, solution: Solution, begin: int, num_slots: int, tolerance: float
) -> list[Run]:
    """Return the runs of the last ``num_slots`` slots, each bound made smaller as far as its samples allow."""
    num_ranks, runs, num_left = problem.num_ranks, [], num_slots
    while num_left:
        index, row = divmod(int(solution.choices[num_left - 1][solution.place[begin]]), len(table.bounds))
        length = table.lengths[index]
        num_left -= length
        num_groups, bound = length * num_ranks, float(table.bounds[row])
        end = problem.fill(begin, problem.num_samples - num_left * num_ranks, bound, num_groups)[-1]
        runs.append(Run(begin, end, length, small_bound(problem, begin, end, num_groups, bound, tolerance)))
        begin = end
    assert begin == problem.num_samples
    return runs


def _run_table(problem: Problem, bounds: NDArray[np.float64], positions: NDArray[np.int64], num_slots: int) -> RunTable:
    hop = problem.ends_within(bounds)
    counts = hop - np.arange(hop.shape[1])
    counts[:, -1] = 1
    room = np.maximum(bounds[:, None] - problem.cost(counts, np.append(problem.padded, 1)), 0.0)
    room[:, -1] = 0.0
    offsets = np.arange(len(bounds))[:, None] * hop.shape[1]
    levels = _squares((hop + offsets).ravel(), room.ravel(), problem.num_ranks)
    reached = positions + offsets
    unused, time = np.zeros(reached.shape), np.zeros(reached.shape)
    singles = np.append(problem.single_costs, np.zeros(num_slots * problem.num_ranks + 1))
    lengths, reaches, times, savings = _lengths(num_slots), [], [], []
    for length in range(1, lengths[-1] + 1):
        for level_hop, level_room in levels:
            unused = unused + np.take(level_room, reached)
            reached = np.take(level_hop, reached)
        # samples that alone are above the bound are the first groups of the run, so they lead its first slots
        time = time + np.maximum(bounds[:, None], singles[positions + (length - 1) * problem.num_ranks])
        if length not in lengths:
            continue
        reaches.append(reached - offsets)
        times.append(time)
        # dealt by cost, slots of a run lie below the bound by what is unused on average: evenly from 0 to twice that
        savings.append(unused * ((length - 1) / (length * problem.num_ranks)))
    return RunTable(bounds, positions, lengths, reaches, times, savings)


def _lengths(num_slots: int) -> list[int]:
    """Return the lengths that runs may have: any up to a number, then each half as long again.

    >>> _lengths(6), _lengths(50)
    ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 12, 18, 27, 40])
    """
    lengths = list(range(1, min(num_slots, _ANY_LENGTH) + 1))
    while (longer := lengths[-1] * 3 // 2) <= num_slots and lengths[-1] >= _ANY_LENGTH:
        lengths.append(longer)
    return lengths


def _squares(
    hop: NDArray[np.int64], room: NDArray[np.float64], power: int
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return maps that, one after another, are ``power`` hops, each with the room that is left unused on its way."""
    levels = []
    while True:
        if power & 1:
            levels.append((hop, room))
        power >>= 1
        if not power:
            return levels
        room = room + np.take(room, hop)
        hop = np.take(hop, hop)


def fill_runs(problem: Problem, runs: list[Run]) -> NDArray[np.int64]:
    """Return the starts of the groups of runs, each filled under its bound, then the number of samples."""
    parts: list[NDArray[np.int64]] = []
    for begin, end, num_slots, bound in runs:
        num_groups = num_slots * problem.num_ranks
        starts = np.array(problem.fill(begin, end, bound, num_groups))
        parts.append(begin + split_groups(starts - begin, problem.padded[begin:end], num_groups)[:-1])
    return np.concatenate([*parts, [problem.num_samples]])


def _spread(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Return positions all over the list, and those of slots that are as full as the cap allows: a way that exists."""
    num_samples = problem.num_samples
    if num_samples < _MOST_POSITIONS:
        return np.arange(num_samples + 1)
    begins = [0]
    for num_after in reversed(range(num_slots)):
        limit = num_samples - num_after * problem.num_ranks
        begins.append(problem.fill(begins[-1], limit, problem.enough, problem.num_ranks)[-1])
    half = _MOST_POSITIONS // 2
    by_count = np.linspace(0, num_samples, half).round().astype(np.int64)
    by_work = np.searchsorted(problem.work, np.linspace(0.0, problem.work[-1], half))
    return np.unique(np.concatenate([begins, by_count, np.minimum(by_work, num_samples)]))


def _near(begins: list[int], num_samples: int) -> NDArray[np.int64]:
    if num_samples < _MOST_POSITIONS:
        return np.arange(num_samples + 1)
    reach = max(_MOST_POSITIONS // (2 * len(begins)), 4)
    near = np.add.outer(np.array(begins), np.arange(-reach, reach + 1)).ravel()
    return np.unique(np.clip(near, 0, num_samples))
