"""Every use of a Lightning internal by evaluation, each with the public API that is missing (layer 2).

Verified with Lightning 2.6.6; ``tests/evaluation/test_internals.py`` fails clearly when a release moves one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_balance import _lightning
from lightning_balance.evaluation.fillers import KeptStates, uncounted

Loop = _EvaluationLoop | _PredictionLoop
STAGES = {
    "validate": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}


def loop_of(trainer: Trainer, stage: str) -> Loop:
    """The loop of a run that validates (``"fit"``: during training), tests or predicts; missing: public access."""
    if stage == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    loops: dict[str, Loop] = {
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    return loops[stage]


def source_of(loop: Loop) -> object:
    """The data module, module or loaders that the loop takes its loaders from; missing: public access."""
    return loop._data_source.instance


def intercept_dataloaders(
    trainer: Trainer, loop: Loop, stage: str, transform: Callable[[Any, int | float], Any]
) -> None:
    """Pass the loaders that a loop requests through ``transform(loaders, limit)``, and leave their limit to it.

    Missing: a hook between a user's ``val_dataloader`` and the loop. The limit (``limit_val_batches``) counts plain
    batches, the loop would count micro-batches by it.
    """
    source, name = loop._data_source, f"limit_{STAGES[stage].dataloader_prefix}_batches"

    def setup_data() -> None:
        limit = getattr(trainer, name)
        source.dataloader = lambda: transform(type(source).dataloader(source), limit)  # type: ignore[method-assign]
        if limit:
            setattr(trainer, name, 1.0)
        try:
            type(loop).setup_data(loop)  # type: ignore[arg-type]  # of its own class
        finally:
            setattr(trainer, name, limit)
            vars(source).pop("dataloader")

    loop.setup_data = setup_data  # type: ignore[method-assign]


def limited_num_batches(stage: str, num_batches: int, limit: int | float) -> int:
    """Batches that a limit leaves of ``num_batches``; missing: a public form of the loops' rule.

    Raises:
        MisconfigurationException: the limit is a share of less than one batch.
    """
    return int(_parse_num_batches(STAGES[stage], num_batches, limit))


def wrap_steps(loop: Loop, around: Callable[[int, int], AbstractContextManager[None]]) -> None:
    """Run every step of a loop, with its hooks, inside ``around(batch_idx, dataloader_idx)``.

    Missing: something that begins before the hooks of a batch and ends after them, and after the loggers.
    """
    name = "_predict_step" if isinstance(loop, _PredictionLoop) else "_evaluation_step"
    step = getattr(type(loop), name)

    def run(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        with around(batch_idx, dataloader_idx):
            step(loop, batch, batch_idx, dataloader_idx, dataloader_iter)

    setattr(loop, name, run)


def release(loop: Loop) -> None:
    """Undo :func:`intercept_dataloaders` and :func:`wrap_steps`; nothing if there was neither."""
    for name in ("setup_data", "_evaluation_step", "_predict_step"):
        vars(loop).pop(name, None)


def set_batch_size(trainer: Trainer, num_samples: int) -> None:
    """Let means of ``self.log`` weigh this batch by its samples, unless the module says ``batch_size``.

    Missing: the loop guesses it from the first tensor of the batch, and asks nobody.
    """
    trainer._results.batch_size = num_samples  # type: ignore[union-attr]


def make_means_exact(trainer: Trainer) -> None:
    """Keep the weights of logged means as floats, so that their mean over ranks is not rounded down.

    Missing: ``sync_dist=True`` divides the sum of integers by the number of ranks as integers.
    """
    for result in (trainer._results or {}).values():
        if result.is_tensor and result.meta.is_mean_reduction and not result.has_reset:
            weight = result.cumulated_batch_size
            result.cumulated_batch_size = weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)


@contextmanager
def counts_in_nothing(trainer: Trainer, loop: Loop, dataloader_idx: int) -> Iterator[None]:
    """Run a step of which nothing stays: no metric, no logged value, no prediction.

    Missing: a step that does not count. All hooks run, of the module and of callbacks, as ranks may exchange something
    in them; only prediction writers see nothing.
    """
    results: dict[str, _ResultMetric] = {} if trainer._results is None else trainer._results
    logged_before = {key: result._update_count for key, result in results.items() if not result.has_reset}
    kept = {key: KeptStates([result]) for key, result in results.items() if result.is_tensor}
    num_predictions = len(loop._predictions[dataloader_idx]) if isinstance(loop, _PredictionLoop) else 0
    writers = [callback for callback in _lightning.callbacks(trainer) if isinstance(callback, BasePredictionWriter)]
    muted = [(vars(writer), "write_on_batch_end") for writer in writers]
    muted.append((vars(trainer._logger_connector), "log_metrics"))
    for attributes, name in muted:
        attributes[name] = _ignore
    try:
        with uncounted(trainer.lightning_module):
            yield
    finally:
        for attributes, name in muted:
            attributes.pop(name)
    if isinstance(loop, _PredictionLoop):
        del loop._predictions[dataloader_idx][num_predictions:]
        del loop.epoch_batch_indices[dataloader_idx][num_predictions:]
    for key, result in results.items():
        was_logged = not result.has_reset and result._update_count != logged_before.get(key)
        if result.is_tensor and was_logged:
            _forget_filler(result, kept[key] if key in logged_before else None)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _forget_filler(result: _ResultMetric, before: KeptStates | None) -> None:
    """Take a filler's value out of what was logged, but leave the key: ranks exchange values key by key.

    A rank that has fillers only keeps its value where ranks do not exchange it: it would have none at all, and a nan
    stops ``EarlyStopping``.
    """
    if before is not None:
        before.restore()
    elif result.meta.sync.should:
        for name, default in result._defaults.items():  # in the type that other ranks have
            assert isinstance(default, Tensor)
            setattr(result, name, torch.full_like(getattr(result, name), default.item()))
        result._computed = None
