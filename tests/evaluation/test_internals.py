"""What evaluation takes from inside Lightning is there, and behaves as `evaluation/_lightning.py` says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.utilities import CombinedLoader

from lightning_balance.evaluation import _lightning
from tests.distributed import run_ranks
from tests.evaluation.toys import Evaluates, values_loader
from tests.toys import trainer

STEP = ["self", "batch", "batch_idx", "dataloader_idx", "dataloader_iter"]


def test_loops_have_a_step_that_takes_these_arguments() -> None:
    assert list(inspect.signature(_EvaluationLoop._evaluation_step).parameters) == STEP
    assert list(inspect.signature(_PredictionLoop._predict_step).parameters) == STEP


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_every_loop_has_a_source_of_loaders(stage: str) -> None:
    loop = _lightning.loop_of(trainer(), stage)
    assert callable(loop._data_source.dataloader)
    assert callable(loop.setup_data)
    assert _lightning.source_of(loop) is None


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_every_stage_has_a_limit_of_its_own(stage: str) -> None:
    prefix = _lightning.STAGES[stage].dataloader_prefix
    assert getattr(trainer(), f"limit_{prefix}_batches") == 1.0
    assert _lightning.limited_num_batches(stage, 7, 3) == 3
    assert _lightning.limited_num_batches(stage, 7, 0.5) == 3


def test_loaders_of_a_collection_can_be_exchanged() -> None:
    loader, other = values_loader([1]), values_loader([2])
    combined = CombinedLoader({"a": loader}, "sequential")
    assert combined._mode == "sequential"
    combined.flattened = [other]
    assert combined.iterables == {"a": other}


class Looks(Evaluates):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.sizes = [self.trainer._results.batch_size]
        self.log("mean", batch["value"].mean())
        self.sizes.append(self.trainer._results.batch_size)
        (result,) = self.trainer._results.values()
        assert result.is_tensor
        assert result.meta.is_mean_reduction
        assert result.meta.sync.should is False
        assert result.has_reset is False
        self.weight = result.cumulated_batch_size

    def on_validation_epoch_end(self) -> None:
        pass


def test_lightning_guesses_the_size_of_a_batch() -> None:
    module = Looks()
    with pytest.warns(UserWarning, match="ambiguous collection"):
        trainer().validate(module, values_loader([1, 1]), verbose=False)
    assert module.sizes == [None, 3]  # two samples, and a first tensor of three rows
    assert int(module.weight) == 3


class LogsOnes(Evaluates):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        size = 1 + self.trainer.global_rank
        self.log("one", 1.0, batch_size=size, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        pass


def log_ones() -> float:
    (logged,) = trainer("ddp", 2).validate(LogsOnes(), values_loader([1] * 4), verbose=False)
    return float(logged["one"])


def test_lightning_rounds_the_mean_weight_down() -> None:
    assert run_ranks(log_ones, 2, timeout_s=60) == [1.5, 1.5]  # make_means_exact is there for this
