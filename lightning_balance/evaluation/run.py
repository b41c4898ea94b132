"""The loaders of one validation, test or predict run: balanced, each sample counted once (layer 2)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import lightning_balance
from lightning_balance._lightning import data_parallel_ranks
from lightning_balance.agreement import check_equal_on_ranks, on_every_rank
from lightning_balance.evaluation import _lightning, list_states
from lightning_balance.evaluation.figures import EvaluationFigures, figures_of
from lightning_balance.evaluation.plan import plan_evaluation
from lightning_balance.evaluation.predictions import OrderedPredictions
from lightning_balance.evaluation.sampler import EvaluationBatchSampler
from lightning_balance.lengths_of_ranks import WAY_OUT, LengthsOfRanks
from lightning_balance.loaders import check_loader, read_order, with_batch_sampler
from lightning_balance.partition.shapes import round_up_to_multiple
from lightning_balance.plan import StepPlan
from lightning_balance.sampler import fingerprint_of
from lightning_balance.settings import BalanceSettings, Stage, describe

LOADERS: dict[str, str] = {"validate": "validation", "test": "test", "predict": "predict"}
"""What sentences call the loaders of a stage."""


class BalancedEvaluation:
    """Balances the loaders of one stage.

    Args:
        trainer: the trainer, with its strategy's processes running.
        settings: the user's options.
        stage: what is balanced.
        during: what the trainer runs, ``"fit"`` for the validation inside it, else the stage.

    Attributes:
        is_filler: whether the micro-batch that runs is a filler.
    """

    def __init__(self, trainer: Trainer, settings: BalanceSettings, stage: Stage, *, during: str) -> None:
        self._trainer, self._settings, self._stage = trainer, settings, stage
        self.is_filler = False
        self._num_ranks, self._rank = data_parallel_ranks(trainer)
        self._loop = _lightning.loop_of(trainer, during)
        self._lengths = LengthsOfRanks(trainer, settings)
        self._plans: list[StepPlan] = []
        self._done = np.zeros(0, dtype=np.int64)
        self._seconds = 0.0

    @property
    def source(self) -> object:
        """The data module, module or loaders that the loaders come from."""
        return _lightning.source_of(self._loop)

    def attach(self) -> None:
        """Put the plan between the user's loaders and the loop."""
        _lightning.intercept_dataloaders(self._trainer, self._loop, self._stage, self._balance)
        _lightning.wrap_steps(self._loop, self._around_step)

    def release(self) -> None:
        """Give the loop, and the module's metrics, back as they were."""
        _lightning.release(self._loop)
        if self._trainer.lightning_module is not None:  # a run may fail before it has one
            list_states.release(self._trainer.lightning_module)

    # ------------------------------------------------------------------ loaders

    def _balance(self, loaders: Any, limit: int | float) -> CombinedLoader:
        """Rebuild the user's loaders. A collective call; errors are raised on every rank.

        Raises:
            TypeError: a loader cannot be balanced.
            ValueError: lengths or options are wrong, or differ between ranks.
        """
        given = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
        combined = CombinedLoader(given.iterables, given._mode)
        on_every_rank(lambda: self._check(combined))
        kind = LOADERS[self._stage]
        check_equal_on_ranks({f"the number of {kind} loaders": len(combined.flattened)}, WAY_OUT)
        self._plans = []
        combined.flattened = [self._rebuild(loader, limit) for loader in combined.flattened]
        self.restart_figures()
        return combined

    def _check(self, combined: CombinedLoader) -> None:
        if combined._mode != "sequential":
            raise ValueError(
                f"the {LOADERS[self._stage]} loaders run as CombinedLoader(mode={combined._mode!r}), which joins their"
                f" batches: use mode='sequential', or take {self._stage!r} out of BalanceCallback(stages=...)"
            )
        for loader in combined.flattened:
            check_loader(loader, LOADERS[self._stage])

    def _rebuild(self, loader: DataLoader[Any], limit: int | float) -> DataLoader[Any]:
        kind = LOADERS[self._stage]
        order = on_every_rank(lambda: read_order(loader, kind))
        lengths = self._lengths.find(loader, self._given_lengths)
        num_plain = -(-len(lengths) // (order.batch_size * self._num_ranks))
        num_limited = on_every_rank(lambda: _lightning.limited_num_batches(self._stage, num_plain, limit))
        lengths = lengths[: num_limited * order.batch_size * self._num_ranks]
        options = self._options(lengths, order.batch_size)
        check_equal_on_ranks(
            {
                "lightning_balance.__version__": lightning_balance.__version__,
                f"the number of samples of the {kind} loader": len(lengths),
                f"the fingerprint of the {kind} loader's lengths": fingerprint_of(lengths),
                **{name: describe(value) for name, value in options.items()},
                "oversize": self._settings.oversize,
            },
            WAY_OUT,
        )
        on_every_rank(lambda: self._check_oversize(lengths, options["max_tokens"]))
        plan = on_every_rank(lambda: plan_evaluation(lengths, num_ranks=self._num_ranks, **options))
        self._plans.append(plan)
        return with_batch_sampler(loader, EvaluationBatchSampler(plan, self._rank))

    def _check_oversize(self, lengths: NDArray[np.int64], max_tokens: int) -> None:
        padded = round_up_to_multiple(lengths, self._settings.pad_to_multiple_of)
        if self._settings.oversize == "error" and (padded > max_tokens).any():
            name = "max_tokens" if self._settings.eval_max_tokens is None else "eval_max_tokens"
            place = int(np.argmax(padded > max_tokens))
            raise ValueError(
                f"sample {place} of the {LOADERS[self._stage]} loader has length {lengths[place]}, above"
                f" {name}={max_tokens}, and oversize is 'error': raise {name}, clip the samples, or set oversize to"
                " 'single'"
            )

    @property
    def _given_lengths(self) -> Any:
        """The option, but not an array of the training data's lengths."""
        lengths = self._settings.lengths
        is_of_training = "fit" in self._settings.stages and not (isinstance(lengths, str) or callable(lengths))
        return None if is_of_training else lengths

    def _options(self, lengths: NDArray[np.int64], batch_size: int) -> dict[str, Any]:
        settings = self._settings
        budget = settings.eval_max_tokens or settings.max_tokens
        if not isinstance(budget, int):  # no micro-batch is larger than a plain batch could be
            longest = int(round_up_to_multiple(lengths, settings.pad_to_multiple_of).max(initial=1))
            budget = batch_size * longest
        return {
            "max_tokens": budget,
            "pad_to_multiple_of": settings.pad_to_multiple_of,
            "cost": None if settings.cost == "auto" else settings.cost,
        }

    # ------------------------------------------------------------------ steps

    def begin_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        """Let logged means weigh the micro-batch by its samples."""
        num_samples = int(self._plans[dataloader_idx].num_samples[batch_idx, self._rank])
        _lightning.set_batch_size(self._trainer, max(num_samples, 1))

    @contextmanager
    def _around_step(self, batch_idx: int, dataloader_idx: int) -> Iterator[None]:
        self.is_filler = is_filler = self._plans[dataloader_idx].is_filler(self._rank, batch_idx)
        started = time.perf_counter()
        try:
            with (
                _lightning.counts_in_nothing(self._trainer, self._loop, dataloader_idx) if is_filler else nullcontext()
            ):
                yield
        finally:
            self.is_filler = False
        self._seconds += time.perf_counter() - started
        self._done[dataloader_idx] = batch_idx + 1
        if self._stage != "predict":
            _lightning.make_means_exact(self._trainer)

    # ------------------------------------------------------------------ figures and results

    def begin(self) -> None:
        """An evaluation begins."""
        self.restart_figures()
        self.prepare_exchange()

    def prepare_exchange(self) -> None:
        """Let metrics, also those that were made meanwhile, exchange what ranks have unequally often."""
        if self._num_ranks > 1:
            list_states.exchange_unequal_lists(self._trainer.lightning_module)

    def restart_figures(self) -> None:
        """Count from here on."""
        self._done = np.zeros(len(self._plans), dtype=np.int64)
        self._seconds = 0.0

    def figures(self) -> EvaluationFigures | None:
        """What the micro-batches since :meth:`restart_figures` did; None where there was none."""
        return figures_of(self._plans, self._done, self._seconds)

    def log_figures(self, module: LightningModule) -> None:
        """Log them through the module. A collective call."""
        figures = self.figures()
        if figures is not None:
            figures.log(module, f"balance/{_lightning.STAGES[self._stage].dataloader_prefix}/")

    def say_figures(self) -> None:
        """Tell the user what a run without loggers did."""
        figures = self.figures()
        if figures is not None:
            rank_zero_info(f"BalanceCallback: {self._stage}: {figures}")

    def put_in_order(self, predictions: list[Any]) -> OrderedPredictions:
        """Turn what ``trainer.predict`` is about to return into outputs of single samples, in the data set's order.

        Outputs that have no entry per sample, on any rank, stay as they are, with a warning. A collective call.
        """
        served = [
            [
                plan.micro_batch(self._rank, slot).tolist()
                for slot in range(int(num))
                if not plan.is_filler(self._rank, slot)
            ]
            for plan, num in zip(self._plans, self._done, strict=True)
        ]
        return OrderedPredictions.of(predictions, served)
