"""Windows of any length behave like plain accumulation windows for everything else in Lightning.

What Trainer flags and Lightning's own callbacks do is in tests/test_trainer_flags.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_balance import BalanceCallback
from tests.distributed import run_ranks
from tests.test_gradients import fit, reference_gradient
from tests.toys import ScalarModel, TokenDataset, loader, trainer

LENGTHS = [5, 1, 2, 8, 1, 1, 3, 2, 6, 1, 4, 2, 2, 7, 1, 1, 3, 3]
DATA = TokenDataset([[float(i + 1)] * n for i, n in enumerate(LENGTHS)])
BUDGET: dict[str, Any] = {"max_tokens": 8, "samples_per_step": 6, "seed": 0}  # steps of 2 to 4 micro-batches


def run(model: ScalarModel, *callbacks: Callback, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    balance = BalanceCallback(loss_reduction=model.reduction, print_summary=False, **(options or BUDGET))
    used = trainer(callbacks=[balance, *callbacks], **arguments)
    used.fit(model, loader(DATA, 6, shuffle=True), loader(DATA, 6))
    return used


def test_windows_have_different_lengths_here() -> None:
    model = ScalarModel()
    run(model)
    assert len(model.gradients) == 3
    assert len(model.served) > 6


class CountsReductions(ScalarModel):
    """Counts the gradient all-reduces of DDP by its communication hook."""

    num_reductions = 0

    def on_train_start(self) -> None:
        self.trainer.strategy.model.register_comm_hook(self, count_and_reduce)  # type: ignore[union-attr, operator]


def count_and_reduce(model, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations and refuses strings
    model.num_reductions += 1
    return allreduce_hook(None, bucket)


def run_counting() -> tuple[int, int, int]:
    model = CountsReductions()
    fit(DATA, "ddp", 2, model=model, batch_size=3, **BUDGET)
    return model.num_reductions, len(model.gradients), len(model.served)


def test_ddp_synchronises_once_per_step() -> None:
    for num_reductions, num_steps, num_micro_batches in run_ranks(run_counting, 2):
        assert num_reductions == num_steps == 3
        assert num_micro_batches > num_steps


def run_with_tensor_parallel(data_parallel: int, tensor_parallel: int) -> tuple[list[list[int]], list[float]]:
    strategy = ModelParallelStrategy(data_parallel_size=data_parallel, tensor_parallel_size=tensor_parallel)
    model = TensorParallelToy()
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, **BUDGET)
    used = trainer(strategy, 2, callbacks=[balance])
    used.fit(model, loader(DATA, 6 // data_parallel, shuffle=True))
    return model.served, model.gradients


class TensorParallelToy(ScalarModel):
    """Every tensor-parallel peer holds the whole weight: what matters here is which batches it gets."""

    def configure_model(self) -> None:
        assert isinstance(self.trainer.strategy, ModelParallelStrategy)
        if self.trainer.strategy.device_mesh["data_parallel"].size() > 1:
            super().configure_model()


@pytest.mark.parametrize(("data_parallel", "tensor_parallel"), [(1, 2), (2, 1)])
def test_the_plan_counts_data_parallel_ranks(data_parallel: int, tensor_parallel: int) -> None:
    ranks = run_ranks(run_with_tensor_parallel, 2, data_parallel, tensor_parallel)
    whole = ScalarModel()
    run(whole)
    for _, gradients in ranks:
        assert gradients == pytest.approx(whole.gradients, rel=1e-5)
    assert (ranks[0][0] == ranks[1][0]) == (tensor_parallel == 2)
    everything = sorted(i for served, _ in ranks for micro_batch in served for i in micro_batch)
    assert everything == sorted(list(range(len(DATA))) * tensor_parallel)


class LossSeen(Callback):
    """Keeps what other callbacks get: the loss of each micro-batch, gradients before each step, epoch lengths."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[float] = []
        self.lengths: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lengths.append(trainer.num_training_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(pl_module.gradient())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class OwnLosses(ScalarModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.own = [*getattr(self, "own", []), loss.item()]
        return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_callbacks_see_the_loss_divided_as_the_trainer_says(accumulate: int) -> None:
    seen, model = LossSeen(), OwnLosses()
    run(model, seen, accumulate_grad_batches=accumulate, options={"max_tokens": 8, "samples_per_step": 6, "seed": 0})
    assert seen.losses == pytest.approx([loss / accumulate for loss in model.own], rel=1e-5)


def test_callbacks_listed_before_see_true_gradients_and_lengths() -> None:
    seen, model = LossSeen(), ScalarModel()
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, max_tokens=8, seed=0)
    used = trainer(callbacks=[seen, balance], max_epochs=3)
    used.fit(model, loader(DATA, 6, shuffle=True))
    assert seen.gradients == model.gradients
    assert seen.lengths == [model.epochs.count(epoch) for epoch in range(3)]


class Lbfgs(ScalarModel):
    """LBFGS runs the closure, with backward, several times for one step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.0, max_iter=3)


@pytest.mark.parametrize("reduction", ["token_mean", "sample_mean"])
def test_a_closure_that_runs_again_counts_its_units_once(reduction: str) -> None:
    model = Lbfgs(reduction)
    run(model, options={"samples_per_step": 18, "seed": 0}, limit_train_batches=1)
    assert len(model.gradients) > 1
    assert model.gradients == pytest.approx([reference_gradient(DATA.samples, reduction)] * len(model.gradients))


def test_data_that_grows_and_shrinks_in_place_is_served_whole_when_loaders_are_reloaded() -> None:
    class Growing(ScalarModel):
        def train_dataloader(self) -> Any:
            data.samples = DATA.samples[: [4, 9, 6][self.trainer.current_epoch]]
            return loader(data, 2, shuffle=True)

    data = TokenDataset(DATA.samples)
    del data.lengths  # every load has to scan
    model = Growing()
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, max_tokens=8, lengths="x")
    trainer(callbacks=[balance], max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
    for epoch, num_samples in enumerate([4, 9, 6]):
        own = [batch for batch, when in zip(model.served, model.epochs, strict=True) if when == epoch]
        assert sorted(index for batch in own for index in batch) == list(range(num_samples))


class AsksForSteps(ScalarModel):
    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_counting_the_steps_of_many_epochs_stops_at_max_steps() -> None:
    balance = BalanceCallback(max_tokens=8, step_unit="tokens", print_summary=False, loss_reduction="token_mean")
    model = AsksForSteps()
    trainer(callbacks=[balance], max_epochs=1000, max_steps=4).fit(model, loader(DATA, 2, shuffle=True))
    assert model.estimated == 4
