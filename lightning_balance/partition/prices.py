"""Mix slots along the list: every group may take the bound of any slot, and each bound has a price.

Given one cost bound per slot and a price for a group under it, the cheapest way through the sorted samples is a
shortest path: ``V(i) = min over slots s of price_s + V(end_s(i))``. With the right prices (the multipliers of "each
bound is used ``num_ranks`` times") it fits each stretch of lengths with the bound that leaves the least room unused.
The right bounds and prices are searched for around those of a known cut, many combinations at once; what counts is the
time of the cut that comes out.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import ROUNDING
from lightning_balance.partition.even import split_heaviest
from lightning_balance.partition.problem import Problem

_NUM_ROUNDS = 3
# Combinations of bounds and prices per round: few where the tables (samples by slots by combinations) are large.
_TABLE_SIZE = 32_768
_FEWEST, _MOST = 12, 64
_SPREAD = 0.03
_MOST_SPLIT = 4


def improve_by_prices(problem: Problem, starts: NDArray[np.int64], num_slots: int) -> NDArray[np.int64]:
    """Return a cut into as many groups whose time, dealt by cost, is not above that of ``starts``."""
    number = min(max(_TABLE_SIZE // (problem.num_samples * num_slots), _FEWEST), _MOST)
    time, slot_times, slot_work = _slots_of(problem, starts)
    for round_number in range(_NUM_ROUNDS):
        scale, bend, price = _draws(number, num_slots, round_number)
        bounds = slot_times * scale * bend
        np.maximum(bounds[:, 0], problem.single_costs[0], out=bounds[:, 0])
        paths = _cheapest_paths(problem, bounds, slot_work * price, num_slots * problem.num_ranks)
        for path in _fastest(problem, paths, time):
            found = np.array(split_heaviest(problem, path.tolist(), num_slots * problem.num_ranks))
            found_time, found_slot_times, found_work = _slots_of(problem, found)
            if found_time < time * (1 - 1e-9):
                starts, time, slot_times, slot_work = found, found_time, found_slot_times, found_work
    return starts


def _slots_of(problem: Problem, starts: NDArray[np.int64]) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Return the time of a cut dealt by cost, and of each slot its time and the mean work of its groups."""
    costs = problem.group_costs(starts)
    by_cost = np.argsort(-costs, kind="stable")
    slot_times = costs[by_cost[:: problem.num_ranks]]
    work = np.diff(problem.work[starts])[by_cost].reshape(-1, problem.num_ranks).mean(axis=1)
    return float(slot_times.sum()), slot_times, work


def _fastest(problem: Problem, paths: NDArray[np.int64], time: float) -> list[NDArray[np.int64]]:
    """Return the starts of the few paths that may be faster than ``time``, groups that are left over not yet split."""
    costs = _path_costs(problem, paths)
    times = costs[:, :: problem.num_ranks].sum(axis=1)
    order = times.argsort(kind="stable")[:_MOST_SPLIT]
    return [np.unique(paths[path]) for path in order.tolist() if times[path] < time * (1 - 1e-9)]


@lru_cache(maxsize=256)
def _draws(number: int, num_slots: int, round_number: int) -> tuple[NDArray[np.float64], ...]:
    rng = np.random.default_rng([number, num_slots, round_number])
    spread = _SPREAD * 0.7**round_number
    scale = rng.uniform(0.995, 1.02, (number, 1))
    bend, price = 1 + rng.normal(0.0, spread, (2, number, num_slots))
    return scale, bend, price


def _cheapest_paths(
    problem: Problem, bounds: NDArray[np.float64], prices: NDArray[np.float64], num_groups: int
) -> NDArray[np.int64]:
    """Return the first ``num_groups`` group starts of each combination's cheapest path, and where these groups end."""
    number, num_slots = bounds.shape
    ends = np.ascontiguousarray(problem.ends_within(bounds.T.ravel()).T)
    singles = np.append(problem.single_costs, 0.0)[:, None]
    fees = np.where(singles > bounds.T.ravel() * (1 + ROUNDING), np.inf, prices.T.ravel())
    totals = _path_lengths(ends, fees, number)
    shape = (-1, num_slots, number)
    choice = totals.reshape(shape).argmin(axis=1)
    hops = np.take_along_axis(ends.reshape(shape), choice[:, None], axis=1)[:, 0]
    hops[-1] = problem.num_samples
    columns = np.arange(number)
    flat_hops = (hops * number + columns).ravel()
    path = [columns]
    for _ in range(num_groups):
        path.append(flat_hops.take(path[-1]))
    starts: NDArray[np.int64] = np.stack(path, axis=1) // number
    return starts


def _path_costs(problem: Problem, paths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the costs of each path's groups, descending; 0 for groups left over, infinite where samples are."""
    counts = np.diff(paths, axis=1)
    padded = problem.padded[np.minimum(paths[:, :-1], problem.num_samples - 1)]
    costs = np.where(counts > 0, problem.cost(np.maximum(counts, 1), padded), 0.0)
    costs[paths[:, -1] < problem.num_samples] = np.inf
    return -np.sort(-costs, axis=1)


def _path_lengths(ends: NDArray[np.int64], fees: NDArray[np.float64], number: int) -> NDArray[np.float64]:
    """Return the length of the cheapest path from each start by each slot's bound.

    Starts whose groups all end behind a block of starts do not depend on each other: blocks are done at once.
    """
    num_samples = len(ends) - 1
    shape = (num_samples + 1, -1, number)
    smallest = (ends.min(axis=1) - np.arange(num_samples + 1)).tolist()
    where = (ends * number + np.tile(np.arange(number), ends.shape[1] // number)).reshape(shape)
    fees = fees.reshape(shape)
    values = np.zeros((num_samples + 1, number))
    flat = values.reshape(-1)
    end = num_samples
    while end:
        begin = end - 1
        while begin and begin - 1 + smallest[begin - 1] >= end:
            begin -= 1
        totals = flat.take(where[begin:end])
        totals += fees[begin:end]
        totals.min(axis=1, out=values[begin:end])
        end = begin
    return flat.take(where) + fees
