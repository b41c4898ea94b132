"""Who waits for whom: a few consecutive steps of plain shuffle and of rebalance, of the same samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.micro_batches import MicroBatches
from lightning_balance.what_if.comparison import Comparison
from lightning_balance.what_if.options import Sync
from lightning_balance.what_if.planning import FEWEST_SLOTS_TOGETHER

__all__ = ["Lane", "Timeline", "timeline_of"]

MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Lane:
    """When each rank is busy in some steps; all ranks start at 0.

    Attributes:
        starts: when each micro-batch starts, of shape ``(num_slots, num_ranks)``, in the unit of the cost.
        costs: how long it takes, of the same shape.
        is_last: which slots end a step, of shape ``(num_slots,)``.
        end: when the slowest rank of the last step is done.
    """

    starts: NDArray[np.float64]
    costs: NDArray[np.float64]
    is_last: NDArray[np.bool_]
    end: float

    @property
    def waiting_share(self) -> float:
        """Share of all ranks' time in which they wait for a slower one."""
        return 1.0 - float(self.costs.sum()) / (int(self.costs.shape[1]) * self.end)

    @property
    def synchronisations(self) -> NDArray[np.float64]:
        """Ends of the steps."""
        ends = np.append(self.starts[1:].max(axis=1), self.end)
        return ends[self.is_last]


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """The same steps with two methods.

    Attributes:
        step_indices: which steps of the epoch these are.
        ranks: the ranks that are drawn; all of them up to 64, else evenly spaced ones and the slowest ones.
        num_ranks: how many there are.
        plain: plain shuffle, all ranks.
        rebalance: rebalance, all ranks.
    """

    step_indices: list[int]
    ranks: NDArray[np.int64]
    num_ranks: int
    plain: Lane
    rebalance: Lane


def timeline_of(comparison: Comparison) -> Timeline:
    """Return the most typical planned steps: total times, and their ratio, nearest to those of all planned steps."""
    sync = comparison.options.sync
    num_together = min(-(-FEWEST_SLOTS_TOGETHER // comparison.options.num_slots), comparison.num_steps)
    places = _typical_places(
        comparison.plain.step_indices,
        comparison.plain.step_times(sync),
        comparison.rebalance.step_times(sync),
        num_together,
    )
    plain = lane_of(comparison.plain.select(places), sync)
    rebalance = lane_of(comparison.rebalance.select(places), sync)
    return Timeline(
        step_indices=comparison.plain.step_indices[places].tolist(),
        ranks=_ranks_to_draw(plain, rebalance),
        num_ranks=comparison.options.num_ranks,
        plain=plain,
        rebalance=rebalance,
    )


def lane_of(batches: MicroBatches, sync: Sync) -> Lane:
    """Return when micro-batches run if each synchronisation waits for its slowest rank.

    Example:
        >>> from lightning_balance.shuffle import EpochOrder
        >>> from lightning_balance.unbalanced import plain_batches
        >>> order = EpochOrder(4, seed=0, epoch=0, shuffle=False)
        >>> batches = plain_batches(
        ...     np.array([1, 3, 2, 1]), order, batch_size=1, num_ranks=2, num_slots=2, cost=lambda n, length: n * length
        ... )
        >>> lane_of(batches, "micro_batch").starts.tolist(), lane_of(batches, "step").starts.tolist()
        ([[0.0, 0.0], [3.0, 3.0]], [[0.0, 0.0], [1.0, 3.0]])
    """
    waits = np.zeros(len(batches.costs), dtype=bool)
    waits[np.cumsum(batches.num_slots_per_step) - 1] = True
    is_last = waits.copy()
    if sync == "micro_batch":
        waits[:] = True
    starts = np.empty_like(batches.costs)
    now = np.zeros(batches.num_ranks)
    for slot, costs in enumerate(batches.costs):
        starts[slot] = now
        now = now + costs
        if waits[slot]:
            now = np.full_like(now, now.max())
    return Lane(starts=starts, costs=batches.costs, is_last=is_last, end=float(now.max()))


def _typical_places(
    steps: NDArray[np.int64], plain: NDArray[np.float64], rebalance: NDArray[np.float64], num_together: int
) -> NDArray[np.int64]:
    """Return the places of the consecutive steps whose times are the least unusual."""
    firsts = _starts_of_runs(steps, num_together)
    while not len(firsts):  # an epoch's last steps may be fewer
        num_together -= 1
        firsts = _starts_of_runs(steps, num_together)
    places: NDArray[np.int64] = firsts[:, None] + np.arange(num_together)
    of_plain, of_rebalance = plain[places].mean(axis=1), rebalance[places].mean(axis=1)
    ratio = rebalance.sum() / plain.sum()
    unusual = np.abs(np.log(of_plain / plain.mean())) + np.abs(np.log(of_rebalance / of_plain / ratio))
    typical: NDArray[np.int64] = places[int(np.argmin(unusual))]
    return typical


def _starts_of_runs(steps: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return where `size` consecutive steps begin."""
    starts: NDArray[np.int64] = np.flatnonzero(steps[size - 1 :] - steps[: max(len(steps) - size + 1, 0)] == size - 1)
    return starts


def _ranks_to_draw(plain: Lane, rebalance: Lane) -> NDArray[np.int64]:
    num_ranks = plain.costs.shape[1]
    if num_ranks <= MOST_RANKS:
        return np.arange(num_ranks)
    last = [(lane.starts + lane.costs).argmax(axis=1) for lane in (plain, rebalance)]
    slowest = np.unique(np.concatenate(last))[: MOST_RANKS // 2]
    spaced = np.linspace(0, num_ranks - 1, MOST_RANKS - len(slowest)).astype(np.int64)
    return np.union1d(slowest, spaced)
