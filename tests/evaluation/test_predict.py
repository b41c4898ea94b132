"""Predictions come back in the data set's order, each once."""

from __future__ import annotations

import pickle
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_balance import BalanceCallback, OrderedPredictionWriter
from lightning_balance.agreement import gather_objects
from lightning_balance.evaluation.ordering import in_order, split_by_sample
from tests.distributed import RanksError, run_ranks
from tests.evaluation.test_metrics import CASES, RAGGED
from tests.evaluation.toys import Evaluates, Values, collate, values_loader
from tests.toys import trainer

Pair = namedtuple("Pair", ["logits", "index"])


def as_values(predictions: list[Any]) -> list[float]:
    assert [prediction["names"] for prediction in predictions] == [
        f"sample {prediction['value']:.0f}" for prediction in predictions
    ]
    return [float(prediction["value"]) for prediction in predictions]


def balanced(strategy: str = "single", num_ranks: int = 1, *callbacks: Any, **options: Any) -> tuple[Any, Any]:
    balance = BalanceCallback(stages=["predict"], **options)
    return trainer(strategy, num_ranks, callbacks=[*callbacks, balance]), balance


@pytest.mark.parametrize("case", CASES)
def test_one_process_returns_the_data_sets_order(case: str) -> None:
    lengths, budget = CASES[case]
    used, balance = balanced(eval_max_tokens=budget)
    for _ in range(2):
        predictions = used.predict(Evaluates(), values_loader(lengths))
        assert as_values(predictions) == list(range(len(lengths)))
        assert balance.gather_predictions(predictions) == predictions


def test_several_loaders_keep_their_places() -> None:
    used, balance = balanced(eval_max_tokens=10)
    first, second = used.predict(Evaluates(), [values_loader(RAGGED), values_loader([2, 1, 3])])
    assert as_values(first) == list(range(7))
    assert as_values(second) == [0, 1, 2]
    assert balance.gather_predictions([first, second]) == [first, second]
    with pytest.raises(ValueError, match="a list for each of 2 loaders, got 10 entries"):
        balance.gather_predictions(first + second)


def predict_on_ranks(strategy: str) -> list[Any]:
    found = []
    for lengths, budget in CASES.values():
        used, balance = balanced(strategy, 2, eval_max_tokens=budget)
        module = Evaluates()
        own = used.predict(module, values_loader(lengths))
        several = used.predict(module, [values_loader(lengths), values_loader([1, 2, 3, 4, 5])])
        found.append((as_values(own), balance.gather_predictions(several)))
    return gather_objects(found)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_gather_the_data_sets_order(strategy: str) -> None:
    of_ranks = run_ranks(predict_on_ranks, 2, strategy, timeout_s=120)[0]
    for place, (lengths, _) in enumerate(CASES.values()):
        own = [of_rank[place][0] for of_rank in of_ranks]
        assert sorted(own[0] + own[1]) == list(range(len(lengths)))  # each sample on one rank only
        assert all(part == sorted(part) for part in own)
        for of_rank in of_ranks:
            assert [as_values(part) for part in of_rank[place][1]] == [list(range(len(lengths))), [0, 1, 2, 3, 4]]


class KeepsBatches(BasePredictionWriter):
    """A writer of the user's own: it sees micro-batches and their indices, and no filler."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[float]]] = []
        self.epoch: list[tuple[list[int], list[float]]] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        self.batches.append((batch_indices, prediction["value"].tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        pairs = zip(batch_indices[0], predictions, strict=True)
        self.epoch = [(indices, prediction["value"].tolist()) for indices, prediction in pairs]


def write_on_ranks(strategy: str, num_ranks: int, folder: Path, is_balanced: bool) -> Any:
    found = []
    for case, (lengths, budget) in CASES.items():
        if not is_balanced and len(lengths) < num_ranks:
            continue  # plain Lightning gives the second rank no batch at all, and refuses
        keeps, writer = KeepsBatches(), OrderedPredictionWriter(folder / case)
        balance = [BalanceCallback(stages=["predict"], eval_max_tokens=budget)] if is_balanced else []
        used = trainer(strategy, num_ranks, callbacks=[keeps, writer, *balance])
        module = Evaluates()
        used.predict(module, values_loader(lengths), return_predictions=False)
        assert keeps.batches == keeps.epoch
        assert all(indices == values for indices, values in keeps.batches)
        served = [index for batches in gather_objects(keeps.batches) for indices, _ in batches for index in indices]
        assert sorted(served) == list(range(len(lengths)))
        written = torch.load(folder / case / "predictions.pt")  # weights_only: plain containers and tensors
        assert [path.name for path in (folder / case).iterdir()] == ["predictions.pt"]
        found.append((case, written["indices"], as_values(written["predictions"])))
    return found


@pytest.mark.parametrize("is_balanced", [True, False], ids=["balanced", "plain"])
@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2)])
def test_the_writer_merges_the_ranks(strategy: str, num_ranks: int, is_balanced: bool, tmp_path: Path) -> None:
    for found in run_ranks(write_on_ranks, num_ranks, strategy, num_ranks, tmp_path, is_balanced, timeout_s=120):
        assert len(found) >= len(CASES) - 1
        for case, indices, values in found:
            assert indices == values == list(range(len(CASES[case][0])))


def test_the_writer_writes_a_file_per_loader(tmp_path: Path) -> None:
    used, _ = balanced("single", 1, OrderedPredictionWriter(tmp_path))
    used.predict(Evaluates(), [values_loader(RAGGED), values_loader([2, 1])], return_predictions=False)
    files = {path.name: torch.load(path) for path in tmp_path.iterdir()}
    assert {name: as_values(file["predictions"]) for name, file in files.items()} == {
        "predictions_0.pt": list(range(7)),
        "predictions_1.pt": [0, 1],
    }


class PredictsFunctions(Evaluates):
    """Functions without a name of their own cannot be pickled."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [lambda: None for _ in batch["value"]]


def test_a_file_that_fails_half_way_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "predictions.pt").write_text("old")
    used, _ = balanced("single", 1, OrderedPredictionWriter(tmp_path))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        used.predict(PredictsFunctions(), values_loader(RAGGED), return_predictions=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("predictions.pt", "old")]


def write_without_a_common_folder(folder: Path) -> None:
    import os

    writer = OrderedPredictionWriter(folder / os.environ["RANK"])
    trainer("ddp", 2, callbacks=[writer]).predict(Evaluates(), values_loader(RAGGED), return_predictions=False)


def test_a_folder_that_not_all_ranks_see_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as error:
        run_ranks(write_without_a_common_folder, 2, tmp_path, timeout_s=60)
    for output in error.value.outputs:
        assert "predictions.rank_1.pt, which other ranks have written: choose a folder that all nodes see" in output


class ReturnsTheMean(Evaluates):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": batch["value"].mean()}


def test_outputs_that_are_not_of_samples_stay_as_they_are_with_a_warning(tmp_path: Path) -> None:
    used, balance = balanced(eval_max_tokens=9)
    sentence = r"predict_step's output\['loss'\] has the shape \(\), which has no entry for each of the 1 samples"
    with pytest.warns(UserWarning, match=sentence):
        predictions = used.predict(ReturnsTheMean(), values_loader([9, 1, 1]))
    assert [float(output["loss"]) for output in predictions] == [0.0, 1.5]
    with pytest.raises(
        ValueError, match="each of 3 samples, got 2 outputs by micro-batch: return one entry per sample"
    ):
        balance.gather_predictions(predictions)
    used, _ = balanced("single", 1, OrderedPredictionWriter(tmp_path))
    with pytest.raises(ValueError, match="which has no entry for each of"):
        used.predict(ReturnsTheMean(), values_loader([9, 1, 1]), return_predictions=False)


def test_gathering_needs_a_balanced_run() -> None:
    balance = BalanceCallback()
    predictions = trainer(callbacks=[balance]).predict(Evaluates(), values_loader(RAGGED))
    assert len(predictions) == 4  # the user's own batches
    with pytest.raises(ValueError, match="add 'predict' to BalanceCallback"):
        balance.gather_predictions(predictions)


def predict_and_go_on() -> Any:
    """Predictions are gathered after other runs, and of micro-batches of one sample each, which look like samples."""
    used, balance = balanced("ddp", 2, eval_max_tokens=4)
    predictions = used.predict(Evaluates(), values_loader([5, 1, 3, 2, 4, 6]))
    used.validate(Evaluates(), values_loader([1, 2, 3, 4, 5, 6]), verbose=False)
    gathered = as_values(balance.gather_predictions(predictions))
    means = trainer("ddp", 2, callbacks=[balance]).predict(ReturnsTheMean(), values_loader([4, 3, 4, 3]))
    try:
        balance.gather_predictions(means)
    except ValueError as error:
        return gathered, str(error)
    return gathered, None


def test_predictions_are_gathered_as_they_were_made_or_not_at_all() -> None:
    for gathered, error in run_ranks(predict_and_go_on, 2, timeout_s=60):
        assert gathered == [0, 1, 2, 3, 4, 5]
        assert error is not None
        assert "got 2 outputs by micro-batch: return one entry per sample" in error


def test_predictions_that_were_not_returned_cannot_be_gathered() -> None:
    used, balance = balanced()
    used.predict(Evaluates(), values_loader(RAGGED), return_predictions=False)
    with pytest.raises(ValueError, match="let predict return its predictions"):
        balance.gather_predictions([])


class OneRankReturnsMeans(Evaluates):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch["value"].mean() if self.global_rank == 1 else batch["value"]


def predict_means_on_one_rank() -> tuple[int, list[str]]:
    used, _ = balanced("ddp", 2, eval_max_tokens=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predictions = used.predict(OneRankReturnsMeans(), values_loader([2] * 12))
    return len(predictions), [str(warning.message) for warning in caught]


def test_a_rank_whose_outputs_are_not_of_samples_is_told_of_on_rank_zero() -> None:
    (zero, told), (one, _) = run_ranks(predict_means_on_one_rank, 2, timeout_s=60)
    assert zero == one == 2  # both by micro-batch
    assert any("returns outputs by micro-batch" in sentence for sentence in told)


def test_a_folder_that_is_none_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="output_dir must be a path, got None"):
        OrderedPredictionWriter(None)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    module = Evaluates()
    with pytest.raises(ValueError, match="is a file: choose a folder"):
        trainer(callbacks=[OrderedPredictionWriter(tmp_path / "file")]).predict(module, values_loader(RAGGED))
    assert not module.seen


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Values(RAGGED)[index] for index in range(2))


def test_the_writer_needs_indices(tmp_path: Path) -> None:
    loader = DataLoader(Stream(), batch_size=2, collate_fn=collate)
    with pytest.raises(ValueError, match="OrderedPredictionWriter needs to know which samples a batch has"):
        trainer(callbacks=[OrderedPredictionWriter(tmp_path)]).predict(Evaluates(), loader)


def test_a_subset_and_joined_data_sets_have_their_own_order() -> None:
    joined = ConcatDataset([Values([5, 1, 2]), Subset(Values([1, 7, 3, 2]), [3, 1])])
    used, _ = balanced(eval_max_tokens=8)
    predictions = used.predict(Evaluates(), DataLoader(joined, batch_size=2, collate_fn=collate))
    assert as_values(predictions) == [0, 1, 2, 3, 1]


@pytest.mark.parametrize("limit", [2, 0.5])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_limit_takes_the_samples_of_plain_batches(limit: float, workers: dict[str, Any]) -> None:
    used = trainer(callbacks=[BalanceCallback(stages=["predict"])], limit_predict_batches=limit)
    predictions = used.predict(Evaluates(), values_loader([3, 1, 4, 1, 5, 9, 2, 6], **workers))
    assert as_values(predictions) == [0, 1, 2, 3]
    assert used.limit_predict_batches == limit


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1, 2]), [1, 2]),
        (["a", "b"], ["a", "b"]),
        ((torch.tensor([1, 2]), ["a", "b"]), [(1, "a"), (2, "b")]),
        ({"x": {"y": torch.tensor([1, 2])}}, [{"x": {"y": 1}}, {"x": {"y": 2}}]),
        (SequenceClassifierOutput(logits=torch.tensor([[1], [2]])), [{"logits": [1]}, {"logits": [2]}]),
        (Pair(torch.tensor([1, 2]), [7, 8]), [Pair(1, 7), Pair(2, 8)]),
    ],
)
def test_outputs_are_taken_apart(output: Any, expected: list[Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return type(value)(*map(plain, value)) if hasattr(value, "_fields") else tuple(map(plain, value))
        return value.tolist() if hasattr(value, "tolist") else value

    split = split_by_sample(output, 2)
    assert [plain(entry) for entry in split] == expected
    if isinstance(output, torch.Tensor):
        assert split[0].untyped_storage().nbytes() == output[0].numel() * output.element_size()  # not the whole batch's


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (torch.tensor(1.0), r"has the shape \(\)"),
        (torch.ones(3), r"has the shape \(3,\)"),
        (["a"], "is a list of 1"),
        ({"loss": torch.tensor(1.0)}, r"output\['loss'\] has the shape \(\)"),
        ((torch.ones(2), "text"), r"output\[1\] is a str"),
        (None, "is a NoneType"),
        ((), "is an empty tuple"),
        ({"value": torch.ones(2), "states": ()}, r"output\['states'\] is an empty tuple"),
    ],
)
def test_outputs_that_cannot_be_taken_apart_say_which_part(output: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        split_by_sample(output, 2)


def test_the_order_has_each_sample_once() -> None:
    assert in_order([["c", "a"], ["b"], ["a"]], [[2, 0], [1], [0]]) == ([0, 1, 2], ["a", "b", "c"])
