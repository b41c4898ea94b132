"""Every use of a Lightning internal, each with the public API that is missing (layer 2).

Verified with Lightning 2.6.6; ``tests/test_lightning_internals.py`` fails clearly when a release moves one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

LoaderTransform = Callable[[Any], DataLoader[Any]]
BROADCAST = "_broadcast_sigterm_tensor"
"""Method of the training epoch loop that begins every batch on several ranks."""


def intercept_train_dataloader(trainer: Trainer, transform: LoaderTransform) -> None:
    """Pass every training loader that the fit loop requests through ``transform``.

    Missing: a hook between a user's ``train_dataloader`` (of module, data module or ``fit`` argument) and the loop. The
    loop asks ``fit_loop._data_source.dataloader()``, also early for ``estimated_stepping_batches`` and again with
    ``reload_dataloaders_every_n_epochs``; the instance attribute shadows that method.
    """
    source = trainer.fit_loop._data_source
    source.dataloader = lambda: transform(type(source).dataloader(source))  # type: ignore[method-assign]


def release_train_dataloader(trainer: Trainer) -> None:
    """Undo :func:`intercept_train_dataloader` and :func:`accept_short_epochs`; nothing if there was none."""
    trainer.fit_loop._data_source.__dict__.pop("dataloader", None)
    trainer.fit_loop.__dict__.pop("setup_data", None)


def accept_short_epochs(trainer: Trainer) -> None:
    """Let epochs after a run's first one be shorter than ``val_check_interval``, or a share of them less than a batch.

    Missing: epochs of different lengths. The loop checks every loader that it requests as if all epochs were as long as
    the coming one: with ``reload_dataloaders_every_n_epochs``, and after a restart, a short epoch would end the run.
    The first loader of a new run is checked as ever. Call it after :func:`intercept_train_dataloader`.
    """
    loop, source = trainer.fit_loop, trainer.fit_loop._data_source
    request = source.dataloader

    def dataloader() -> Any:
        loader = request()
        if trainer.current_epoch > 0 or trainer.ckpt_path is not None:
            trainer.limit_train_batches = num_batches = limited_num_batches(trainer, len(loader))
            if _is_validated_by_count(trainer) and trainer.val_check_interval > num_batches:
                trainer.val_check_interval = 1.0  # at its end
        return loader

    def setup_data() -> None:
        limit, interval = trainer.limit_train_batches, None if _is_timed(trainer) else trainer.val_check_interval
        try:
            type(loop).setup_data(loop)
        finally:
            trainer.limit_train_batches = limit
            if interval is not None:
                trainer.val_check_interval = interval

    source.dataloader = dataloader  # type: ignore[method-assign]
    loop.setup_data = setup_data  # type: ignore[method-assign]


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
    if _is_timed(trainer):
        return
    if _is_validated_by_count(trainer):
        # A shorter epoch is validated at its end.
        trainer.val_check_batch = min(trainer.val_check_interval, num_batches)
    elif isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def _is_timed(trainer: Trainer) -> bool:
    """Whether validation goes by the clock; the trainer then has no ``val_check_interval``."""
    return trainer._val_check_time_interval is not None  # type: ignore[attr-defined]


def _is_validated_by_count(trainer: Trainer) -> bool:
    """Whether validation comes after every so many batches of an epoch."""
    is_counted = not _is_timed(trainer) and isinstance(trainer.val_check_interval, int)
    return is_counted and trainer.check_val_every_n_epoch is not None


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


@dataclass(frozen=True, kw_only=True)
class LoopPlace:
    """Where the loops go on from a checkpoint.

    Attributes:
        epoch: the epoch that goes on.
        num_batches: batches of it that are done; none: the epoch begins with all its hooks.
        num_undone: batches that the loop has done beyond them, which will run again.
        is_last: the epoch has no batch left, but its end is still to come.
        is_validation_due: the loop validates after ``num_batches``.
        is_validated: it has done so.
        num_logged_steps: optimizer steps as loggers count them.
    """

    epoch: int
    num_batches: int = 0
    num_undone: int = 0
    is_last: bool = False
    is_validation_due: bool = False
    is_validated: bool = False
    num_logged_steps: int


def continue_at(checkpoint: dict[str, Any], place: LoopPlace) -> None:
    """Make the loops of a checkpoint that is about to be saved go on at ``place``.

    Missing: a checkpoint is exact only where ``ModelCheckpoint`` saves during an epoch. Inside an accumulation window
    it goes on behind micro-batches whose gradients it does not hold; before a validation it forgets the validation,
    before an epoch's end the end, in ``on_train_epoch_start`` the epoch; a run that ends by ``max_steps`` counts the
    epoch as finished.

    The counts are those that the loops read as these places: an epoch that goes on is started, not processed; behind a
    batch whose end is not completed no validation follows; one batch of validation that was started, but not
    processed, makes validation run again. The loop counts the step of its last batch once more, for the loggers.
    """
    loops = checkpoint["loops"]["fit_loop"]
    has_begun, validates = place.num_batches > 0, place.is_validation_due and not place.is_validated
    is_behind_a_batch = has_begun and not (place.is_last or validates)
    for counts in loops["epoch_progress"].values():
        _set_counts(counts, place.epoch + has_begun, place.epoch, place.epoch)
    batches = loops["epoch_loop.batch_progress"]
    batches["is_last_batch"] = place.is_last
    num_done_in_all = batches["total"]["processed"] - place.num_undone
    for counts, num_done in ((batches["total"], num_done_in_all), (batches["current"], place.num_batches)):
        _set_counts(counts, num_done, num_done, num_done - is_behind_a_batch)
    validation = loops["epoch_loop.val_loop.batch_progress"]
    for counts in (validation["total"], validation["current"]):
        _set_counts(counts, int(validates), 0, 0)
    counts_again = has_begun and (not place.is_last or place.is_validation_due)
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = place.num_logged_steps - counts_again


def _set_counts(counts: dict[str, int], started: int, processed: int, completed: int) -> None:
    counts.update(ready=started, started=started, processed=processed, completed=completed)


def begin_restarted_epoch(trainer: Trainer) -> None:
    """Do not treat the epoch that a restarted run begins as one that goes on.

    Missing: with ``max_steps`` every run with a checkpoint counts as restarting inside an epoch.
    """
    trainer.fit_loop.epoch_loop.restarting = False


def has_begun(trainer: Trainer, epoch: int) -> bool:
    """Whether ``epoch`` has left ``on_train_epoch_start`` behind; missing: public access to the loop's progress."""
    return trainer.fit_loop.epoch_progress.current.started > epoch  # type: ignore[attr-defined, no-any-return]


def has_processed(trainer: Trainer, epoch: int) -> bool:
    """Whether the loop has left the batches of ``epoch``, as from ``on_train_epoch_end``; missing: public access."""
    return trainer.fit_loop.epoch_progress.current.processed > epoch  # type: ignore[attr-defined, no-any-return]


def is_ending_batch(trainer: Trainer) -> bool:
    """Whether a batch is done, but the hooks of its end are not; missing: public access to the loop's progress."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return batches.completed < batches.processed  # type: ignore[attr-defined, no-any-return]


def validates_after(trainer: Trainer, num_batches: int, num_batches_in_all: int) -> bool:
    """Whether the loop validates after so many batches of the epoch, and of all epochs.

    Missing: a public form of the loop's rule. A trainer that validates by the clock does so at no given batch.
    """
    loop = trainer.fit_loop.epoch_loop
    if _is_timed(trainer) or not loop._should_check_val_epoch():
        return False
    counted = num_batches_in_all if trainer.check_val_every_n_epoch is None else num_batches
    assert trainer.val_check_batch is not None  # only with a clock
    return counted % trainer.val_check_batch == 0


def skip_next_validation(trainer: Trainer) -> None:
    """Do not validate after the batch that is ending; missing: a public way to tell that it has been done."""
    trainer.fit_loop.epoch_loop._skip_next_val = True


def num_logged_steps(trainer: Trainer) -> int:
    """Optimizer steps as loggers count them, without that of a batch that is not over; missing: public access."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def num_batches_in_all(trainer: Trainer) -> int:
    """Batches of all epochs whose backward is done; missing: public access to the loop's progress."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)  # type: ignore[attr-defined]


def is_restarting(trainer: Trainer) -> bool:
    """Whether the loop continues inside an epoch of a checkpoint; missing: a public form."""
    return bool(trainer.fit_loop.restarting)


def finished_an_epoch(trainer: Trainer) -> bool:
    """Whether a checkpoint was saved at the last batch of its epoch; missing: a public form."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def skips_backward(trainer: Trainer) -> bool:
    """Whether the epoch runs without backward and steps, for the batch norm statistics of averaged weights.

    Missing: a public form; ``StochasticWeightAveraging`` adds such an epoch, and sets the accumulation for it.
    """
    return trainer.fit_loop._skip_backward


def num_batches_done(trainer: Trainer) -> int:
    """Batches of the current epoch whose backward is done; missing: public access to the loop's progress."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)  # type: ignore[attr-defined]


def show_epoch_length(trainer: Trainer) -> None:
    """Give the progress bar the total of an epoch that continues.

    Missing: TQDM's asks for it at the start of an epoch only.
    """
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled and bar.train_progress_bar.total is None:
        bar.train_progress_bar.total = bar.total_train_batches
        bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")


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


def data_parallel_ranks(trainer: Trainer) -> tuple[int, int]:
    """Number of data-parallel ranks, and this process's; tensor-parallel peers share one.

    Missing: the trainer says it in the form of a sampler's arguments, and nothing where there is one process.
    """
    ranks = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return int(ranks["num_replicas"]), int(ranks["rank"])


def data_parallel_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Process group over which gradients are averaged; None for all ranks, or for a single process.

    Missing: strategies expose the number of data-parallel ranks (``trainer.distributed_sampler_kwargs``), not the
        group.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].get_group()
    return None


def exchanges_every_micro_batch(trainer: Trainer) -> bool:
    """Whether ranks exchange parameters or gradients inside every forward and backward (FSDP)."""
    return isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))


def waits_every_micro_batch(trainer: Trainer) -> bool:
    """Whether ranks wait for each other in every micro-batch, also inside an accumulation window.

    FSDP exchanges there. Under DDP gradients are not exchanged, but the loop tells all ranks before every batch whether
    a signal to end has come (PL#20825, PL#21487).

    Missing: a public way to know that; a release without ``_broadcast_sigterm_tensor`` waits once a step.
    """
    return exchanges_every_micro_batch(trainer) or (
        trainer.world_size > 1 and hasattr(trainer.fit_loop.epoch_loop, BROADCAST)
    )


def around_broadcasts(trainer: Trainer, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call functions before and after every broadcast of the loop, in which ranks wait for each other under DDP.

    Missing: a hook before a batch is fetched. The instance attribute shadows the method until
    :func:`release_broadcasts`; nothing happens in a release that has no such broadcast.
    """
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(loop, BROADCAST):
        return

    def broadcast() -> None:
        begin()
        try:
            getattr(type(loop), BROADCAST)(loop)
        finally:
            end()

    setattr(loop, BROADCAST, broadcast)


def release_broadcasts(trainer: Trainer) -> None:
    """Undo :func:`around_broadcasts`; nothing if there was none."""
    trainer.fit_loop.epoch_loop.__dict__.pop(BROADCAST, None)
