"""What a run says of itself: to its loggers, in its progress bar, in a table at the end (layer 2)."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from lightning_balance import _lightning
from lightning_balance.fitting import BalancedFit, Place
from lightning_balance.histograms import StepHistograms
from lightning_balance.monitor import PREFIX, RankFigures, RunMonitor
from lightning_balance.summary import print_summary


class RunReport:
    """Decides when figures of a run are written, and where; :class:`RunMonitor` has the figures.

    Args:
        trainer: the trainer.
        module: the module that logs.
        fit: the run.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, fit: BalancedFit) -> None:
        self._trainer, self._module, self._fit = trainer, module, fit
        self._is_quiet = bool(trainer.barebones)
        self._of_ranks = RankFigures(peaks={}, waited_seconds=())
        self._histograms = StepHistograms(trainer)
        self.monitor = RunMonitor(rank=fit.factory.rank, sync=fit.factory.sync, device=module.device)
        _lightning.around_broadcasts(trainer, self.monitor.begin_wait, self.monitor.end_wait)

    def end_micro_batch(self, place: Place) -> None:
        """Count a micro-batch, and a step that ends with it; log when the loggers write. Then a collective call."""
        self.monitor.end_micro_batch()
        if not place.is_last:
            return
        self.monitor.end_step(place, planning_seconds=self._fit.sampler.planning_seconds)
        self._histograms.add_step(place)
        if self._is_quiet or not _lightning.will_log_step(self._trainer):
            return
        values = self._step_values()
        self._module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        if self._trainer.progress_bar_callback is None:
            return
        in_bar = {"pad_eff": values[PREFIX + "pad_efficiency"], "tok/s": values[PREFIX + "tokens_per_second"]}
        self._module.log_dict(in_bar, on_step=True, on_epoch=False, batch_size=1, prog_bar=True, logger=False)

    def _step_values(self) -> dict[str, float]:
        max_tokens = self._fit.sampler.max_tokens
        budget = {} if max_tokens is None else {PREFIX + "max_tokens": float(max_tokens)}
        return {**self.monitor.step_values(), **budget}

    def end_epoch(self) -> None:
        """Log the epoch's figures. A collective call."""
        if self._is_quiet or not self.monitor.has_epoch_values:
            return
        # The values are the same on all ranks already; sync_dist only spares the user Lightning's warning.
        self._module.log_dict(
            self.monitor.epoch_values(), on_step=False, on_epoch=True, batch_size=1, sync_dist=True
        )  # fmt: skip
        step = _lightning.num_logged_steps(self._trainer) - 1  # the last one, where Lightning logs the epoch's figures
        self._histograms.write(self._fit.sampler.lengths, step)

    def end_training(self) -> None:
        """Ask all ranks for what the table needs, while they can be asked. A collective call."""
        self._of_ranks = self.monitor.rank_figures()

    def print_summary(self) -> None:
        """Print what the run did, beside what plain batches would have done; progress bars are closed by now."""
        if self._trainer.is_global_zero:
            print_summary(self._fit, self.monitor.run, self._of_ranks)
