"""The cutting problem: samples sorted from longest to shortest, to be cut into groups of neighbours."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import ROUNDING, PreparedCost


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

    @property
    def num_samples(self) -> int:
        """Samples to cut."""
        return len(self.padded)

    @cached_property
    def single_costs(self) -> NDArray[np.float64]:
        """Cost of each sample in a group of its own."""
        return self.cost(1, self.padded)

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Cost of the samples before each position if none were padded and groups had no price of their own."""
        return np.concatenate([[0.0], np.cumsum(self.single_costs - self.price)])

    @cached_property
    def price(self) -> float:
        """What one more group costs by itself, with the shortest sample."""
        return self.cost.price_per_micro_batch(int(self.padded[-1]))

    @cached_property
    def enough(self) -> float:
        """A bound under which only the cap limits groups."""
        counts = np.minimum(self.largest, np.arange(self.num_samples, 0, -1))
        return float(self.cost(counts, self.padded).max())

    def group_costs(self, starts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of each group ``[starts[g], starts[g + 1])``; the last entry of ``starts`` is an end."""
        return self.cost(np.diff(starts), self.padded[starts[:-1]])

    def ends_within(self, bounds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the farthest end of a group from every start, for every cost bound.

        A sample that alone is above the bound is a group of its own.

        Returns:
            Array of shape ``(num_bounds, num_samples + 1)``; each row increases strictly until it reaches the end.
        """
        ends = np.full((len(bounds), self.num_samples + 1), self.num_samples, dtype=np.int64)
        counts = self.cost.largest_counts(bounds, self.padded)
        np.clip(counts, 1, self.largest, out=counts)
        counts += np.arange(self.num_samples)
        np.minimum(counts, self.num_samples, out=ends[:, :-1])
        return ends

    def fill(self, begin: int, end: int, bound: float, num_groups: int) -> list[int]:
        """Fill at most ``num_groups`` groups with the samples ``[begin, end)`` as far as ``bound`` allows.

        A sample that alone is above the bound is a group of its own.

        Returns:
            Starts of the groups, then where the last one ends.
        """
        if begin == end:
            return [begin]
        model = self.cost.linear
        if model is None:
            return self._fill_by_rows(begin, end, bound * (1 + ROUNDING), num_groups)
        room = max(bound * (1 + ROUNDING) - model.intercept, 0.0)
        units, largest, starts, position = self._units, self._largest, [begin], begin
        for _ in range(num_groups):
            count = int(room / units[position]) or 1
            position += count if count < largest[position] else largest[position]
            if position >= end:
                starts.append(end)
                break
            starts.append(position)
        return starts

    def holds(self, begin: int, end: int, bound: float, num_groups: int) -> bool:
        """Return whether :meth:`fill` comes to ``end``; faster, since it is asked in every bisection."""
        model = self.cost.linear
        if model is None:
            return self.fill(begin, end, bound, num_groups)[-1] == end
        room = max(bound * (1 + ROUNDING) - model.intercept, 0.0)
        units, largest, position = self._units, self._largest, begin
        for _ in range(num_groups):
            if position >= end:
                return True
            count = int(room / units[position]) or 1
            position += count if count < largest[position] else largest[position]
        return position >= end

    def fill_near(self, begin: int, target: float, num_groups: int, rounding: float) -> list[int]:
        """Fill groups to about ``target``: one sample more where the part of it that fits is above ``1 - rounding``.

        Returns:
            Starts of the groups, then where the last one ends, as :meth:`fill`; a sample above the target is a group.
        """
        model, end = self.cost.linear, self.num_samples
        starts, position, largest = [begin], begin, self._largest
        if model is not None:
            room, units = max(target - model.intercept, 0.0), self._units
        for _ in range(num_groups):
            if model is not None:
                count = int(room / units[position] + rounding) or 1
            else:
                row = self._rows[position]
                count = bisect_right(row, target) or 1
                if count < len(row) and target - row[count - 1] > (1 - rounding) * (row[count] - row[count - 1]):
                    count += 1
            position += count if count < largest[position] else largest[position]
            if position >= end:
                starts.append(end)
                break
            starts.append(position)
        return starts

    def _fill_by_rows(self, begin: int, end: int, limit: float, num_groups: int) -> list[int]:
        rows, largest, starts, position = self._rows, self._largest, [begin], begin
        for _ in range(num_groups):
            position += min(bisect_right(rows[position], limit) or 1, largest[position])
            if position >= end:
                starts.append(end)
                break
            starts.append(position)
        return starts

    def bounds_of(self, starts: list[int], end: int) -> tuple[float, float]:
        """Return the cost of the worst group of a fill, and the smallest bound that changes the fill."""
        edges = np.array(starts)
        first, counts = edges[:-1], np.diff(edges)
        costs = self.cost(counts, self.padded[first])
        most = np.minimum(self.largest[first], end - first)
        larger = np.where(counts < most, self.cost(np.minimum(counts + 1, most), self.padded[first]), inf)
        return float(costs.max()), float(larger.min())

    @property
    def lists(self) -> tuple[list[float], list[int]]:
        """Cost per sample and most samples of a group by start, as lists: faster to read one by one."""
        return self._units, self._largest

    @cached_property
    def _largest(self) -> list[int]:
        largest: list[int] = self.largest.tolist()
        return largest

    @cached_property
    def _units(self) -> list[float]:
        model = self.cost.linear
        assert model is not None
        units: list[float] = (self.single_costs - model.intercept).tolist()
        return units

    @cached_property
    def _rows(self) -> list[list[float]]:
        known = {length: self.cost.row(length).tolist() for length in np.unique(self.padded).tolist()}
        return [known[length] for length in self.padded.tolist()]


def make_problem(padded: NDArray[np.int64], cost: PreparedCost, max_tokens: int | None, num_ranks: int) -> Problem:
    """Return the problem for padded lengths in descending order under a cap on padded tokens per group.

    A sample longer than the cap may still be a group of its own: whether it may occur is decided by the caller.
    """
    if max_tokens is None:
        largest = np.full(len(padded), len(padded), dtype=np.int64)
    else:
        largest = np.maximum(max_tokens // padded, 1)
    return Problem(padded=padded, cost=cost, largest=largest, num_ranks=num_ranks)
