"""A run as the plan says it and a run as it happened, for the table of Trainer flags x modes.

`Mode.epochs` asks the planner, not the callback, what each epoch is; `run` trains and returns a `Record`; `check`
compares the two. Samples hold their own index + 1 in every token, so that the gradient of a step tells which samples it
is the mean of; the learning rate falls at every step, so that the last weight tells that each was applied once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_balance import BalanceCallback, BalancedBatchSampler, plan_epoch
from tests.toys import ScalarModel, collate, equal_samples, loader, trainer

LONG_TAIL = (9, 1, 2, 1, 7, 1, 1, 3, 1, 2, 1, 1, 5, 1, 1, 2, 4)
TWO_SIXES = (6, 6, *[1] * 12)
LR, LR_FACTOR = 0.1, 0.9

Slot = tuple[tuple[tuple[int, ...], bool], ...]
"""What runs at one time: for each rank the indices, and whether they are a filler."""


@dataclass(frozen=True)
class Epoch:
    """What an epoch is, by the plan.

    Attributes:
        windows: slots of each optimizer step.
        length: micro-batches per rank that the trainer has to announce.
        lengths: length of each sample of the data.
        is_mean_of_samples: whether the loss is a mean over samples; else over tokens.
        num_open: windows at the end that do not step, because the run ends inside them.
        is_cut: whether a limit or the run's end leaves out samples.
    """

    windows: tuple[tuple[Slot, ...], ...]
    length: int
    lengths: tuple[int, ...]
    is_mean_of_samples: bool = False
    num_open: int = 0
    is_cut: bool = False

    @property
    def slots(self) -> list[Slot]:
        return [*itertools.chain(*self.windows)]

    @property
    def steps(self) -> tuple[tuple[Slot, ...], ...]:
        """The windows that end in an optimizer step."""
        return self.windows[: len(self.windows) - self.num_open]

    @property
    def ends(self) -> list[int]:
        """Micro-batches done at each optimizer step."""
        return [*itertools.accumulate(len(window) for window in self.steps)]

    def served(self, rank: int) -> list[list[int]]:
        return [list(slot[rank][0]) for slot in self.slots]

    @property
    def samples(self) -> list[int]:
        """Every real sample, sorted."""
        return sorted(index for slot in self.slots for indices, is_filler in slot if not is_filler for index in indices)

    @property
    def gradients(self) -> list[float]:
        """Mean over exactly the samples, or the tokens, of each step."""
        return [self._mean(window) for window in self.steps]

    def _mean(self, window: Sequence[Slot]) -> float:
        real = [index for slot in window for indices, is_filler in slot if not is_filler for index in indices]
        units = [1 if self.is_mean_of_samples else self.lengths[index] for index in real]
        return sum((index + 1) * count for index, count in zip(real, units, strict=True)) / sum(units)

    def limited(self, num_batches: int) -> Epoch:
        """The epoch under ``limit_train_batches``: the window that is cut steps with what ran."""
        num_batches = min(num_batches, self.length)
        is_cut = num_batches < self.length
        return dataclasses.replace(self, windows=self._first(num_batches), length=num_batches, is_cut=is_cut)

    def stopped(self, num_batches: int) -> Epoch:
        """The epoch of a run that ends in it: a window that is cut does not step."""
        is_cut = num_batches < self.length
        num_open = int(is_cut and num_batches not in self.ends)
        return dataclasses.replace(self, windows=self._first(num_batches), num_open=num_open, is_cut=is_cut)

    def _first(self, num_batches: int) -> tuple[tuple[Slot, ...], ...]:
        left, kept = num_batches, []
        for window in self.windows:
            kept.append(window[:left])
            left -= len(kept[-1])
        return tuple(window for window in kept if window)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A column of the table.

    Attributes:
        batch_size: of the user's loader in a single process; ranks share it, so that steps are the same.
        accumulate: ``accumulate_grad_batches``.
        options: of the callback.
        lengths: of the samples.
        reduction: what the loss is a mean of.
        is_plain: train without the callback, on a loader with the same micro-batches.
    """

    batch_size: int
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LONG_TAIL
    reduction: str = "token_mean"
    is_plain: bool = False

    def plan_options(self) -> dict[str, Any]:
        is_token_step = self.options.get("step_unit") == "tokens"
        return {
            "samples_per_step": None if is_token_step else self.batch_size * self.accumulate,
            "num_slots": self.accumulate if is_token_step or "max_tokens" not in self.options else None,
            **self.options,
        }

    def epochs(self, num_epochs: int, num_ranks: int = 1, sync: str = "step") -> list[Epoch]:
        by_samples = self.reduction == "sample_mean"
        plans = [
            plan_epoch(self.lengths, num_ranks=num_ranks, epoch=epoch, sync=sync, **self.plan_options())
            for epoch in range(num_epochs)
        ]
        return [
            Epoch(tuple(self._windows(plan, range(num_ranks))), plan.num_micro_batches, self.lengths, by_samples)
            for plan in plans
        ]

    @staticmethod
    def _windows(plan: Any, ranks: range) -> Any:
        for step in map(plan.step, range(plan.num_steps)):
            yield tuple(
                tuple((tuple(step.micro_batch(rank, slot).tolist()), step.is_filler(rank, slot)) for rank in ranks)
                for slot in range(step.num_slots)
            )

    def loader(self, num_ranks: int) -> DataLoader[Any]:
        data = equal_samples(self.lengths)
        if not self.is_plain:
            return loader(data, self.batch_size // num_ranks, shuffle=True)
        sampler = BalancedBatchSampler(self.lengths, **self.plan_options())
        return DataLoader(data, batch_sampler=sampler, collate_fn=collate)


MODES = {
    "rebalance": Mode(batch_size=4),
    # The last of six micro-batches is a filler, because the last step has one sample.
    "rebalance, accumulate 2": Mode(batch_size=4, accumulate=2, reduction="sample_mean"),
    # 6, 8 and 7 micro-batches in epochs 0, 1 and 2, in windows of 1 to 4.
    "token budget": Mode(batch_size=6, options={"max_tokens": 12, "seed": 9}),
    # 3, 5 and 2 micro-batches, each a step.
    "filled to the budget": Mode(
        batch_size=2, options={"max_tokens": 12, "step_unit": "tokens", "seed": 1884}, lengths=TWO_SIXES
    ),
    # 7, 9 and 8 micro-batches in windows of 1 to 3.
    "lookahead": Mode(batch_size=4, options={"max_tokens": 9, "lookahead": 2, "seed": 22}, reduction="sample_mean"),
}


# On two ranks a step that is filled to the budget takes more: 6, 8 and 6 micro-batches per rank.
MODES_ON_RANKS = {
    **MODES,
    "filled to the budget": Mode(
        batch_size=2, options={"max_tokens": 12, "step_unit": "tokens", "seed": 23}, lengths=LONG_TAIL * 2
    ),
}


@dataclass
class Record:
    """What a run did on one rank; lists have one entry an epoch, a validation or an optimizer step."""

    served: list[list[list[int]]] = field(default_factory=list)
    lengths: list[int | float] = field(default_factory=list)
    epoch_weights: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    validations: list[tuple[int, int]] = field(default_factory=list)
    validation_batches: list[int] = field(default_factory=list)
    num_sanity_batches: int = 0
    inference_modes: set[bool] = field(default_factory=set)
    estimates: set[float] = field(default_factory=set)
    requests: list[int] = field(default_factory=list)
    norm_layers: set[str] = field(default_factory=set)
    num_lr_steps: int = 0
    num_zeroed: int = 0
    global_step: int = 0
    num_epochs: int = 0
    weight: float = math.nan
    accumulate: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Observed(ScalarModel):
    """Keeps a `Record`, and asks for the number of steps again and again."""

    asks_early = False
    interval, frequency = "step", 1

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.record = Record()

    def ask(self) -> None:
        self.record.estimates.add(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> Any:
        if self.asks_early:
            self.ask()
        optimizer = super().configure_optimizers()
        when = {"interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), **when}}

    def make_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, LR_FACTOR)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        self.record.num_lr_steps += 1

    def on_train_start(self) -> None:
        self.ask()

    def on_train_epoch_start(self) -> None:
        self.record.lengths.append(self.trainer.num_training_batches)
        self.record.served.append([])
        self.record.epoch_weights.append(read_weight(self))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.record.served[-1].append(batch["index"].tolist())
        self.ask()
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, batch_size=1)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record.gradients.append(self.gradient())

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        self.record.num_zeroed += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.ask()

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.record.validations.append((self.trainer.current_epoch, len(self.record.served[-1])))
            self.record.validation_batches.append(0)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.record.inference_modes.add(torch.is_inference_mode_enabled())
        if self.trainer.sanity_checking:
            self.record.num_sanity_batches += 1
        else:
            self.record.validation_batches[-1] += 1
        self.log("val_loss", float(len(self.record.validations)), batch_size=1)  # always worse than before


class AsksEarly(Observed):
    """Asks before training, so that Lightning builds the loaders early."""

    asks_early = True


class Reloads(Observed):
    """Has the training loader itself, and keeps in which epochs it is requested."""

    mode_loader: Any = None

    def train_dataloader(self) -> Any:
        self.record.requests.append(self.trainer.current_epoch)
        return self.mode_loader


def read_weight(model: ScalarModel) -> float:
    weight = model.layer.weight.detach()  # type: ignore[operator]
    return float(weight.full_tensor() if hasattr(weight, "full_tensor") else weight)  # type: ignore[operator]


def run(
    mode: Mode,
    *more: Callback,
    model: Observed | None = None,
    place: tuple[str, int] = ("single", 1),
    ckpt_path: Any = None,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> Record:
    """Train on the data of ``mode`` with Trainer arguments, 3 epochs unless they say otherwise.

    The callback is the last one in the Trainer's list: it has to work wherever users put it.
    """
    model = model or Observed()
    model.reduction = mode.reduction
    own = [] if mode.is_plain else [BalanceCallback(loss_reduction=mode.reduction, print_summary=False, **mode.options)]
    defaults = {"max_epochs": 3, "num_sanity_val_steps": 0, "accumulate_grad_batches": mode.accumulate}
    used = trainer(*place, callbacks=[*more, *callbacks, *own], **{**defaults, **arguments})
    train = mode.loader(place[1])
    if isinstance(model, Reloads):
        model.mode_loader, train = train, None  # type: ignore[assignment]
    used.fit(model, train, loader(equal_samples(mode.lengths), 6), ckpt_path=ckpt_path)
    record = model.record
    record.global_step, record.num_epochs = used.global_step, used.current_epoch
    record.weight, record.accumulate = read_weight(model), used.accumulate_grad_batches
    record.metrics = {name: float(value) for name, value in used.callback_metrics.items()}
    return record


def check(
    ranks: Sequence[Record],
    epochs: Sequence[Epoch],
    *,
    validations: list[tuple[int, int]] | None = None,
    estimate: float | None = None,
    learning_rates: Sequence[float] | None = None,
    num_lr_steps: int | None = None,
    update: Callable[[float], float] = float,
    rel: float = 1e-5,
) -> None:
    """Assert that the ranks ran ``epochs``, every sample once and nothing else, and stepped with the right gradients.

    Args:
        ranks: the record of each rank.
        epochs: what had to run.
        validations: epoch and micro-batches done at each validation; None: one at the end of every epoch.
        estimate: what ``estimated_stepping_batches`` has to be whenever it is asked; None: the steps really taken.
        learning_rates: of each step; None: falling at every step.
        num_lr_steps: how often the scheduler stepped; None: as often as the optimizer.
        update: what is applied of a gradient.
        rel: relative tolerance of gradients and weight.
    """
    gradients = [gradient for epoch in epochs for gradient in epoch.gradients]
    num_steps = len(gradients)
    if learning_rates is None:
        learning_rates = [LR * LR_FACTOR**step for step in range(num_steps)]
    if validations is None:
        validations = [(index, epoch.length) for index, epoch in enumerate(epochs)]
    weight = 1 - sum(rate * update(gradient) for rate, gradient in zip(learning_rates, gradients, strict=True))
    for epoch in epochs:
        assert epoch.is_cut or epoch.samples == list(range(len(epoch.lengths)))
    for rank, record in enumerate(ranks):
        assert record.lengths == [epoch.length for epoch in epochs]
        assert record.served == [epoch.served(rank) for epoch in epochs]
        assert record.validations == validations
        assert record.gradients == pytest.approx(gradients, rel=rel)
        assert record.global_step == num_steps
        assert record.num_zeroed == sum(len(epoch.windows) for epoch in epochs)
        assert record.num_lr_steps == (num_steps if num_lr_steps is None else num_lr_steps)
        assert record.weight == pytest.approx(weight, rel=rel, abs=rel)
        assert record.estimates == {num_steps if estimate is None else estimate}
