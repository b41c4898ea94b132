"""Sums over optimizer steps: what they were planned to be, and how long they took (layer 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_balance.efficiency import cost_spread, pad_efficiency
from lightning_balance.fitting import Place


@dataclass(frozen=True, kw_only=True)
class DoneStep:
    """An optimizer step that was done.

    Attributes:
        place: where its last micro-batch stands.
        seconds: from the end of the step before to its own.
        waited_seconds: what this rank waited inside its micro-batches.
        planning_seconds: what this rank has spent on planning meanwhile.
    """

    place: Place
    seconds: float
    waited_seconds: float
    planning_seconds: float


class PlannedSteps:
    """What the plan says of some steps' micro-batches, on all ranks.

    Args:
        steps: at least one.
        sync: when ranks wait for each other: in every slot (``"micro_batch"``) or once a ``"step"``.

    Attributes:
        num_samples: samples of each micro-batch; this and what follows has shape ``(slots of all steps, num_ranks)``.
        real_tokens: tokens before padding.
        padded_tokens: tokens after padding.
        synchronised_costs: costs between two synchronisations, of shape ``(num_synchronisations, num_ranks)``.
    """

    def __init__(self, steps: Sequence[DoneStep], sync: str) -> None:
        windows = [(step.place.plan, step.place.num_slots) for step in steps]
        self.num_samples = np.concatenate([plan.num_samples[:num_slots] for plan, num_slots in windows])
        self.real_tokens = np.concatenate([plan.real_tokens[:num_slots] for plan, num_slots in windows])
        self.padded_tokens = np.concatenate([plan.padded_tokens[:num_slots] for plan, num_slots in windows])
        costs: NDArray[np.float64] = np.concatenate([plan.costs[:num_slots] for plan, num_slots in windows])
        starts = np.cumsum([0, *(num_slots for _, num_slots in windows[:-1])])
        self.synchronised_costs = costs if sync == "micro_batch" else np.add.reduceat(costs, starts)


@dataclass
class Totals:
    """Sums over optimizer steps and all ranks. Times in seconds, tokens before (real) and after (padded) padding.

    Seconds of planning and of waiting are this rank's own.
    """

    num_steps: int = 0
    num_micro_batches: int = 0
    num_samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    spread_sum: float = 0.0
    num_synchronisations: int = 0
    largest_micro_batch: int = 0
    modelled_time: float = 0.0
    modelled_samples: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    planning_seconds: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[DoneStep], planned: PlannedSteps) -> Totals:
        """Sum up some steps, at least one."""
        costs, num_samples = planned.synchronised_costs, int(planned.num_samples.sum())
        return cls(
            num_steps=len(steps),
            num_micro_batches=planned.padded_tokens.size,
            num_samples=num_samples,
            real_tokens=int(planned.real_tokens.sum()),
            padded_tokens=int(planned.padded_tokens.sum()),
            spread_sum=cost_spread(costs) * len(costs),
            num_synchronisations=len(costs),
            largest_micro_batch=int(planned.padded_tokens.max()),
            modelled_time=float(costs.max(axis=1).sum()),
            modelled_samples=num_samples,
            seconds=sum(step.seconds for step in steps),
            waited_seconds=sum(step.waited_seconds for step in steps),
            planning_seconds=sum(step.planning_seconds for step in steps),
        )

    def add(self, other: Totals) -> None:
        """Add those of other steps; the largest micro-batch is the larger one."""
        largest = max(self.largest_micro_batch, other.largest_micro_batch)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.largest_micro_batch = largest

    @property
    def pad_efficiency(self) -> float:
        """Real over padded tokens."""
        return pad_efficiency(self.real_tokens, self.padded_tokens)

    @property
    def cost_spread(self) -> float:
        """Mean spread of a synchronisation."""
        return self.spread_sum / self.num_synchronisations if self.num_synchronisations else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second of training."""
        return self.real_tokens / self.seconds if self.seconds else math.nan
