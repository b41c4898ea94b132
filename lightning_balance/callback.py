"""The callback: decides when, and leaves what to the modules below it (layer 2)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_balance import _lightning
from lightning_balance.agreement import on_every_rank
from lightning_balance.budget_control import BudgetControl
from lightning_balance.checks import check_is_alone, check_trainer
from lightning_balance.evaluation.hooks import EvaluationHooks
from lightning_balance.fitting import BalancedFit, Place
from lightning_balance.probing.stopwatch import Stopwatch
from lightning_balance.reporting import RunReport
from lightning_balance.restart import checkpoint_state, loop_place
from lightning_balance.settings import HasBalanceSettings, describe
from lightning_balance.validation import check_positive_int
from lightning_balance.weighting import StepWeights, find_labels, scale_backward, scale_gradients

CHECKPOINT_KEY = "lightning_balance"
OF_A_RUN = {"_fit", "_weights", "_report", "_place", "_batch", "_control", "_stopwatch", "_is_first_batch"}
"""Attributes of the callback that belong to one ``fit``; their defaults stand in the class."""
OF_A_PROCESS = OF_A_RUN | {"_evaluation", "_predicted"}
"""Attributes that hold something of a trainer's run, whatever it runs."""


class BalanceCallback(HasBalanceSettings, EvaluationHooks):
    """Balanced micro-batches and exact gradients for any LightningModule, by one entry in ``Trainer(callbacks=[...])``.

    The training loader is rebuilt around a :class:`BalancedBatchSampler`: the samples of each optimizer step are sorted
    by length and cut into micro-batches of unequal counts and equal cost, the same number on every rank. Each backward
    is weighted so that the step's gradient is that of the mean over all its samples (or tokens), whatever the cut.
    Which samples form a step stays the seeded shuffle's choice (with ``lookahead=1``).

    Args:
        max_tokens: budget of padded tokens per micro-batch (samples times padded length). With it, an optimizer step
            has as many micro-batches as the budget needs; without, it has ``accumulate_grad_batches``, and no
            micro-batch exceeds ``batch_size`` times the longest length, so that the peak of memory cannot rise.
            ``"auto"``: the largest that fits into memory, found before training on the real strategy; the module is
            afterwards as it was. A resumed run keeps the budget it had, unless its optimizer steps are larger now.
        samples_per_step: samples per optimizer step over all ranks; default ``batch_size * accumulate_grad_batches *
            ranks``, the plain run's.
        lengths: an array with one length per sample, the name of a column or key, a function ``sample -> length``, or
            None: found (``lengths`` of data set or data module, a token column), else scanned once.
        max_length: lengths are clipped to it, as the collate function truncates.
        pad_to_multiple_of: the collate function pads to a multiple of it.
        cost: modelled time of a micro-batch: a :class:`CostModel`, a function ``(num_samples, padded_length) -> cost``,
            the ``.yaml`` file that ``lightning-balance calibrate`` wrote on this machine, or ``"auto"``: fitted to the
            run's own times, which waits for the device around each micro-batch; the plan changes only where an epoch
            begins.
        oversize: a sample longer than ``max_tokens`` runs alone (``"single"``), is an ``"error"``, or is left out
            (``"skip"``).
        loss_reduction: what ``training_step``'s loss is a mean of: ``"sample_mean"`` samples, ``"token_mean"`` labels
            other than ``ignore_index``, ``"causal_token_mean"`` the same without each sequence's first label (as causal
            language models shift them), ``"sum"`` no mean but a sum, or a function ``batch -> units``.
        seed: seed of the shuffle; default that of ``seed_everything``, else 0.
        sync: when ranks wait for each other: ``"micro_batch"``, ``"step"``, or ``"auto"``: as strategy
            and Lightning's loop make them.
        step_unit: ``"samples"``: a fixed number of samples per step; ``"tokens"``: ``accumulate_grad_batches``
            micro-batches per rank, each filled to ``max_tokens``.
        lookahead: number of consecutive steps of the shuffle that may exchange samples; more balance, less randomness.
        max_shapes: limit on distinct padded lengths, for ``torch.compile`` and CUDA graphs.
        label_key: key or attribute under which a batch has its labels.
        ignore_index: label of positions that the loss ignores.
        lengths_cache_dir: folder in which scanned lengths are kept for the next run.
        memory_fraction: for ``max_tokens="auto"``: the share of the memory that may be used.
        memory_limit_gib: for ``max_tokens="auto"``: memory of a rank in GiB; needed on the CPU, where tensors are
            counted.
        stages: what is balanced: some of ``"fit"``, ``"validate"`` (also during ``fit``), ``"test"`` and ``"predict"``.
            Loaders of other stages stay the user's own objects. Evaluation loaders are cut over the whole data set,
            sorted by length: every sample once over all ranks, metrics and logged means exact, see docs/evaluation.md.
        eval_max_tokens: token budget of validate, test and predict, where no gradients need memory; default
            ``max_tokens``, or without a number there, ``batch_size`` times the longest length.
        print_summary: print a table at the end of ``fit``.

    Raises:
        ValueError: at construction for options out of range; in ``fit``, before training, on every rank, for data,
            trainers and strategies that cannot be balanced.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[BalanceCallback(max_tokens=8192)])
    """

    _fit: BalancedFit | None = None
    _weights: StepWeights | None = None
    _report: RunReport | None = None
    _place: Place | None = None
    _batch: Any = None
    _control: BudgetControl | None = None
    _stopwatch: Stopwatch | None = None
    _is_first_batch = True

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of a run: a launcher pickles a trainer's callbacks before its run, whatever they ran in before."""
        return {name: value for name, value in self.__dict__.items() if name not in OF_A_PROCESS}

    # ------------------------------------------------------------------ before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check trainer and module, and put the plan between the user's loaders and the loops."""
        if stage == "fit":
            self._forget()
        self._set_up_evaluation(trainer, pl_module, stage)
        if stage != "fit" or "fit" not in self.settings.stages:
            return
        _lightning.put_first(trainer, self)  # others then see corrected gradients and the epoch's real length
        if self.only_for not in (None, _lightning.train_datamodule(trainer)):
            return
        on_every_rank(lambda: self._check(trainer, pl_module))
        self._fit = fit = BalancedFit(trainer, self.settings)
        self._weights = StepWeights(
            self.settings.loss_reduction,
            num_ranks=fit.factory.num_ranks,
            label_key=self.settings.label_key,
            ignore_index=self.settings.ignore_index,
        )
        _lightning.intercept_train_dataloader(trainer, fit.balance)
        _lightning.accept_short_epochs(trainer)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        check_is_alone(trainer, BalanceCallback)
        check_trainer(trainer, module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Strategy, module and optimizers are set up now, so that micro-batches can be tried."""
        if self._fit is not None:
            self._fit.factory.can_run = True

    @property
    def max_tokens(self) -> int | None:
        """The token budget in force; with ``max_tokens="auto"`` None before it was found."""
        if self._fit is not None and self._fit.has_loader:
            return self._fit.sampler.max_tokens
        return None if self.settings.max_tokens == "auto" else self.settings.max_tokens

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the epoch that the run starts or continues in."""
        if self._fit is None:
            return
        self._report = RunReport(trainer, pl_module, self._fit)
        if self._fit.factory.online is not None:
            self._stopwatch = Stopwatch(
                self._fit.factory.online,
                device=pl_module.device,
                rank=self._fit.factory.rank,
                is_alone=self._fit.factory.num_ranks == 1,
                exchanges_every_micro_batch=_lightning.exchanges_every_micro_batch(trainer),
            )
        # Lightning does not call on_train_epoch_start for an epoch that continues after a restart.
        self._fit.continue_epoch(trainer.current_epoch)
        if self._fit.sampler.max_tokens is not None:
            self._control = BudgetControl(trainer, self._fit)
        name = describe(self.settings.loss_reduction)
        rank_zero_info(
            f"BalanceCallback: loss_reduction={name!r}: gradients are those of the "
            + ("sum" if name == "sum" else "mean")
            + f" over each optimizer step of {self._fit.factory.num_ranks} rank(s); sync={self._fit.factory.sync!r}"
        )

    # ------------------------------------------------------------------ during training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the trainer how long the epoch is."""
        if self._fit is None or self._report is None:
            return
        if self._fit.renew_cost():
            self._report.monitor.forget_modelled_time()
        self._fit.begin_epoch(trainer.current_epoch)
        self._report.monitor.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Find the micro-batch's place in its optimizer step, and begin the step's weights."""
        if self._fit is None or self._weights is None:
            return
        if _lightning.skips_backward(trainer):
            self._place = None  # nothing to weigh, and no windows: the loop steps once at the end, with what is left
            self._zero_gradients(trainer, pl_module, batch_idx)
            return
        self._batch, self._place = batch, self._fit.place(batch_idx)
        if self._is_first_batch:
            self._is_first_batch = False
            _lightning.show_epoch_length(trainer)
            self._warn_of_ignored_labels(batch)
            self._warn_of_other_lengths(batch, self._place)
        if self._fit.open_window(self._place, batch_idx):
            self._zero_gradients(trainer, pl_module, batch_idx)
        if self._place.is_first:
            self._weights.begin(num_samples=self._place.num_samples, num_tokens=self._place.real_tokens)
        if self._report is not None:
            self._report.monitor.begin_micro_batch()
        if self._stopwatch is not None:
            self._stopwatch.start(self._place)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh the micro-batch."""
        if self._fit is None or self._weights is None or self._place is None:
            return
        if self._stopwatch is not None:
            self._stopwatch.forward_done()
        num_samples = int(self._place.plan.num_samples[self._place.slot, self._fit.factory.rank])
        scale = self._weights.weigh(
            self._batch,
            slot=self._place.slot,
            num_samples=num_samples,
            accumulation=trainer.accumulate_grad_batches,
        )
        scale_backward(loss, scale)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time the micro-batch, with ``cost="auto"``."""
        if self._stopwatch is not None:
            self._stopwatch.backward_done()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Correct the gradients by the units that were counted, before they are clipped."""
        if self._weights is not None and self._place is not None and self._weights.needs_correction:
            factor = self._weights.correction(pl_module.device, _lightning.data_parallel_group(trainer))
            scale_gradients(trainer.precision_plugin.main_params(optimizer), factor)  # what will be clipped and used

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and log its figures when the loggers write."""
        self._batch = None
        if self._fit is None or self._report is None or self._place is None:
            return
        if isinstance(outputs, dict) and "loss" in outputs:
            # The trainer divided it by the value that made this window; others know the trainer's own.
            outputs["loss"] = outputs["loss"] * (trainer.accumulate_grad_batches / self._fit.factory.accumulation)
        if self._fit.was_validated(batch_idx + 1):
            _lightning.skip_next_validation(trainer)
        self._report.end_micro_batch(self._place)
        if self._place.is_last and self._control is not None:
            self._control.end_step(trainer.global_step, batch_idx + 1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock until the next micro-batch."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.is_validation_ahead = True
        if self._report is not None:
            self._report.monitor.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Know that the validation has ended."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.is_validation_ahead = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's figures."""
        if self._report is not None:
            self._report.end_epoch()

    def set_max_tokens(self, max_tokens: int) -> None:
        """Change the token budget of the run, without a restart; call it on rank 0 or on every rank.

        It takes effect on all ranks after the same optimizer step: in a single process after the current one, else
        after the next of every ``log_every_n_steps`` (50 where that is 0). A budget that the data cannot have, or
        that is asked for too late in the run, is ignored with a warning.
        The command ``lightning-balance set-max-tokens`` does the same from outside.

        Raises:
            TypeError: ``max_tokens`` is not an integer.
            ValueError: it is out of range, or no run with a token budget is training.
        """
        max_tokens = check_positive_int("max_tokens", max_tokens)
        if self._control is None:
            raise ValueError(
                f"set_max_tokens({max_tokens}) changes the budget of a run that is training with one: none is; give"
                " max_tokens to BalanceCallback"
            )
        self._control.request(max_tokens)

    def _zero_gradients(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        for optimizer in trainer.optimizers:
            pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)

    def _warn_of_ignored_labels(self, batch: Any) -> None:
        labels = find_labels(batch, self.settings.label_key)
        if self.settings.loss_reduction == "sample_mean" and labels is not None:
            num_ignored = int((labels == self.settings.ignore_index).sum())
            if num_ignored:
                rank_zero_warn(
                    f"{num_ignored} labels of the first batch are ignore_index={self.settings.ignore_index}, but"
                    " BalanceCallback weights by samples (loss_reduction='sample_mean'): if the loss is a mean over the"
                    " other labels, set loss_reduction='token_mean', or 'causal_token_mean' for causal language models"
                )

    def _warn_of_other_lengths(self, batch: Any, place: Place) -> None:
        assert self._fit is not None
        tokens = find_labels(batch, "input_ids")
        planned = int(place.plan.padded_lengths[place.slot, self._fit.factory.rank])
        if tokens is not None and tokens.ndim == 2 and tokens.shape[1] != planned:
            rank_zero_warn(
                f"the first micro-batch is padded to {tokens.shape[1]} tokens, but the plan says {planned}: set"
                f" max_length"
                " and pad_to_multiple_of as the collate function has them, or correct lengths"
            )

    # ------------------------------------------------------------------ stop and restart

    # Not state_dict: Lightning refuses two callbacks of one class that have it, in words that do not say what is wrong.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save where the run goes on: inside an accumulation window, at the window's beginning."""
        if self._fit is None or not self._fit.has_loader:
            return
        checkpoint[CHECKPOINT_KEY] = checkpoint_state(self._fit)
        _lightning.continue_at(checkpoint, loop_place(self._fit))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue in the middle of the saved epoch, without replaying it; ranks and options may be others."""
        if self._fit is not None and CHECKPOINT_KEY in checkpoint:
            self._fit.restore(checkpoint[CHECKPOINT_KEY], checkpoint["global_step"])

    # ------------------------------------------------------------------ after training

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask all ranks for their peak memory and waiting, while they can still be asked."""
        if self._report is not None and self.settings.print_summary:
            self._report.end_training()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the run did, beside what plain batches would have done; progress bars are closed by now."""
        if self._report is not None and self.settings.print_summary:
            self._report.print_summary()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the trainer back as it was; a checkpoint saved by hand after ``fit`` still says where it stands."""
        if stage == "fit":
            if self._control is not None:
                self._control.warn_of_late_request()
            self._release(trainer)
        else:
            self._release_evaluation()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the trainer back as it was; the place in the run stays known to callbacks that save it now."""
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        self._release_evaluation()
        _lightning.release_train_dataloader(trainer)
        _lightning.release_broadcasts(trainer)
        if self._fit is not None:
            self._fit.close()

    def _forget(self) -> None:
        for name in OF_A_RUN & self.__dict__.keys():
            delattr(self, name)
