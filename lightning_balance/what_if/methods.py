"""The ways to form micro-batches that are compared, and the token budgets that are tried."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_balance.partition.shapes import round_up_to_multiple
from lightning_balance.what_if.options import PlanOptions

__all__ = ["Kind", "Method", "base_budget", "budgets_to_try", "methods_to_compare"]

Kind = Literal["plain_shuffle", "length_grouped", "rebalance", "token_budget"]

_NAMES: dict[Kind, str] = {
    "plain_shuffle": "plain shuffle",
    "length_grouped": "length-grouped",
    "rebalance": "rebalance",
    "token_budget": "token budget",
}
_MOST_BUDGETS = 6


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to form micro-batches.

    Attributes:
        kind: how.
        max_tokens: budget of padded tokens per micro-batch, for ``"token_budget"``.
        lookahead: consecutive optimizer steps that may exchange samples.

    Example:
        >>> Method(kind="token_budget", max_tokens=4096, lookahead=4).name
        'token budget 4,096, lookahead 4'
    """

    kind: Kind
    max_tokens: int | None = None
    lookahead: int = 1

    @property
    def name(self) -> str:
        """The method in words."""
        budget = "" if self.max_tokens is None else f" {self.max_tokens:,}"
        return _NAMES[self.kind] + budget + (f", lookahead {self.lookahead}" if self.lookahead > 1 else "")

    @property
    def is_planned(self) -> bool:
        """Whether the planner makes its steps; the others are exact and cheap."""
        return self.kind in ("rebalance", "token_budget")


def methods_to_compare(lengths: NDArray[np.int64], options: PlanOptions) -> list[Method]:
    """Return every row of the comparison, plain shuffle first.

    Lookahead is tried with rebalance and with the one budget that is nearest to :func:`base_budget`.

    Example:
        >>> methods = methods_to_compare(np.array([3, 5, 9, 2] * 8), PlanOptions(batch_size=2, max_tokens=(16, 32)))
        >>> [method.name for method in methods][-3:]
        ['token budget 32', 'rebalance, lookahead 4', 'token budget 16, lookahead 4']
    """
    budgets = budgets_to_try(lengths, options)
    base = base_budget(lengths, options)
    nearest: int = min(budgets, key=lambda budget: abs(math.log(budget / base)))
    methods = [Method(kind="plain_shuffle"), Method(kind="length_grouped"), Method(kind="rebalance")]
    methods += [Method(kind="token_budget", max_tokens=budget) for budget in budgets]
    for lookahead in sorted({steps for steps in options.lookahead if steps > 1}):
        methods.append(Method(kind="rebalance", lookahead=lookahead))
        methods.append(Method(kind="token_budget", max_tokens=nearest, lookahead=lookahead))
    return methods


def base_budget(lengths: NDArray[np.int64], options: PlanOptions) -> int:
    """Return the tokens of `batch_size` samples of mean length, or the longest padded sample where that is more.

    Example:
        >>> base_budget(np.array([5, 7]), PlanOptions(batch_size=4))
        24
    """
    return max(_longest(lengths, options), math.ceil(options.batch_size * float(lengths.mean())))


def budgets_to_try(lengths: NDArray[np.int64], options: PlanOptions) -> list[int]:
    """Return the budgets of the options, ascending, or a sweep of at most 6.

    The sweep goes from the longest sample, which any budget should hold, to `batch_size` of them, which is the largest
    micro-batch that plain shuffle may need memory for. In between it has the base budget and its multiples by powers
    of two.

    Example:
        >>> budgets_to_try(np.array([10, 10, 10, 70]), PlanOptions(batch_size=8))
        [70, 100, 200, 400, 560]
    """
    if options.max_tokens:
        return sorted(set(options.max_tokens))
    longest, base = _longest(lengths, options), base_budget(lengths, options)
    largest = max(options.batch_size * longest, base)
    factor = 2
    while len(budgets := _sweep(longest, base, largest, factor)) > _MOST_BUDGETS:
        factor *= 2
    return budgets


def _sweep(smallest: int, base: int, largest: int, factor: int) -> list[int]:
    """Return base times powers of a factor, and both ends, without values that lie close together."""
    most = math.ceil(math.log(largest / smallest, factor)) + 1
    powers = [round(base * float(factor) ** power) for power in range(-most, most + 1)]
    between = {budget for budget in powers if 1.25 * smallest < budget < largest / 1.25}
    ends = {end for end in (smallest, largest) if not end / 1.25 < base < end * 1.25}
    return sorted({base, *between, *ends})


def _longest(lengths: NDArray[np.int64], options: PlanOptions) -> int:
    return round_up_to_multiple(int(lengths.max()), options.pad_to_multiple_of)
