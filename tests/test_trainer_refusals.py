"""Trainers, modules and loaders that cannot be balanced are refused in the words that docs/trainer-flags.md quotes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.tuner import Tuner

from lightning_balance import BalanceCallback
from lightning_balance.checks import check_trainer
from tests.test_callback_inputs import BAD_LOADERS, Manual, Untrained, assert_is_one_sentence, message_of
from tests.toys import ScalarModel, equal_samples, loader, trainer


class AccumulatesItself(SingleDeviceStrategy):
    """Any strategy that takes accumulation out of the loop's hands, as DeepSpeed does."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True


class FetchesItself(Untrained):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        raise AssertionError


OTHER_STRATEGY = (
    "BalanceCallback does not support {}, which accumulates gradients or wraps loaders by itself: use strategy='ddp',"
    " 'fsdp' or ModelParallelStrategy, or remove the callback"
)


def fit(module: Any = None, **arguments: Any) -> None:
    trainer(callbacks=[BalanceCallback(print_summary=False)], **arguments).fit(
        module or Untrained(), loader(equal_samples([1, 2]), 1)
    )


def check_strategy(kind: type) -> None:
    # Without its package the strategy cannot be constructed; the check only looks at its class.
    used = trainer()
    used._accelerator_connector.strategy = kind.__new__(kind)  # type: ignore[attr-defined]
    check_trainer(used, ScalarModel())


def find_batch_size() -> None:
    class Data(LightningDataModule):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return loader(equal_samples([1, 2, 3, 4]), self.batch_size)

    used = trainer(callbacks=[BalanceCallback(print_summary=False)])
    Tuner(used).scale_batch_size(Untrained(), datamodule=Data(), max_trials=1)


def find_learning_rate() -> None:
    used = trainer(callbacks=[BalanceCallback()])
    Tuner(used).lr_find(ScalarModel(lr=0.1), loader(equal_samples([1, 2]), 1))


def two_callbacks() -> None:
    callbacks = [BalanceCallback(print_summary=False), BalanceCallback(max_tokens=8, print_summary=False)]
    trainer(callbacks=callbacks).fit(Untrained(), loader(equal_samples([1, 2]), 1))


REFUSALS: dict[str, tuple[str, Callable[[], None]]] = {
    "DeepSpeed": (OTHER_STRATEGY.format("DeepSpeedStrategy"), lambda: check_strategy(DeepSpeedStrategy)),
    "XLA": (OTHER_STRATEGY.format("XLAStrategy"), lambda: check_strategy(XLAStrategy)),
    "any strategy that accumulates by itself": (
        OTHER_STRATEGY.format("AccumulatesItself"),
        lambda: fit(accelerator="auto", devices="auto", strategy=AccumulatesItself(torch.device("cpu"))),
    ),
    "manual optimization, and with it several optimizers": (
        "BalanceCallback does not weight manual optimization, and Manual.automatic_optimization is False: use automatic"
        " optimization, or BalancedBatchSampler alone and weight the losses in training_step",
        lambda: fit(Manual()),
    ),
    "`training_step(dataloader_iter)`": (
        "BalanceCallback needs to know each micro-batch, but FetchesItself.training_step(dataloader_iter) fetches its"
        " own: use training_step(batch, batch_idx)",
        lambda: fit(FetchesItself()),
    ),
    "`Tuner.scale_batch_size`": (
        "BalanceCallback and the batch size finder (Tuner.scale_batch_size) both set the batch size: find it without"
        " BalanceCallback, or bound memory by BalanceCallback(max_tokens=...)",
        find_batch_size,
    ),
    "`Tuner.lr_find`": (
        "the learning rate finder (Tuner.lr_find) runs without the trainer's callbacks, so micro-batches would not be"
        " weighted: find the rate with a trainer without BalanceCallback",
        find_learning_rate,
    ),
    "two `BalanceCallback`s": (
        "the trainer has 2 BalanceCallbacks, which would weight twice: keep one",
        two_callbacks,
    ),
}
LOADERS_REFUSED = {
    "a list of training loaders": "balances one training DataLoader, got a list",
    "a dict of training loaders": "balances one training DataLoader, got a dict",
    "`CombinedLoader`": "got a CombinedLoader",
    "`IterableDataset`": "cannot balance the IterableDataset",
    "a custom sampler": "has the sampler WeightedRandomSampler",
    "a custom batch sampler": "has the batch sampler list",
    "`DataLoader(batch_size=None)`": "has batch_size=None",
}


@pytest.mark.parametrize(("sentence", "attempt"), REFUSALS.values(), ids=list(REFUSALS))
def test_a_trainer_that_cannot_balance_is_refused(sentence: str, attempt: Callable[[], None]) -> None:
    message = message_of(attempt)
    assert message == f"ValueError: {sentence}"
    assert_is_one_sentence(message)


@pytest.mark.parametrize("sentence", LOADERS_REFUSED.values(), ids=list(LOADERS_REFUSED))
def test_a_loader_that_is_refused_has_its_test(sentence: str) -> None:
    assert [tested for _, tested in BAD_LOADERS if tested.startswith(sentence)] != []
