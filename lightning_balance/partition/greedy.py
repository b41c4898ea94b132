"""Fewest groups, and exactly as many as wanted."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def greedy_starts(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut from the longest sample on, every group as large as it may be: the fewest groups there are.

    Taking the farthest end is optimal because a later start can only reach a later end.

    Args:
        ends: farthest end per start, of shape ``(num_samples + 1,)``, above the start everywhere but at the end.

    Returns:
        Starts of the groups and the number of samples as the last entry.

    >>> greedy_starts(np.array([2, 3, 3, 3]))
    array([0, 2, 3])
    """
    hops = ends.tolist()
    position, last = 0, len(hops) - 1
    starts = [0]
    while position < last:
        position = hops[position]
        starts.append(position)
    return np.array(starts, dtype=np.int64)


def fewest_groups(padded: NDArray[np.int64], max_tokens: int) -> int:
    """Return the fewest groups under a cap on padded tokens; a sample above it is a group of its own.

    >>> fewest_groups(np.array([7, 7, 4, 4]), max_tokens=8)
    3
    """
    return len(greedy_starts(group_ends(padded, max_tokens))) - 1


def group_ends(padded: NDArray[np.int64], max_tokens: int) -> NDArray[np.int64]:
    """Return how far a group may reach from each start under a cap on padded tokens, as :func:`greedy_starts` takes it.

    A sample above the cap is a group of its own.

    >>> group_ends(np.array([9, 4, 4, 4]), max_tokens=8)
    array([1, 3, 4, 4, 4])
    """
    counts = np.maximum(max_tokens // padded, 1)
    return np.append(np.minimum(np.arange(len(padded)) + counts, len(padded)), len(padded))


def split_groups(starts: NDArray[np.int64], padded: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Split groups in two until there are ``num_groups`` or every group is one sample; no cost rises by it.

    The group with the most padded tokens that still can be split goes first.

    >>> split_groups(np.array([0, 1, 5]), np.array([9, 2, 2, 2, 2]), num_groups=3)
    array([0, 1, 3, 5])
    """
    missing = min(num_groups, len(padded)) - (len(starts) - 1)
    if missing <= 0:
        return starts
    bounds = starts.tolist()
    heap = [(-(end - start) * int(padded[start]), start, end) for start, end in pairwise(bounds) if end - start > 1]
    heapq.heapify(heap)
    for _ in range(missing):
        _, start, end = heapq.heappop(heap)
        middle = (start + end) // 2
        bounds.append(middle)
        for left, right in ((start, middle), (middle, end)):
            if right - left > 1:
                heapq.heappush(heap, (-(right - left) * int(padded[left]), left, right))
    return np.array(sorted(bounds), dtype=np.int64)


def smallest_budget(padded: NDArray[np.int64], num_groups: int) -> int:
    """Return the smallest cap on padded tokens under which ``num_groups`` groups hold all samples.

    >>> smallest_budget(np.array([7, 7, 4, 4]), num_groups=2)
    14
    """
    low, high = 1, int(padded[0]) * len(padded)
    while low < high:
        middle = (low + high) // 2
        if fewest_groups(padded, middle) <= num_groups:
            high = middle
        else:
            low = middle + 1
    return low
