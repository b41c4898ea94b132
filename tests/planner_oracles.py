"""Slow and plain planners to compare with, written without any code of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[float, float], float]


def cuts(num_samples: int, num_groups: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut a sorted list into groups that are not empty."""
    for inner in combinations(range(1, num_samples), num_groups - 1):
        edges = [0, *inner, num_samples]
        yield list(pairwise(edges))


def assignments(groups: list[int], num_slots: int) -> Iterator[list[list[int]]]:
    """All ways to give groups to ranks, `num_slots` to each."""
    if not groups:
        yield []
        return
    first, rest = groups[0], groups[1:]
    for others in combinations(rest, num_slots - 1):
        remaining = list(rest)
        for group in others:
            remaining.remove(group)
        for tail in assignments(remaining, num_slots):
            yield [[first, *others], *tail]


def least_time(
    lengths: list[int], num_ranks: int, num_slots: int, cost: Cost, sync: str, max_tokens: int | None = None
) -> float:
    """The least modelled time over every cut and every assignment; infinite where the cap allows none."""
    ordered = sorted(lengths, reverse=True)
    num_groups = num_ranks * num_slots
    best = float("inf")
    for cut in cuts(len(ordered), num_groups):
        sizes = [(end - start, ordered[start]) for start, end in cut]
        if max_tokens is not None and any(n > 1 and n * length > max_tokens for n, length in sizes):
            continue
        costs = [cost(n, length) for n, length in sizes]
        if sync == "micro_batch":
            # slots are rows of as many groups; which groups share a row is what is assigned
            times = (
                sum(max(costs[g] for g in row) for row in rows) for rows in assignments([*range(num_groups)], num_ranks)
            )
        else:
            times = (
                max(sum(costs[g] for g in rank) for rank in ranks)
                for ranks in assignments([*range(num_groups)], num_slots)
            )
        best = min(best, *times) if num_groups > 1 else min(best, *list(times), float("inf"))
    return best


def least_time_of_neighbouring_slots(
    lengths: NDArray[np.int64],
    num_ranks: int,
    num_slots: int,
    cost: Callable[..., NDArray[np.float64]],
    max_tokens: int,
) -> float:
    """The least sum over slots of the slowest rank where slots are neighbours in length: an exact dynamic programme."""
    ordered = -np.sort(-lengths)
    num = len(ordered)
    one_group = np.full((num + 1, num + 1), np.inf)
    for start in range(num):
        sizes = np.arange(1, num - start + 1)
        allowed = (sizes * ordered[start] <= max_tokens) | (sizes == 1)
        one_group[start, start + 1 :] = np.where(allowed, cost(sizes, ordered[start]), np.inf)
    slot = one_group
    for _ in range(num_ranks - 1):
        slot = np.stack([np.maximum(slot[start][:, None], one_group).min(axis=0) for start in range(num + 1)])
    time = np.where(np.arange(num + 1) == 0, 0.0, np.inf)
    for _ in range(num_slots):
        time = (time[:, None] + slot).min(axis=0)
    return float(time[num])


def draw_lengths(kind: str, num_samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Lengths from one of a few shapes of distribution."""
    if kind == "lognormal":
        lengths = np.clip(rng.lognormal(5, 1, num_samples), 16, 1024)
    elif kind == "uniform":
        lengths = rng.integers(1, 1000, num_samples)
    elif kind == "pareto":
        lengths = np.clip((rng.pareto(1.2, num_samples) + 1) * 20, 1, 20_000)
    elif kind == "bimodal":
        long = rng.random(num_samples) < 0.2
        lengths = np.clip(np.where(long, rng.normal(2000, 100, num_samples), rng.normal(100, 20, num_samples)), 1, None)
    else:
        lengths = np.full(num_samples, 77)
    return np.asarray(lengths).astype(np.int64)
