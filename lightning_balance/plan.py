"""The plan of one optimizer step: which samples share a micro-batch, in which slot and on which rank it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction, PreparedCost, prepare_cost
from lightning_balance.partition import FILLER, Cut, Problem, arrange, cut, fewest_groups, make_problem, smallest_budget
from lightning_balance.rules import SYNCS, StepRules
from lightning_balance.validation import check_choice, validate_lengths


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """Micro-batches of one optimizer step, one per slot and rank.

    Every sample of the step is in exactly one micro-batch, and none is empty. Where a step has fewer samples than
    micro-batches, the missing ones are fillers: copies of the shortest sample that keep the ranks in step and whose
    gradient has to get weight 0.

    Attributes:
        order: positions of the samples, from longest to shortest, of shape ``(num_samples,)``.
        starts: where in ``order`` each micro-batch starts; this and what follows has shape ``(num_slots, num_ranks)``.
        num_samples: samples of each micro-batch; 0 for a filler.
        padded_lengths: length to which a micro-batch is padded, in tokens.
        real_tokens: sum of the lengths of its samples; 0 for a filler.
        costs: its modelled cost; that of a filler counts.
        skipped: positions left out by ``oversize="skip"``.
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_samples: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    real_tokens: NDArray[np.int64]
    costs: NDArray[np.float64]
    skipped: NDArray[np.int64]

    @property
    def num_slots(self) -> int:
        """Micro-batches per rank."""
        return int(self.starts.shape[0])

    @property
    def num_ranks(self) -> int:
        """Micro-batches per slot."""
        return int(self.starts.shape[1])

    @property
    def padded_tokens(self) -> NDArray[np.int64]:
        """Tokens that each micro-batch really runs, fillers too, of shape ``(num_slots, num_ranks)``."""
        tokens: NDArray[np.int64] = np.maximum(self.num_samples, 1) * self.padded_lengths
        return tokens

    def micro_batch(self, rank: int, slot: int) -> NDArray[np.int64]:
        """Return the positions of a micro-batch, longest sample first; for a filler the one copied sample.

        Raises:
            IndexError: there is no such rank or slot.
        """
        self._check_place(rank, slot)
        start = self.starts[slot, rank]
        positions: NDArray[np.int64] = self.order[start : start + max(int(self.num_samples[slot, rank]), 1)].copy()
        return positions

    def is_filler(self, rank: int, slot: int) -> bool:
        """Return whether a micro-batch only keeps the ranks in step: its gradient has weight 0."""
        self._check_place(rank, slot)
        return bool(self.num_samples[slot, rank] == 0)

    def rotated(self, shift: int) -> StepPlan:
        """Return the plan with every micro-batch ``shift`` ranks further, so that no rank is always the heaviest.

        >>> plan = plan_step([9, 1, 1, 1], num_ranks=2)
        >>> plan.micro_batch(0, 0), plan.rotated(1).micro_batch(1, 0)
        (array([0]), array([0]))
        """
        if shift % self.num_ranks == 0:
            return self
        ranks = (np.arange(self.num_ranks) - shift) % self.num_ranks
        moved = {
            name: getattr(self, name)[:, ranks]
            for name in ("starts", "num_samples", "padded_lengths", "real_tokens", "costs")
        }
        return replace(self, **moved)

    def modelled_time(self, sync: str = "micro_batch") -> float:
        """Return how long the step takes in units of the cost.

        With ``sync="micro_batch"`` ranks wait for each other in every slot: the sum over slots of the slowest rank.
        With ``"step"`` they wait once: the slowest rank's sum over its slots.

        >>> plan_step([9, 1, 1, 1], num_ranks=2, cost=lambda n, length: n * length).modelled_time("step")
        9.0
        """
        check_choice("sync", sync, SYNCS)
        time = self.costs.max(axis=1).sum() if sync == "micro_batch" else self.costs.sum(axis=0).max()
        return float(time)

    def _check_place(self, rank: int, slot: int) -> None:
        for name, value, size in (("rank", rank, self.num_ranks), ("slot", slot, self.num_slots)):
            if not 0 <= value < size:
                raise IndexError(f"{name} must be in [0, {size}), got {value}")


def plan_step(
    lengths: Any,
    *,
    num_ranks: int,
    num_slots: int | None = None,
    max_tokens: int | None = None,
    cost: CostFunction | None = None,
    sync: str = "micro_batch",
    pad_to_multiple_of: int = 1,
    oversize: str = "single",
    max_shapes: int | None = None,
) -> StepPlan:
    """Plan one optimizer step over the given samples: cut them into micro-batches and deal these to slots and ranks.

    A pure function: equal arguments give equal plans on every rank. Without ``max_tokens`` no micro-batch gets more
    padded tokens than a plain one could: ``ceil(samples / micro-batches) * longest padded length``.

    Args:
        lengths: length of each sample in tokens, of shape ``(num_samples,)``.
        num_ranks: ranks that run at the same time.
        num_slots: micro-batches per rank; None: as many as ``max_tokens`` needs, or 1 without it.
        max_tokens: hard cap on ``samples * padded length`` of a micro-batch.
        cost: modelled time of a micro-batch, monotone in both arguments; None: ``CostModel()``.
        sync: when ranks wait for each other: after every ``"micro_batch"`` (FSDP) or once a ``"step"`` (DDP).
        pad_to_multiple_of: padded lengths are rounded up to a multiple of it.
        oversize: a sample longer than ``max_tokens`` becomes a ``"single"`` micro-batch, an ``"error"``, or is left
            out (``"skip"``).
        max_shapes: most distinct padded lengths; None: no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, the cost is not monotone, a sample is over the budget and ``oversize``
            is ``"error"``, or ``max_tokens`` does not fit ``num_slots``.

    >>> plan = plan_step([513, 100, 100], num_ranks=1, max_tokens=512)
    >>> [plan.micro_batch(0, slot).tolist() for slot in range(plan.num_slots)]
    [[0], [1, 2]]
    """
    lengths = validate_lengths(lengths)
    rules = StepRules.checked(
        num_ranks=num_ranks, num_slots=num_slots, max_tokens=max_tokens, sync=sync,
        pad_to_multiple_of=pad_to_multiple_of, oversize=oversize, max_shapes=max_shapes,
    )  # fmt: skip
    rules = rules.with_shapes(lengths)
    padded = rules.padded(lengths)
    kept, skipped = rules.sort_out_oversize(lengths, padded)
    if len(kept) == 0:
        raise ValueError(
            f"oversize='skip' leaves no sample: all {len(lengths)} are longer than max_tokens={max_tokens}; "
            "raise max_tokens"
        )
    rules = rules.with_default_cap(len(kept), int(padded[kept].max()))
    prepared = prepare_cost(cost, padded[kept], max_count=len(kept), max_tokens=rules.cap)
    return plan_positions(kept, lengths, padded, prepared, rules, skipped=skipped)


def plan_positions(
    positions: NDArray[np.int64],
    lengths: NDArray[np.int64],
    padded: NDArray[np.int64],
    cost: PreparedCost,
    rules: StepRules,
    *,
    skipped: NDArray[np.int64],
) -> StepPlan:
    """Plan the samples at ``positions``; ``lengths`` and ``padded`` are those of the whole data set.

    Raises:
        ValueError: ``max_tokens`` does not fit ``num_slots``.
    """
    order = sort_positions(positions, lengths)
    cut_ = cut_sorted(padded[order], cost, rules)
    return build_plan(order, lengths[order], padded[order], cost, cut_, sync=rules.sync, skipped=skipped)


def cut_sorted(padded: NDArray[np.int64], cost: PreparedCost, rules: StepRules) -> Cut:
    """Cut and deal sorted samples by the rules.

    Raises:
        ValueError: ``max_tokens`` does not fit ``num_slots``.
    """
    if rules.num_slots is None:
        return cut_within_budget(padded, cost, rules)
    if rules.max_tokens is not None:
        check_fits(padded, rules.max_tokens, rules.num_slots, rules.num_ranks)
    return cut(make_problem(padded, cost, rules.cap, rules.num_ranks), rules.num_slots, rules.sync)


def cut_within_budget(padded: NDArray[np.int64], cost: PreparedCost, rules: StepRules, min_slots: int = 1) -> Cut:
    """Cut into the fewest slots that a budget allows, or into more while these are cheaper.

    More slots pad less, so without a price per micro-batch they would always be cheaper: only where the cost has one is
    there anything to weigh.
    """
    assert rules.max_tokens is not None
    problem = make_problem(padded, cost, rules.max_tokens, rules.num_ranks)
    num_slots = max(-(-fewest_groups(padded, rules.max_tokens) // rules.num_ranks), min_slots)
    best = cut(problem, num_slots, rules.sync)
    if problem.price == 0:
        return best
    time = modelled_time(problem, best, rules.sync)
    while num_slots * rules.num_ranks < len(padded):
        num_slots += 1
        more = cut(problem, num_slots, rules.sync)
        more_time = modelled_time(problem, more, rules.sync)
        if more_time >= time:
            break
        best, time = more, more_time
    return best


def modelled_time(problem: Problem, cut_: Cut, sync: str) -> float:
    """Return how long a cut takes; fillers cost as much as the shortest sample by itself."""
    costs = np.append(problem.group_costs(cut_.starts), problem.single_costs[-1])[cut_.deal]
    return float(costs.max(axis=1).sum() if sync == "micro_batch" else costs.sum(axis=0).max())


def sort_positions(positions: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions from longest to shortest; equal lengths keep their order."""
    return positions[np.argsort(-lengths[positions], kind="stable")]


def check_fits(sorted_padded: NDArray[np.int64], max_tokens: int, num_slots: int, num_ranks: int) -> None:
    """Check that a budget holds the samples in a fixed number of slots.

    Raises:
        ValueError: it does not; the message names the smallest number of slots and the smallest budget that would do.
    """
    needed = fewest_groups(sorted_padded, max_tokens)
    if needed > num_slots * num_ranks:
        budget = smallest_budget(sorted_padded, num_slots * num_ranks)
        raise ValueError(
            f"max_tokens={max_tokens} does not hold {len(sorted_padded)} samples in num_slots={num_slots} on "
            f"num_ranks={num_ranks}: use num_slots >= {-(-needed // num_ranks)} or max_tokens >= {budget}"
        )


def build_plan(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    padded: NDArray[np.int64],
    cost: PreparedCost,
    cut_: Cut,
    *,
    sync: str,
    skipped: NDArray[np.int64],
) -> StepPlan:
    """Return the plan of a cut of sorted samples; ``lengths`` and ``padded`` are in the order of ``order``."""
    is_filler = cut_.deal == FILLER
    starts = np.where(is_filler, len(order) - 1, cut_.starts[cut_.deal])
    counts = np.where(is_filler, 0, np.diff(cut_.starts, append=0)[cut_.deal])
    costs = cost(np.maximum(counts, 1), padded[starts])
    places = arrange(costs, sync)
    starts, counts, costs = starts[places], counts[places], costs[places]
    totals = np.concatenate([[0], np.cumsum(lengths)])
    return StepPlan(
        order=order,
        starts=starts,
        num_samples=counts,
        padded_lengths=padded[starts],
        real_tokens=totals[starts + counts] - totals[starts],
        costs=costs,
        skipped=skipped,
    )
