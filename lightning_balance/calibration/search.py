"""The largest budget that fits: geometric growth, then bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

RESOLUTION = 1 / 64
"""The budget found is at most so much, relatively, below one that was refused."""
MARGIN = 1.05
"""Budgets whose share is predicted to be above this are not tried; predictions of linear memory are closer."""
MEMORY_IS_NOT_THE_LIMIT = "memory is not the limit: no optimizer step has more padded tokens"
"""What is to be said of a budget that memory did not limit."""


@dataclass(frozen=True)
class Try:
    """A budget that was tried: its share of the memory limit, infinite where memory ran out."""

    max_tokens: int
    share: float


@dataclass(frozen=True)
class BudgetSearch:
    """What a search found.

    Attributes:
        max_tokens: the largest budget that was run and fitted; None if not even the smallest did.
        tries: everything that was run, in order.
        is_limited: whether memory set the limit; False where the largest budget that is of use fits.
    """

    max_tokens: int | None
    tries: tuple[Try, ...]
    is_limited: bool = True


def find_largest(
    share_of: Callable[[int], float], *, smallest: int, largest: int, resolution: float = RESOLUTION
) -> BudgetSearch:
    """Find the largest budget in ``[smallest, largest]`` whose share of the memory limit is at most 1.

    Budgets double until one does not fit, then the gap is halved. A budget that a line through two earlier tries puts
    clearly over the limit is not run at all: running out of memory costs time, and under FSDP a rank that fails alone
    would leave the others in a collective. The answer itself was always run.

    Args:
        share_of: runs a budget and returns its peak as a share of the limit; infinite where memory ran out.
        smallest: the first budget, in padded tokens.
        largest: no budget above it is of use.
        resolution: stop when the gap between what fits and what does not is below this share.

    Raises:
        ValueError: ``smallest`` is below 1 or above ``largest``.

    >>> find_largest(lambda tokens: tokens / 1000, smallest=64, largest=10_000).max_tokens
    1000
    """
    if not 1 <= smallest <= largest:
        raise ValueError(f"smallest must be in [1, largest={largest}], got {smallest}")
    tries = [Try(smallest, share_of(smallest))]
    if tries[0].share > 1:
        return BudgetSearch(None, tuple(tries))
    low, high = smallest, None
    while low < largest:
        candidate = min(2 * low, largest) if high is None else (low + high) // 2
        if high is not None and high - low <= max(1, int(resolution * low)):
            break
        if _predict(tries, low, candidate) > MARGIN:
            high = candidate
            continue
        tries.append(Try(candidate, share_of(candidate)))
        if tries[-1].share <= 1:
            low = candidate
        else:
            high = candidate
    return BudgetSearch(low, tuple(tries), is_limited=low < largest)


def _predict(tries: list[Try], low: int, candidate: int) -> float:
    """Share of ``candidate`` on the line through the try at ``low`` and the nearest one of at most half its size."""
    at_low = next(done for done in tries if done.max_tokens == low)
    smaller = [done for done in tries if done.max_tokens <= low / 2]
    if not smaller:
        return -inf
    before = max(smaller, key=lambda done: done.max_tokens)
    slope = (at_low.share - before.share) / (low - before.max_tokens)
    return at_low.share + slope * (candidate - low)
