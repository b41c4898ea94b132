"""The cutting problem: samples sorted from longest to shortest, to be cut into groups of neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import PreparedCost


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Sorted samples, what a group of them costs, and how many of them a group may hold.

    A group is a run of neighbours ``[start, end)``. Its padded length is that of its first sample, so where a group
    starts fixes how many samples it can hold. For any counts and any assignment, groups of neighbours cost no more
    than other groups: exchanging two samples into order never raises a padded length.

    Attributes:
        padded: padded length per sample, descending, of shape ``(num_samples,)``.
        cost: the checked cost.
        largest: most samples of a group that starts at each sample, at least 1, of shape ``(num_samples,)``.
        num_ranks: groups that run at the same time.
    """

    padded: NDArray[np.int64]
    cost: PreparedCost
    largest: NDArray[np.int64]
    num_ranks: int

    def group_costs(self, starts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of each group ``[starts[g], starts[g + 1])``; the last entry of ``starts`` is an end."""
        return self.cost(np.diff(starts), self.padded[starts[:-1]])

    def ends_within(self, bounds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the farthest end of a group from every start, for every cost bound.

        Returns:
            Array of shape ``(num_bounds, num_samples + 1)``; a start whose sample alone exceeds the bound stays where it
            is, and so does the end of the list. Strictly increasing along the last axis up to the end of the list.
        """
        num_samples = len(self.padded)
        counts = np.minimum(self.cost.largest_counts(bounds, self.padded), self.largest)
        ends = np.full((len(bounds), num_samples + 1), num_samples, dtype=np.int64)
        np.minimum(counts + np.arange(num_samples), num_samples, out=ends[:, :-1])
        return ends


def make_problem(padded: NDArray[np.int64], cost: PreparedCost, max_tokens: int | None, num_ranks: int) -> Problem:
    """Return the problem for padded lengths in descending order under a cap on padded tokens per group.

    A sample longer than the cap may still be a group of its own: whether it may occur is decided by the caller.
    """
    if max_tokens is None:
        largest = np.full(len(padded), len(padded), dtype=np.int64)
    else:
        largest = np.maximum(max_tokens // padded, 1)
    return Problem(padded=padded, cost=cost, largest=largest, num_ranks=num_ranks)
