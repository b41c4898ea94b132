"""The plan of an evaluation: a whole data set in as few micro-batches as a token budget allows (layer 0)."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_balance.cost import CostFunction, prepare_cost
from lightning_balance.partition.cutting import FILLER, Cut, deal_by_cost
from lightning_balance.partition.greedy import greedy_starts, group_ends, split_groups
from lightning_balance.plan import StepPlan, build_plan, sort_positions
from lightning_balance.rules import StepRules
from lightning_balance.validation import validate_lengths


def plan_evaluation(
    lengths: Any,
    *,
    num_ranks: int,
    max_tokens: int,
    pad_to_multiple_of: int = 1,
    cost: CostFunction | None = None,
) -> StepPlan:
    """Plan a whole data set whose samples need no optimizer step: each one once over all ranks.

    The samples are sorted by length over the whole set, the longest first, and every micro-batch takes as many as the
    budget allows: that is the fewest micro-batches there are. Their number is rounded up to the same on every rank by
    splitting the largest, and only with fewer samples than places by fillers. Micro-batches of nearly equal cost run at
    the same time, the most expensive first, so that a memory that is too small shows at once. A pure function: equal
    arguments give equal plans on every rank.

    Args:
        lengths: length of each sample in tokens, of shape ``(num_samples,)``.
        num_ranks: ranks that run at the same time.
        max_tokens: hard cap on ``samples * padded length`` of a micro-batch; a longer sample runs alone, as nothing is
            ever left out.
        pad_to_multiple_of: padded lengths are rounded up to a multiple of it.
        cost: modelled time of a micro-batch, by which they are dealt to ranks; None: ``CostModel()``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    >>> plan = plan_evaluation([3, 9, 1, 2], num_ranks=1, max_tokens=9)
    >>> [plan.micro_batch(0, slot).tolist() for slot in range(plan.num_slots)]
    [[1], [0, 3, 2]]
    """
    rules = StepRules.checked(
        num_ranks=num_ranks, num_slots=None, max_tokens=max_tokens, sync="micro_batch",
        pad_to_multiple_of=pad_to_multiple_of, oversize="single", max_shapes=None,
    )  # fmt: skip
    if len(lengths) == 0:
        return _nothing(num_ranks)
    lengths = validate_lengths(lengths)
    padded = rules.padded(lengths)
    order = sort_positions(np.arange(len(lengths)), lengths)
    in_order = padded[order]
    prepared = prepare_cost(cost, in_order, max_count=len(order), max_tokens=max_tokens)
    starts = greedy_starts(group_ends(in_order, max_tokens))
    num_slots = -(-(len(starts) - 1) // num_ranks)
    starts = split_groups(starts, in_order, num_slots * num_ranks)
    counts = np.diff(starts)
    num_fillers = num_slots * num_ranks - len(counts)
    costs = np.append(prepared(counts, in_order[starts[:-1]]), np.zeros(num_fillers))  # fillers come last
    deal = deal_by_cost(costs, num_ranks)
    cut = Cut(starts=starts, deal=np.where(deal < len(counts), deal, FILLER))
    nothing = np.empty(0, dtype=np.int64)
    return build_plan(order, lengths[order], in_order, prepared, cut, sync="micro_batch", skipped=nothing)


def _nothing(num_ranks: int) -> StepPlan:
    """The plan of an empty data set: no micro-batch."""
    none, no_slots = np.empty(0, dtype=np.int64), np.empty((0, num_ranks), dtype=np.int64)
    return StepPlan(
        order=none, starts=no_slots, num_samples=no_slots, padded_lengths=no_slots, real_tokens=no_slots,
        costs=no_slots.astype(np.float64), skipped=none,
    )  # fmt: skip
