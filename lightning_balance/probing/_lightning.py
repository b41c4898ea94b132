"""Every use of a Lightning internal by tried micro-batches, each with the public API that is missing (layer 2).

Verified with Lightning 2.6.6; ``tests/test_lightning_internals.py`` fails clearly when a release moves one of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_balance._lightning import callbacks, limited_num_batches


@contextmanager
def outside_the_loop(trainer: Trainer) -> Iterator[None]:
    """Let micro-batches run that are no part of training: no callback is called, nothing is logged.

    Missing: a way to run a training step that does not count. ``log`` needs the loop's collection of results, loggers
    would write; ``DummyLogger`` accepts whatever a module asks of ``self.logger``, as with ``fast_dev_run``.
    """
    module, kept, loggers = trainer.lightning_module, callbacks(trainer), trainer.loggers
    fx_name = module._current_fx_name
    trainer.callbacks, trainer.loggers = [], [DummyLogger()] * bool(loggers)  # type: ignore[attr-defined]
    vars(module).update(log=lambda *args, **options: None)
    try:
        yield
    finally:
        vars(module).pop("log")
        module._current_fx_name = fx_name
        trainer.callbacks, trainer.loggers = kept, loggers  # type: ignore[attr-defined]


@contextmanager
def showing_loader(trainer: Trainer, loader: DataLoader[Any]) -> Iterator[None]:
    """Let the trainer have a loader, and its number of batches, while the loop still waits for its own.

    Missing: ``train_dataloader`` and ``num_training_batches`` before the loop has its loader; asked for
    ``estimated_stepping_batches``, it would request it once more. A loader that is there already stays.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None:
        yield
        return
    max_batches = loop.max_batches
    loop._combined_loader = CombinedLoader(loader, "max_size_cycle")
    loop.max_batches = limited_num_batches(trainer, len(loader))
    try:
        yield
    finally:
        loop._combined_loader, loop.max_batches = None, max_batches


def begin_epoch_of_module(trainer: Trainer) -> None:
    """Call the module's hooks of a beginning run and epoch; missing: a way to call the module's alone."""
    for hook in ("on_train_start", "on_train_epoch_start"):
        call._call_lightning_module_hook(trainer, hook)


def silence_training(trainer: Trainer) -> None:
    """Do not call the module's hooks of a training that begins or ends; missing: a ``fit`` that trains nothing.

    The loop looks hooks up by name; the instance attributes shadow the module's methods.
    """
    for hook in ("on_train_start", "on_train_end", "on_fit_end"):
        vars(trainer.lightning_module)[hook] = lambda: None


def move_batch(trainer: Trainer, batch: Any) -> Any:
    """Move a batch to the device as the loop does; missing: a public form for a batch that the loop did not fetch."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def run_micro_batch(trainer: Trainer, batch: Any) -> float:
    """Run ``training_step`` and backward of one micro-batch with the loop's precision and strategy; return the loss.

    The module's ``on_train_batch_start`` comes before them; what it returns does not count.

    Missing: a public form of what the loop does with a batch.
    """
    loop = trainer.fit_loop.epoch_loop
    call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, 0)
    step = loop.automatic_optimization._training_step(loop._build_kwargs(OrderedDict(), batch, 0))
    if step.closure_loss is None:
        return 0.0
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    call._call_strategy_hook(trainer, "backward", step.closure_loss, optimizer)
    return float(step.closure_loss.detach())


def without_gradient_sync(trainer: Trainer) -> AbstractContextManager[None]:
    """Keep ranks from exchanging gradients, where the strategy can (DDP); missing: a public form for any strategy."""
    return _block_parallel_sync_behavior(trainer.strategy)


def keep_callbacks(trainer: Trainer, is_kept: Callable[[Callback], bool]) -> None:
    """Let only some callbacks run, also of those that the module brings; missing: a way to take them out."""
    trainer.callbacks = [callback for callback in callbacks(trainer) if is_kept(callback)]  # type: ignore[attr-defined]
