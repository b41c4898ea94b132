"""Every use of a Lightning internal, each with the public API that is missing (layer 2).

Verified with Lightning 2.6.6; ``tests/test_lightning_internals.py`` fails clearly when a release moves one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

LoaderTransform = Callable[[Any], DataLoader[Any]]


def intercept_train_dataloader(trainer: Trainer, transform: LoaderTransform) -> None:
    """Pass every training loader that the fit loop requests through ``transform``.

    Missing: a hook between a user's ``train_dataloader`` (of module, data module or ``fit`` argument) and the loop. The
    loop asks ``fit_loop._data_source.dataloader()``, also early for ``estimated_stepping_batches`` and again with
    ``reload_dataloaders_every_n_epochs``; the instance attribute shadows that method.
    """
    source = trainer.fit_loop._data_source
    source.dataloader = lambda: transform(type(source).dataloader(source))  # type: ignore[method-assign]


def release_train_dataloader(trainer: Trainer) -> None:
    """Undo :func:`intercept_train_dataloader`; nothing if there was none."""
    trainer.fit_loop._data_source.__dict__.pop("dataloader", None)


def forget_train_dataloader(trainer: Trainer) -> None:
    """Make the fit loop request its loader again; missing: a public way to invalidate a loader built too early."""
    trainer.fit_loop._combined_loader = None


def set_epoch_length(trainer: Trainer, num_batches: int) -> None:
    """Tell the loop how many batches the coming epoch runs.

    Missing: Lightning reads ``len(loader)`` once per run (PL#18023, PL#20330). Sets what ``_FitLoop.setup_data`` sets
    from it: ``max_batches``, the limits of the combined loader, and the validation interval.
    """
    loop = trainer.fit_loop
    assert loop._combined_loader is not None
    loop._combined_loader.limits = [num_batches]
    loop.max_batches = num_batches
    is_timed = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    if is_timed:
        return  # a trainer with a clock has no interval
    if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch is not None:
        trainer.val_check_batch = min(
            trainer.val_check_interval, num_batches
        )  # a shorter epoch is validated at its end
    elif isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def limited_num_batches(trainer: Trainer, num_batches: int) -> int:
    """``num_batches`` after ``limit_train_batches``, at least 1.

    Missing: a public form of the rule that the loop applies to the first epoch, where it refuses a share below one
        batch.
    """
    limit = trainer.limit_train_batches
    return min(num_batches, limit) if isinstance(limit, int) else max(int(limit > 0), int(num_batches * limit))


def restart_train_iterator(trainer: Trainer, num_fetched: int = 0) -> None:
    """Create the training iterator anew; inside an epoch, after ``num_fetched`` of its batches.

    Missing: after a restart the loop keeps the iterator that it made before the epoch was known (PL#21938), and it
    tells the last batch by counting those that it fetched.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    iter(fetcher)
    fetcher.fetched = num_fetched


def rewind_batches(checkpoint: dict[str, Any], num_batches: int) -> None:
    """Make the epoch of a checkpoint that is about to be saved continue ``num_batches`` earlier.

    Missing: a checkpoint inside an accumulation window goes on behind micro-batches whose gradients it does not hold.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        num_done = counts["processed"] - num_batches
        counts.update(ready=num_done, started=num_done, processed=num_done, completed=num_done)


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Make a checkpoint that is about to be saved continue inside its epoch, although the loop left it.

    Missing: a run that ends by ``max_steps`` in the middle of an epoch counts the epoch as finished, and goes on at the
    same batch index of the next one. A batch that is rewound was perhaps the epoch's last one.
    """
    loops = checkpoint["loops"]["fit_loop"]
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
        if counts["processed"] == counts["ready"]:
            counts.update(processed=counts["ready"] - 1, completed=counts["ready"] - 1)


def begin_next_epoch(checkpoint: dict[str, Any]) -> None:
    """Make a checkpoint that is about to be saved after its epoch was completed begin the next one at its first batch.

    Missing: a run with ``max_steps`` continues at the batch index that a completed epoch ended with, in the next epoch.
    """
    loops = checkpoint["loops"]["fit_loop"]
    epochs = loops["epoch_progress"]["current"]
    if epochs["completed"] == epochs["ready"]:
        loops["epoch_loop.batch_progress"]["current"].update(ready=0, started=0, processed=0, completed=0)
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False


def is_restarting(trainer: Trainer) -> bool:
    """Whether the loop continues inside an epoch of a checkpoint; missing: a public form."""
    return bool(trainer.fit_loop.restarting)


def finished_an_epoch(trainer: Trainer) -> bool:
    """Whether a checkpoint was saved at the last batch of its epoch; missing: a public form."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def num_batches_done(trainer: Trainer) -> int:
    """Batches of the current epoch whose backward is done; missing: public access to the loop's progress."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)  # type: ignore[attr-defined]


def put_first(trainer: Trainer, callback: Callback) -> None:
    """Make ``callback`` the first that every hook calls; missing: a way to ask for it."""
    order = callbacks(trainer)
    order.remove(callback)
    order.insert(0, callback)


def callbacks(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks; missing: the attribute is public but not declared."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def train_datamodule(trainer: Trainer) -> LightningDataModule | None:
    """The data module that this ``fit`` trains on; None where loaders come from elsewhere.

    Missing: ``trainer.datamodule`` keeps the data module of an earlier ``fit`` when the next one has none.
    """
    source = trainer.fit_loop._data_source.instance
    return source if isinstance(source, LightningDataModule) else None


def overfit_batches(trainer: Trainer) -> float:
    """The trainer's ``overfit_batches``; missing: the attribute is public but not declared."""
    return float(trainer.overfit_batches)  # type: ignore[attr-defined]


def will_log_step(trainer: Trainer) -> bool:
    """Whether the loggers write at the end of this batch; missing: a public form of ``log_every_n_steps`` in effect."""
    return trainer._logger_connector.should_update_logs or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def data_parallel_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Process group over which gradients are averaged; None for all ranks, or for a single process.

    Missing: strategies expose the number of data-parallel ranks (``trainer.distributed_sampler_kwargs``), not the
        group.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].get_group()
    return None


def synchronises_every_micro_batch(trainer: Trainer) -> bool:
    """Whether ranks exchange gradients in every backward, also inside an accumulation window (FSDP)."""
    return isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))
