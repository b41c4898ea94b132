"""What balanced validation, test and predict runs did, in figures (layer 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from lightning.pytorch import LightningModule
from numpy.typing import NDArray

from lightning_balance.efficiency import cost_spread, pad_efficiency
from lightning_balance.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class EvaluationFigures:
    """What an evaluation did, over all ranks and loaders; the time is this rank's own."""

    num_samples: int
    num_micro_batches: int
    pad_efficiency: float
    cost_spread: float
    real_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return self.real_tokens / self.seconds if self.seconds else float("nan")

    def __str__(self) -> str:
        return (
            f"{self.num_samples:,} samples in {self.num_micro_batches:,} micro-batches,"
            f" pad efficiency {self.pad_efficiency:.3f}, {self.tokens_per_second:,.0f} tokens/s"
        )

    def log(self, module: LightningModule, prefix: str) -> None:
        """Log them through the module, under names that begin with ``prefix``. A collective call."""
        values = {name: getattr(self, name) for name in ("pad_efficiency", "cost_spread", "tokens_per_second")}
        # Only the time is a rank's own; sync_dist takes the mean of what that leads to.
        module.log_dict(
            {prefix + name: value for name, value in values.items()},
            on_step=False, on_epoch=True, batch_size=1, sync_dist=True,
        )  # fmt: skip


def figures_of(plans: Sequence[StepPlan], num_done: NDArray[np.int64], seconds: float) -> EvaluationFigures | None:
    """The figures of the first ``num_done`` micro-batches of each loader's plan; None where there was none."""
    done = [(plan, slice(0, int(num))) for plan, num in zip(plans, num_done, strict=True) if num]
    if not done:
        return None
    real = sum(int(plan.real_tokens[slots].sum()) for plan, slots in done)
    return EvaluationFigures(
        num_samples=sum(int(plan.num_samples[slots].sum()) for plan, slots in done),
        num_micro_batches=sum(plan.num_samples[slots].size for plan, slots in done),
        pad_efficiency=pad_efficiency(real, sum(int(plan.padded_tokens[slots].sum()) for plan, slots in done)),
        cost_spread=cost_spread(np.concatenate([plan.costs[slots] for plan, slots in done])),
        real_tokens=real,
        seconds=seconds,
    )
