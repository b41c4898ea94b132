"""Plan a window of consecutive steps at once, and share its slots out to the steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import PreparedCost
from lightning_balance.partition import FILLER, Cut, balance_ranks, fewest_groups, make_problem
from lightning_balance.plan import (
    StepPlan,
    build_plan,
    cut_sorted,
    cut_within_budget,
    modelled_time,
    plan_positions,
    sort_positions,
)
from lightning_balance.rules import StepRules
from lightning_balance.shuffle import RemainingOrder

LOW_CAPS = (0.5, 0.75)
"""Shares of the default cap that a window tries to do with, from the lowest."""
TIME_FOR_LOW_PEAK = 0.005
"""A window may take so much longer by the model, as a share, where its largest micro-batch then fits a lower cap."""

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowPlanner:
    """Plans windows ``[start, end)`` of an epoch's order, each of some number of steps.

    To know how many slots a window has under a budget it may have to be cut; that cut is kept until it is planned.
    """

    lengths: NDArray[np.int64]
    padded: NDArray[np.int64]
    cost: PreparedCost
    rules: StepRules
    order: RemainingOrder
    seed: int
    epoch: int
    _known_cuts: dict[int, Cut] = field(default_factory=dict)

    @property
    def groups_per_step(self) -> int:
        """Micro-batches of a step over all ranks, where that is fixed."""
        assert self.rules.num_slots is not None
        return self.rules.num_slots * self.rules.num_ranks

    def num_slots(self, start: int, end: int, num_steps: int) -> int:
        """Return the slots of all steps of a window together."""
        if self.rules.num_slots is not None:
            return self.rules.num_slots * num_steps
        padded = self._sorted_padded(start, end)
        assert self.rules.max_tokens is not None
        if self.cost.price_per_micro_batch(int(padded[-1])) == 0:
            return max(-(-fewest_groups(padded, self.rules.max_tokens) // self.rules.num_ranks), num_steps)
        self._known_cuts[start] = cut = self._cut_within_budget(start, padded, num_steps)
        return len(cut.deal)

    def plan(self, window: int, start: int, end: int, num_steps: int) -> list[StepPlan]:
        """Return the plan of each step of a window, over dataset indices."""
        positions = self.order.slice(start, end)
        order = sort_positions(positions, self.lengths)
        padded = self.padded[order]
        if self.rules.num_slots is None:
            cut = self._cut_within_budget(start, padded, num_steps)
        elif num_steps == 1:
            cut = cut_sorted(padded, self.cost, self.rules)
        else:
            rules = replace(self._window_rules(num_steps), num_slots=self.rules.num_slots * num_steps)
            cut = cut_with_low_peak(padded, self.cost, rules)
        if num_steps == 1:
            return [self._build_plan(order, padded, cut)]
        num_slots = len(cut.deal)
        if len(positions) < num_slots * self.rules.num_ranks:
            return self._plan_singles(positions, slots_of_steps(num_slots, num_steps))
        rng = np.random.default_rng([self.seed, self.epoch, window])
        dealt = deal_slots(np.diff(cut.starts)[cut.deal].sum(axis=1), num_steps, rng)
        return [self._step_of_window(order, cut, slots) for slots in dealt]

    def _cut_within_budget(self, start: int, padded: NDArray[np.int64], num_steps: int) -> Cut:
        """Cut the window that begins at ``start``, or return its cut if that is known."""
        known = self._known_cuts.pop(start, None)
        return known or cut_within_budget(padded, self.cost, self._window_rules(num_steps), num_steps)

    def _window_rules(self, num_steps: int) -> StepRules:
        """Return the rules for a window: slots that are shared out to several steps have to stay together."""
        return self.rules if num_steps == 1 else replace(self.rules, sync="micro_batch")

    def groups_needed(self, start: int, end: int) -> int:
        """Return the fewest micro-batches that hold a part of the order under the budget."""
        assert self.rules.max_tokens is not None
        return fewest_groups(self._sorted_padded(start, end), self.rules.max_tokens)

    def longest_prefix(self, start: int, total: int, num_steps: int, guess: int) -> int:
        """Return the last ``end``, at most ``total``, for which ``[start, end)`` fits into some steps."""
        num_groups = num_steps * self.groups_per_step
        low = min(start + num_groups, total)  # as many samples as micro-batches always fit
        step = max(guess // 64, 1) if guess else num_groups
        high = max(low, min(start + guess, total))
        while self.groups_needed(start, high) <= num_groups:
            low = high
            if high == total:
                return total
            high, step = min(high + step, total), step * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.groups_needed(start, middle) <= num_groups:
                low = middle
            else:
                high = middle
        return low

    def _sorted_padded(self, start: int, end: int) -> NDArray[np.int64]:
        return -np.sort(-self.padded[self.order.slice(start, end)])

    def _plan_singles(self, positions: NDArray[np.int64], slots: NDArray[np.int64]) -> list[StepPlan]:
        """Plan each step by itself where there are fewer samples than micro-batches, so that none is all fillers."""
        ends = len(positions) * np.cumsum(slots) // slots.sum()
        parts = np.split(positions, ends[:-1])
        return [
            plan_positions(
                part, self.lengths, self.padded, self.cost, replace(self.rules, num_slots=int(count)), skipped=_NOTHING
            )
            for part, count in zip(parts, slots, strict=True)
        ]

    def _step_of_window(self, order: NDArray[np.int64], cut: Cut, slots: NDArray[np.int64]) -> StepPlan:
        own, cut = take_slots(cut, slots)
        order = order[own]
        padded = self.padded[order]
        if self.rules.sync == "step":
            problem = make_problem(padded, self.cost, self.rules.cap, self.rules.num_ranks)
            starts, deal = balance_ranks(problem, cut.starts)
            cut = Cut(starts=starts, deal=deal)
        return self._build_plan(order, padded, cut)

    def _build_plan(self, order: NDArray[np.int64], padded: NDArray[np.int64], cut: Cut) -> StepPlan:
        return build_plan(order, self.lengths[order], padded, self.cost, cut, sync=self.rules.sync, skipped=_NOTHING)


def cut_with_low_peak(padded: NDArray[np.int64], cost: PreparedCost, rules: StepRules) -> Cut:
    """Cut a window into its slots so that its largest micro-batch is as small as it can be for next to no time.

    In a window the long samples of many steps come together and would fill a micro-batch up to what plain batches need,
    although there are enough other slots for them. The user's own ``max_tokens`` is left as it is.
    """
    best = cut_sorted(padded, cost, rules)
    if rules.max_tokens is not None:
        return best
    assert rules.num_slots is not None
    assert rules.cap is not None
    problem = make_problem(padded, cost, rules.cap, rules.num_ranks)
    allowed = (1 + TIME_FOR_LOW_PEAK) * modelled_time(problem, best, rules.sync)
    largest = int((np.diff(best.starts) * padded[best.starts[:-1]]).max())
    for share in LOW_CAPS:
        cap = int(share * rules.cap)
        if largest <= cap:
            break
        if fewest_groups(padded, cap) > rules.num_slots * rules.num_ranks:
            continue
        lower = cut_sorted(padded, cost, replace(rules, default_cap=cap))
        if modelled_time(problem, lower, rules.sync) <= allowed:
            return lower
    return best


def take_slots(cut: Cut, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], Cut]:
    """Return the samples of some slots, as places in the sorted window, and their cut by itself.

    >>> whole = Cut(starts=np.array([0, 1, 3, 4, 6]), deal=np.array([[1, 0], [3, 2]]))
    >>> own, part = take_slots(whole, np.array([1]))
    >>> own, part.starts, part.deal
    (array([3, 4, 5]), array([0, 1, 3]), array([[1, 0]]))
    """
    groups, deal = np.unique(cut.deal[slots], return_inverse=True)
    assert groups[0] != FILLER
    counts = np.diff(cut.starts)[groups]
    starts = np.concatenate([[0], np.cumsum(counts)])
    own = np.repeat(cut.starts[groups] - starts[:-1], counts) + np.arange(starts[-1])
    return own, Cut(starts=starts, deal=deal.reshape(len(slots), -1))


def slots_of_steps(num_slots: int, num_steps: int) -> NDArray[np.int64]:
    """Return how many of a window's slots each step gets: as even as can be, the earlier steps one more.

    >>> slots_of_steps(7, 3)
    array([3, 2, 2])
    """
    return num_slots // num_steps + (np.arange(num_steps) < num_slots % num_steps)


def deal_slots(num_samples: NDArray[np.int64], num_steps: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Deal slots to steps so that steps hold about equally many samples and each mixes short and long ones.

    Slots are sorted by their number of samples, which is by length too, and dealt one stratum of ``num_steps`` slots
    at a
    time: the slot with the most samples goes to the step that has the fewest so far.

    Args:
        num_samples: samples of each slot, of shape ``(num_slots,)`` with at least ``num_steps`` slots.
        num_steps: steps of the window.
        rng: draws which step is which.

    Returns:
        The slots of each step, as many as :func:`slots_of_steps` says.

    >>> dealt = deal_slots(np.array([9, 1, 2, 8]), 2, np.random.default_rng(0))
    >>> sorted(slots.tolist() for slots in dealt)
    [[0, 1], [3, 2]]
    """
    quota = slots_of_steps(len(num_samples), num_steps)
    by_count = np.argsort(-num_samples, kind="stable")
    totals = np.zeros(num_steps, dtype=np.int64)
    dealt: list[list[int]] = [[] for _ in range(num_steps)]
    for begin in range(0, len(by_count), num_steps):
        stratum = by_count[begin : begin + num_steps]
        open_steps = np.flatnonzero(quota > begin // num_steps)
        lightest = open_steps[np.lexsort((rng.random(len(open_steps)), totals[open_steps]))]
        for step, slot in zip(lightest.tolist(), stratum.tolist(), strict=True):
            dealt[step].append(slot)
            totals[step] += num_samples[slot]
    return [np.array(slots, dtype=np.int64) for slots in dealt]
