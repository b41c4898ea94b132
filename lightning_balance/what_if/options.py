"""What is compared: the run that a user has in mind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_balance.cost import CostModel
from lightning_balance.validation import LONGEST_ALLOWED, check_choice, check_int_at_least, check_positive_int

__all__ = ["SYNC_NAMES", "PlanOptions", "Sync"]

Sync = Literal["micro_batch", "step"]

SYNC_NAMES: dict[str, Sync] = {
    "fsdp": "micro_batch", "ddp": "micro_batch", "micro_batch": "micro_batch", "step": "step",
}  # fmt: skip
"""When ranks wait for each other, by strategy or by name; Lightning makes DDP wait in every micro-batch, too."""
LARGEST_STEP = 2**22
"""Most samples of an optimizer step: the tables of larger ones do not fit into the memory of every machine."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A run whose batches are compared.

    Attributes:
        num_ranks: data-parallel ranks.
        num_slots: micro-batches per rank and optimizer step of plain batches (``accumulate_grad_batches``).
        batch_size: samples of a plain micro-batch.
        max_tokens: budgets of padded tokens per micro-batch; none: a sweep that fits the lengths.
        lookahead: numbers of consecutive optimizer steps that may exchange samples, 1 for none.
        sync: when ranks wait for each other.
        pad_to_multiple_of: padded lengths are multiples of this.
        cost: modelled time of a micro-batch.
        seed: seed of the shuffle.
        epoch: number of the epoch.
        shuffle: the order is drawn at random; else it is that of the dataset, but for length-grouped batches.
        drop_last: a last step that is not full is left out, and a last plain micro-batch.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or an unknown `sync`.

    Example:
        >>> PlanOptions(num_ranks=64, num_slots=2, batch_size=8).samples_per_step
        1024
    """

    num_ranks: int = 8
    num_slots: int = 1
    batch_size: int = 8
    max_tokens: tuple[int, ...] = ()
    lookahead: tuple[int, ...] = (4,)
    sync: Sync = "micro_batch"
    pad_to_multiple_of: int = 1
    cost: CostModel = field(default_factory=CostModel)
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_slots", "batch_size"):
            check_positive_int(name, getattr(self, name))
        check_positive_int("pad_to_multiple_of", self.pad_to_multiple_of, largest=LONGEST_ALLOWED)
        for name in ("seed", "epoch"):
            check_int_at_least(name, getattr(self, name), 0)
        for name in ("max_tokens", "lookahead"):
            for value in getattr(self, name):
                check_positive_int(name, value)
        check_positive_int("batch_size * num_slots * num_ranks", self.samples_per_step, largest=LARGEST_STEP)
        check_choice("sync", self.sync, ("micro_batch", "step"))

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.batch_size * self.num_slots * self.num_ranks

    def num_steps(self, num_samples: int) -> int:
        """Return the optimizer steps of a planned epoch.

        Raises:
            ValueError: there would be none.
        """
        if self.drop_last and num_samples < self.samples_per_step:
            raise ValueError(
                f"{num_samples} samples do not fill one optimizer step of {self.samples_per_step}, and drop_last=True "
                "leaves out a step that is not full: lower ranks, accumulation or batch size, or set drop_last=False"
            )
        return (num_samples if self.drop_last else num_samples + self.samples_per_step - 1) // self.samples_per_step
