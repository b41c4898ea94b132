"""What balancing cannot work with, refused in one sentence before training starts (layer 2)."""

from __future__ import annotations

import inspect

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_balance import _lightning
from lightning_balance.settings import Stage


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what would make balanced training wrong.

    Raises:
        ValueError: the trainer or the module uses something that balancing does not support; the sentence names it and
            the way out.
    """
    strategy, module_name = trainer.strategy, type(module).__name__
    if isinstance(strategy, (DeepSpeedStrategy, XLAStrategy)) or strategy.handles_gradient_accumulation:
        raise ValueError(
            f"BalanceCallback does not support {type(strategy).__name__}, which accumulates gradients or wraps loaders"
            " by itself: use strategy='ddp', 'fsdp' or ModelParallelStrategy, or remove the callback"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"BalanceCallback does not weight manual optimization, and {module_name}.automatic_optimization is False:"
            " use automatic optimization, or BalancedBatchSampler alone and weight the losses in training_step"
        )
    if _has_callback(trainer, GradientAccumulationScheduler):
        raise ValueError(
            "BalanceCallback and GradientAccumulationScheduler both set the accumulation windows: remove the scheduler"
            " and set Trainer(accumulate_grad_batches=...), or BalanceCallback(max_tokens=...)"
        )
    if _has_callback(trainer, BatchSizeFinder):
        raise ValueError(
            "BalanceCallback and the batch size finder (Tuner.scale_batch_size) both set the batch size: find it"
            " without BalanceCallback, or bound memory by BalanceCallback(max_tokens=...)"
        )
    if _has_callback(trainer, LearningRateFinder):
        raise ValueError(
            "the learning rate finder (Tuner.lr_find) runs without the trainer's callbacks, so micro-batches would"
            " not be"
            " weighted: find the rate with a trainer without BalanceCallback"
        )
    overfit_batches = _lightning.overfit_batches(trainer)
    if overfit_batches > 0:
        raise ValueError(
            f"BalanceCallback does not support Trainer(overfit_batches={overfit_batches}), which replaces the training"
            " sampler: use limit_train_batches, or a torch.utils.data.Subset of the data"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"BalanceCallback needs to know each micro-batch, but {module_name}.training_step(dataloader_iter) fetches"
            " its own: use training_step(batch, batch_idx)"
        )


def check_is_alone(trainer: Trainer, kind: type[Callback]) -> None:
    """Refuse a second callback of a kind.

    Raises:
        ValueError: the trainer has several.
    """
    num_callbacks = sum(isinstance(callback, kind) for callback in _lightning.callbacks(trainer))
    if num_callbacks > 1:
        raise ValueError(f"the trainer has {num_callbacks} BalanceCallbacks, which would weight twice: keep one")


def check_evaluation(trainer: Trainer, module: LightningModule, stage: Stage) -> None:
    """Refuse what would make a balanced validation, test or predict run wrong.

    Raises:
        ValueError: the trainer or the module uses something that balancing does not support; the sentence names it and
            the way out.
    """
    way_out = f"take {stage!r} out of BalanceCallback(stages=...)"
    if isinstance(trainer.strategy, XLAStrategy):
        raise ValueError(f"BalanceCallback does not support XLAStrategy, which wraps loaders by itself: {way_out}")
    step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
    if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
        raise ValueError(
            f"BalanceCallback needs to know each micro-batch, but {type(module).__name__}.{step}(dataloader_iter)"
            f" fetches its own: use {step}(batch, batch_idx), or {way_out}"
        )


def _has_callback(trainer: Trainer, kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in _lightning.callbacks(trainer))
