"""The micro-batches that a sampler serves to all ranks, and the figures that say how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_balance import CostModel
from lightning_balance.efficiency import model_efficiency, pad_efficiency, slot_efficiency
from lightning_balance.epoch import EpochPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedEpoch:
    """Micro-batches of an epoch, slot by slot, rank by rank.

    Attributes:
        samples: dataset indices of all micro-batches one after another, copies and fillers too.
        counts: samples that each micro-batch runs, of shape ``(num_slots of all steps, num_ranks)``.
        num_slots_per_step: slots of each optimizer step.
    """

    samples: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_slots_per_step: NDArray[np.int64]

    @classmethod
    def of(cls, micro_batches: Sequence[ArrayLike], num_ranks: int, num_slots_per_step: ArrayLike) -> ServedEpoch:
        """Return the epoch of micro-batches in the order slot 0 rank 0, slot 0 rank 1, ...

        Raises:
            ValueError: ranks would get unequal numbers of micro-batches, or a micro-batch is empty.

        >>> ServedEpoch.of([[3], [0, 1]], num_ranks=2, num_slots_per_step=[1]).counts
        array([[1, 2]])
        """
        arrays = [np.asarray(micro_batch, dtype=np.int64) for micro_batch in micro_batches]
        counts = np.array([len(array) for array in arrays], dtype=np.int64).reshape(-1, num_ranks)
        slots = np.asarray(num_slots_per_step, dtype=np.int64)
        if slots.sum() != len(counts) or (counts == 0).any():
            raise ValueError(f"{len(counts)} slots were served for {slots.sum()} planned ones, or one of them is empty")
        return cls(samples=np.concatenate(arrays), counts=counts, num_slots_per_step=slots)

    def padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the longest sample of each micro-batch, one after another.

        >>> ServedEpoch.of([[3], [0, 1]], num_ranks=2, num_slots_per_step=[1]).padded_lengths(np.array([5, 7, 0, 2]))
        array([2, 7])
        """
        counts = self.counts.ravel()
        longest: NDArray[np.int64] = np.maximum.reduceat(lengths[self.samples], np.cumsum(counts) - counts)
        return longest

    @classmethod
    def of_plan(cls, plan: EpochPlan) -> ServedEpoch:
        """Return what a plan serves."""
        micro_batches, slots = [], []
        for index in range(plan.num_steps):
            step = plan.step(index)
            slots.append(step.num_slots)
            micro_batches += [
                step.micro_batch(rank, slot) for slot in range(step.num_slots) for rank in range(step.num_ranks)
            ]
        return cls.of(micro_batches, plan.num_ranks, slots)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How good the micro-batches of an epoch are.

    Attributes:
        num_steps: optimizer steps.
        pad_efficiency: real over padded tokens; what a copy holds is not real.
        slot_efficiency: mean over max cost of the ranks of a slot, averaged over slots.
        model_efficiency: cost of the samples without padding or waiting over what all ranks are paid for when they
            wait for each other in every slot.
        model_efficiency_step: the same when they wait once a step.
        largest_micro_batch: most padded tokens of a micro-batch.
        num_over_cap: micro-batches of more than one sample above the budget; 0 without a budget.
        num_lost: samples of the data set that are never served.
        num_copies: samples served more than once, fillers included.
        num_shapes: distinct pairs of sample count and padded length.
        least_per_step: fewest samples of a step, the last one excepted.
        most_per_step: most samples of a step.
    """

    num_steps: int
    pad_efficiency: float
    slot_efficiency: float
    model_efficiency: float
    model_efficiency_step: float
    largest_micro_batch: int
    num_over_cap: int
    num_lost: int
    num_copies: int
    num_shapes: int
    least_per_step: int
    most_per_step: int

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return asdict(self)


def figures_of(
    epoch: ServedEpoch, lengths: NDArray[np.int64], *, max_tokens: int | None, cost: CostModel | None = None
) -> Figures:
    """Return the figures of an epoch; a sample served twice is useful once.

    >>> epoch = ServedEpoch.of([[0], [1]], num_ranks=2, num_slots_per_step=[1])
    >>> figures_of(epoch, np.array([4, 2]), max_tokens=4, cost=CostModel(alpha=0.0)).model_efficiency
    0.75
    """
    cost = cost or CostModel()
    counts = epoch.counts.ravel()
    padded_lengths = epoch.padded_lengths(lengths)
    padded_tokens = counts * padded_lengths
    costs = cost.cost(counts, padded_lengths).reshape(epoch.counts.shape)
    distinct = np.unique(epoch.samples)
    useful = float(cost.cost(1, lengths[distinct]).sum())
    num_ranks = epoch.counts.shape[1]
    first_slots = np.cumsum(epoch.num_slots_per_step) - epoch.num_slots_per_step
    per_step = np.add.reduceat(epoch.counts.sum(axis=1), first_slots)
    sum_per_step = np.add.reduceat(costs, first_slots, axis=0)
    over = 0 if max_tokens is None else int(((padded_tokens > max_tokens) & (counts > 1)).sum())
    return Figures(
        num_steps=len(epoch.num_slots_per_step),
        pad_efficiency=pad_efficiency(lengths[distinct], padded_tokens),
        slot_efficiency=slot_efficiency(costs),
        model_efficiency=model_efficiency(useful, float(costs.max(axis=1).sum()), num_ranks),
        model_efficiency_step=model_efficiency(useful, float(sum_per_step.max(axis=1).sum()), num_ranks),
        largest_micro_batch=int(padded_tokens.max()),
        num_over_cap=over,
        num_lost=len(lengths) - len(distinct),
        num_copies=len(epoch.samples) - len(distinct),
        num_shapes=len(np.unique(np.stack([counts, padded_lengths]), axis=1).T),
        least_per_step=int(per_step[:-1].min() if len(per_step) > 1 else per_step[0]),
        most_per_step=int(per_step.max()),
    )
