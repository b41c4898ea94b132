"""What the ranks run in the steps of an epoch, as arrays: what every figure of the report is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.cost import CostFunction, prepare_cost
from lightning_balance.epoch import EpochPlan
from lightning_balance.partition.shapes import round_up_to_multiple
from lightning_balance.plan import StepPlan

__all__ = ["MicroBatches", "batches_of", "micro_batches_of"]

NOT_PLACED = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatches:
    """Micro-batches of some steps of an epoch, and the samples in them.

    Attributes:
        counts: samples of each micro-batch, copies left out; this and what follows has shape
            ``(num_slots of all steps, num_ranks)``.
        num_run: samples that really run, copies too.
        padded_lengths: length to which they are padded, in tokens.
        real_tokens: tokens of the samples, copies left out.
        costs: modelled time.
        num_slots_per_step: slots of each step, of shape ``(num_steps,)``.
        step_indices: which step of the epoch each one is, of the same shape.
        lengths: lengths of the samples, step after step, copies left out, of shape ``(num_samples,)``.
        plain_steps: step of the plain shuffle of each of them; ``None`` where it is the sample's own step.
    """

    counts: NDArray[np.int64]
    num_run: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    real_tokens: NDArray[np.int64]
    costs: NDArray[np.float64]
    num_slots_per_step: NDArray[np.int64]
    step_indices: NDArray[np.int64]
    lengths: NDArray[np.int64]
    plain_steps: NDArray[np.int64] | None

    @property
    def num_ranks(self) -> int:
        """Ranks that run at the same time."""
        return int(self.costs.shape[1])

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are here; the epoch may have more."""
        return len(self.num_slots_per_step)

    @property
    def padded_tokens(self) -> NDArray[np.int64]:
        """Tokens that each micro-batch processes."""
        return self.num_run * self.padded_lengths

    @property
    def first_slots(self) -> NDArray[np.int64]:
        """Where each step begins in the arrays of micro-batches."""
        starts: NDArray[np.int64] = np.cumsum(self.num_slots_per_step) - self.num_slots_per_step
        return starts

    @property
    def samples_per_step(self) -> NDArray[np.int64]:
        """Samples of each step over all ranks."""
        samples: NDArray[np.int64] = np.add.reduceat(self.counts.sum(axis=1), self.first_slots)
        return samples

    def synchronised_costs(self, sync: str) -> NDArray[np.float64]:
        """Return costs per synchronisation and rank: of a slot for ``"micro_batch"``, of a step for ``"step"``."""
        return self.costs if sync == "micro_batch" else np.add.reduceat(self.costs, self.first_slots)

    def step_times(self, sync: str) -> NDArray[np.float64]:
        """Return the modelled time of each step, of shape ``(num_steps,)``: its slowest path."""
        slowest = self.synchronised_costs(sync).max(axis=1)
        times: NDArray[np.float64] = np.add.reduceat(slowest, self.first_slots) if sync == "micro_batch" else slowest
        return times

    def select(self, places: NDArray[np.int64]) -> MicroBatches:
        """Return some of the steps, by their place in ``step_indices``, in the order that is asked for."""
        slots = _ranges(self.first_slots[places], self.num_slots_per_step[places])
        samples = self.samples_per_step
        own = _ranges((np.cumsum(samples) - samples)[places], samples[places])
        return MicroBatches(
            counts=self.counts[slots],
            num_run=self.num_run[slots],
            padded_lengths=self.padded_lengths[slots],
            real_tokens=self.real_tokens[slots],
            costs=self.costs[slots],
            num_slots_per_step=self.num_slots_per_step[places],
            step_indices=self.step_indices[places],
            lengths=self.lengths[own],
            plain_steps=None if self.plain_steps is None else self.plain_steps[own],
        )


def micro_batches_of(
    plan: EpochPlan,
    lengths: NDArray[np.int64],
    steps: Sequence[StepPlan],
    *,
    step_indices: NDArray[np.int64],
    first_places: NDArray[np.int64],
) -> MicroBatches:
    """Return planned steps as arrays.

    Args:
        plan: the epoch that the steps are of.
        lengths: length of every sample of the dataset in tokens.
        steps: the planned steps.
        step_indices: which step of the epoch each one is.
        first_places: where in the order of the shuffle the slice begins that each step would be without lookahead.
    """
    served = np.concatenate([step.order for step in steps])
    counts = np.concatenate([step.num_samples for step in steps])
    plain_steps = np.full(len(lengths), NOT_PLACED, dtype=np.int64)
    for step, index, place in zip(steps, step_indices.tolist(), first_places.tolist(), strict=True):
        plain_steps[plan.order.slice(place, place + len(step.order))] = index
    return MicroBatches(
        counts=counts,
        num_run=np.maximum(counts, 1),  # a filler runs one copied sample
        padded_lengths=np.concatenate([step.padded_lengths for step in steps]),
        real_tokens=np.concatenate([step.real_tokens for step in steps]),
        costs=np.concatenate([step.costs for step in steps]),
        num_slots_per_step=np.array([step.num_slots for step in steps], dtype=np.int64),
        step_indices=step_indices,
        lengths=lengths[served],
        plain_steps=plain_steps[served],
    )


def batches_of(
    served: NDArray[np.int64],
    is_copy: NDArray[np.bool_],
    *,
    batch_size: int,
    num_slots: int,
    cost: CostFunction | None,
    pad_to_multiple_of: int,
    plain_steps: NDArray[np.int64] | None = None,
) -> MicroBatches:
    """Return micro-batches of equal counts as arrays; each rank cuts its own samples one batch after the other.

    Args:
        served: lengths of the samples that each rank runs, of shape ``(samples per rank, num_ranks)``.
        is_copy: which of them are repeated only to give ranks equally many, of the same shape.
        batch_size: samples of a micro-batch; a last one may have fewer.
        num_slots: micro-batches of a step; a last step may have fewer.
        cost: modelled cost of a micro-batch, ``None`` for ``CostModel()``.
        pad_to_multiple_of: padded lengths are rounded up to it.
        plain_steps: step of the plain shuffle of each sample, of the shape of `served`; ``None``: its own.
    """
    per_rank, num_ranks = served.shape
    starts = np.arange(0, per_rank, batch_size)
    num_run = np.broadcast_to(np.diff(starts, append=per_rank)[:, None], (len(starts), num_ranks))
    padded = round_up_to_multiple(np.maximum.reduceat(served, starts), pad_to_multiple_of)
    num_slots_per_step = np.diff(np.arange(0, len(starts), num_slots), append=len(starts))
    return MicroBatches(
        counts=num_run - np.add.reduceat(is_copy, starts, dtype=np.int64),
        num_run=num_run,
        padded_lengths=padded,
        real_tokens=np.add.reduceat(np.where(is_copy, 0, served), starts),
        costs=prepare_cost(cost, padded.ravel(), max_count=batch_size)(num_run, padded),
        num_slots_per_step=num_slots_per_step,
        step_indices=np.arange(len(num_slots_per_step)),
        lengths=served[~is_copy],
        plain_steps=None if plain_steps is None else plain_steps[~is_copy],
    )


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``starts[0], starts[0] + 1, ...`` of each range, one range after the other."""
    ends = np.cumsum(counts)
    ranges: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return ranges
