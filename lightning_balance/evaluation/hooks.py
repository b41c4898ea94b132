"""The callback's part in validation, test and predict: decides when, and leaves what to :mod:`run` (layer 2)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_balance._lightning import put_first
from lightning_balance.agreement import on_every_rank
from lightning_balance.checks import check_evaluation, check_is_alone
from lightning_balance.evaluation.predictions import OrderedPredictions
from lightning_balance.evaluation.run import BalancedEvaluation
from lightning_balance.settings import BalanceSettings


class EvaluationHooks(Callback):
    """Base of :class:`BalanceCallback`.

    Attributes:
        settings: the options, checked.
        only_for: the data module that brought the callback along; with any other data it stays out of the way.
    """

    settings: BalanceSettings
    only_for: object | None = None
    _evaluation: BalancedEvaluation | None = None
    _predicted: OrderedPredictions | None = None

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch that runs is a filler, which what a module or callback collects should not hold."""
        return self._evaluation is not None and self._evaluation.is_filler

    def _set_up_evaluation(self, trainer: Trainer, module: LightningModule, during: str) -> None:
        """Put the plan between the user's loaders and the loop of a run, if its stage is to be balanced."""
        self._evaluation = None
        balanced = "validate" if during == "fit" else during
        stage = next((stage for stage in self.settings.stages if stage == balanced), None)
        if stage is None:
            return
        evaluation = BalancedEvaluation(trainer, self.settings, stage, during=during)
        if self.only_for not in (None, evaluation.source):
            return

        def check() -> None:
            check_is_alone(trainer, EvaluationHooks)
            check_evaluation(trainer, module, stage)

        on_every_rank(check)
        put_first(trainer, self)  # the hooks of others may log already
        self._evaluation = evaluation
        evaluation.attach()

    def _release_evaluation(self) -> None:
        """Give the loop back as it was; its results can still be gathered."""
        if self._evaluation is not None:
            self._evaluation.release()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation begins."""
        if self._evaluation is not None:
            self._evaluation.begin()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Let logged means weigh the micro-batch by its samples."""
        if self._evaluation is not None:
            self._evaluation.begin_batch(batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the loaders served."""
        if self._evaluation is None:
            return
        self._evaluation.prepare_exchange()
        if not trainer.barebones:
            self._evaluation.log_figures(pl_module)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_epoch_end = on_validation_epoch_end
    on_predict_epoch_start = on_validation_epoch_start

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the results into the data set's order; prediction writers have had them by micro-batch."""
        if self._evaluation is None:
            return
        self._evaluation.say_figures()
        self._predicted = None
        if trainer.predict_loop.return_predictions:
            self._predicted = self._evaluation.put_in_order(trainer.predict_loop.predictions)

    def gather_predictions(self, predictions: list[Any]) -> list[Any]:
        """The results of all ranks in the data set's order, on every rank, after the latest ``trainer.predict``.

        A collective call: every rank calls it with what ``trainer.predict`` returned there, or with something made of
        each of its entries. On one process it is what was returned.

        Args:
            predictions: one output per sample of this rank; with several loaders a list of them for each.

        Raises:
            ValueError: the callback has balanced no predict run that returned predictions in this process, or
                ``predictions`` has not one output per sample.
        """
        if predictions is None:
            raise ValueError(
                "gather_predictions takes what trainer.predict returned, which is None: nothing was predicted"
            )
        if self._predicted is None:
            raise ValueError(
                "gather_predictions takes what trainer.predict returned in a run that was balanced: "
                + (
                    "let predict return its predictions (return_predictions=True, no launcher that spawns)"
                    if "predict" in self.settings.stages
                    else "add 'predict' to BalanceCallback(stages=...)"
                )
            )
        return self._predicted.gather(predictions)
