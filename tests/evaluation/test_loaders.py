"""Which loaders are balanced, how they are limited, and what is refused."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from lightning_balance import BalanceCallback, BalancedDataModuleMixin
from lightning_balance.evaluation.sampler import EvaluationBatchSampler
from tests.distributed import RanksError, run_ranks
from tests.evaluation.toys import Evaluates, Values, collate, values_loader
from tests.toys import trainer

RAGGED = [3, 1, 4, 1, 5, 9, 2, 6]


def served(module: Evaluates, dataloader_idx: int = 0) -> list[list[int]]:
    return [sorted(map(int, values)) for loader, values in module.seen if loader == dataloader_idx]


def samples(batches: list[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


def fit(stages: list[str], *callbacks: Any, val: Any = None, options: dict[str, Any] | None = None, **arguments: Any):
    balance = BalanceCallback(stages=stages, print_summary=False, **(options or {}))
    used = trainer(callbacks=[balance, *callbacks], **{"max_epochs": 2, **arguments})
    module = Evaluates()
    used.fit(module, values_loader([2, 1, 3, 1], shuffle=True), values_loader(RAGGED) if val is None else val)
    return module, used, balance


def test_validation_inside_fit_is_balanced_too() -> None:
    module, used, _ = fit(["fit", "validate"], num_sanity_val_steps=0)
    batches = served(module)
    assert samples(batches) == sorted([*range(8)] * 2)
    assert batches[0] == [5, 7]  # the longest first: 9 and 6 tokens, as many as fit into 2 x 9
    assert float(used.callback_metrics["mean"]) == 3.5
    assert used.callback_metrics["mean_value"] == 3.5


@pytest.mark.parametrize("stages", [["fit"], ["fit", "test"]])
def test_loaders_of_other_stages_are_the_users_own(stages: list[str]) -> None:
    own = values_loader(RAGGED)
    _, used, _ = fit(stages, val=own)
    assert used.val_dataloaders is own
    used.validate(Evaluates(), own, verbose=False)
    assert used.val_dataloaders is own
    used.predict(Evaluates(), own)
    assert [len(batch) for batch in used.predict_dataloaders.batch_sampler] == [2] * 4


def test_training_is_left_alone_unless_it_is_asked_for() -> None:
    _, used, balance = fit(["validate"])
    assert not isinstance(used.train_dataloader.batch_sampler, EvaluationBatchSampler)
    assert type(used.train_dataloader.batch_sampler).__name__ == "BatchSampler"
    assert isinstance(used.val_dataloaders.batch_sampler, EvaluationBatchSampler)
    assert balance.max_tokens is None


def test_the_loops_are_given_back() -> None:
    _, used, _ = fit(["validate", "predict"])
    used.predict(Evaluates(), values_loader(RAGGED))
    for loop in (used.fit_loop.epoch_loop.val_loop, used.predict_loop):
        assert not {"setup_data", "_evaluation_step", "_predict_step"} & set(vars(loop))
    assert used.limit_val_batches == used.limit_predict_batches == 1.0


@pytest.mark.parametrize(("limit", "expected"), [(1, [0, 1]), (3, [*range(6)]), (0.5, [*range(4)]), (99, [*range(8)])])
def test_a_limit_takes_the_samples_of_plain_batches(limit: float, expected: list[int]) -> None:
    module, used, _ = fit(["validate"], limit_val_batches=limit, num_sanity_val_steps=0, max_epochs=1)
    assert samples(served(module)) == expected
    assert used.limit_val_batches == limit


def test_no_batches_are_no_batches_and_too_small_a_share_is_an_error() -> None:
    module, _, _ = fit(["validate"], limit_val_batches=0)
    assert not module.seen
    with pytest.raises(Exception, match=r"0\.1 \* 4 < 1"):
        fit(["validate"], limit_val_batches=0.1)


def test_a_sanity_check_runs_the_largest_micro_batches_and_counts_in_nothing() -> None:
    module, used, _ = fit(["validate"], num_sanity_val_steps=1, max_epochs=1)
    assert served(module)[0] == [5, 7]
    assert samples(served(module)[1:]) == [*range(8)]
    assert float(used.callback_metrics["mean"]) == 3.5
    module, _, _ = fit(["validate"], fast_dev_run=1)
    assert samples(served(module)) == [0, 1]


def test_several_loaders_are_balanced_each() -> None:
    val = {"a": values_loader(RAGGED), "b": values_loader([1, 2, 3, 4, 5, 6])}
    module, used, _ = fit(["validate"], val=val, num_sanity_val_steps=0, max_epochs=1)
    assert samples(served(module, 0)) == [*range(8)]
    assert samples(served(module, 1)) == [*range(6)]
    assert float(used.callback_metrics["mean/dataloader_idx_0"]) == 3.5
    assert float(used.callback_metrics["mean/dataloader_idx_1"]) == 2.5
    assert list(val) == ["a", "b"]
    assert type(val["a"].batch_sampler).__name__ == "BatchSampler"  # the user's own loader is as it was


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"eval_max_tokens": 24}, 24),
        ({"max_tokens": 12, "eval_max_tokens": 24}, 24),
        ({"max_tokens": 12}, 12),
        ({}, 18),  # no larger than a plain batch could be: 2 samples of the longest length
        ({"pad_to_multiple_of": 8}, 32),
        ({"max_tokens": "auto", "memory_limit_gib": 1.0}, 18),  # known only when training begins
    ],
)
def test_the_budget_of_an_evaluation(options: dict[str, Any], largest: int) -> None:
    balance = BalanceCallback(stages=["test"], **options)
    used = trainer(callbacks=[balance])
    used.test(Evaluates(), values_loader(RAGGED), verbose=False)
    plan = used.test_dataloaders.batch_sampler.plan
    multiple = options.get("pad_to_multiple_of", 1)
    assert plan.padded_tokens.max() <= largest
    assert (plan.padded_lengths % multiple == 0).all()
    assert plan.padded_tokens.max() > largest / 2  # and not much smaller


def test_loaders_are_planned_anew_when_they_are_reloaded() -> None:
    class Grows(LightningDataModule):
        num = 2

        def train_dataloader(self) -> Any:
            return values_loader([2, 1])

        def val_dataloader(self) -> Any:
            self.num += 1
            return values_loader([1] * self.num)

    balance = BalanceCallback(stages=["fit", "validate"], print_summary=False)
    used = trainer(callbacks=[balance], max_epochs=3, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0)
    module = Evaluates()
    used.fit(module, datamodule=Grows())
    assert len(samples(served(module))) == 3 + 4 + 5


def test_a_scanned_data_set_is_read_once() -> None:
    class Counts(Values):
        num_read = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.num_read += 1
            return super().__getitem__(index)

    data = Counts([3, 1, 2])
    val = DataLoader(data, batch_size=2, collate_fn=collate)
    balance = BalanceCallback(stages=["validate"], lengths=lambda sample: len(sample["x"]))
    used = trainer(callbacks=[balance], max_epochs=3, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1)
    used.fit(Evaluates(), values_loader([2, 1]), val)
    assert data.num_read == 3 + 3 * 3


def test_an_array_of_lengths_belongs_to_the_training_data() -> None:
    _, used, _ = fit(["fit", "validate"], options={"lengths": [5, 6, 7, 8]})
    assert used.train_dataloader.batch_sampler.lengths.tolist() == [5, 6, 7, 8]
    assert used.val_dataloaders.batch_sampler.plan.real_tokens.sum() == sum(RAGGED)
    balance = BalanceCallback(stages=["predict"], lengths=[2] * 8)
    used = trainer(callbacks=[balance])
    used.predict(Evaluates(), values_loader(RAGGED))
    assert used.predict_dataloaders.batch_sampler.plan.real_tokens.sum() == 16


def test_a_data_module_brings_its_own_stages() -> None:
    class Data(BalancedDataModuleMixin, LightningDataModule):
        def val_dataloader(self) -> Any:
            return values_loader(RAGGED)

    used = trainer()
    used.validate(Evaluates(), datamodule=Data(stages=["validate"]), verbose=False)
    assert isinstance(used.val_dataloaders.batch_sampler, EvaluationBatchSampler)
    used.validate(Evaluates(), values_loader(RAGGED), verbose=False)  # not its data
    assert not isinstance(used.val_dataloaders.batch_sampler, EvaluationBatchSampler)


def test_monitors_of_checkpoints_and_early_stopping_see_exact_values(tmp_path: Path) -> None:
    saver, stopper = ModelCheckpoint(tmp_path, monitor="mean"), EarlyStopping("mean_value", patience=1)
    _, used, _ = fit(["fit", "validate"], saver, stopper, max_epochs=9, enable_checkpointing=True)
    assert float(saver.best_model_score) == 3.5
    assert used.current_epoch == 2  # nothing got better


def test_figures_are_logged_by_stage(tmp_path: Path) -> None:
    _, used, _ = fit(["fit", "validate"], logger=CSVLogger(tmp_path), max_epochs=1)
    with (Path(used.log_dir) / "metrics.csv").open() as file:
        (row,) = (row for row in csv.DictReader(file) if row["balance/val/pad_efficiency"])
    plan = used.val_dataloaders.batch_sampler.plan
    assert float(row["balance/val/pad_efficiency"]) == pytest.approx(sum(RAGGED) / plan.padded_tokens.sum())
    assert float(row["balance/val/cost_spread"]) == 0.0  # one rank
    assert float(row["balance/val/tokens_per_second"]) > 0
    balance = BalanceCallback(stages=["test"])
    (logged,) = trainer(callbacks=[balance]).test(Evaluates(), values_loader(RAGGED), verbose=False)
    assert set(logged) >= {f"balance/test/{name}" for name in ("pad_efficiency", "cost_spread", "tokens_per_second")}


def test_a_predict_run_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer(callbacks=[BalanceCallback(stages=["predict"])]).predict(Evaluates(), values_loader(RAGGED))
    assert re.search(r"predict: 8 samples in 3 micro-batches, pad efficiency 0\.\d+, [\d,]+ tokens/s", caplog.text)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Fetches(Evaluates):
    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        next(dataloader_iter)


def joined() -> CombinedLoader:
    return CombinedLoader([values_loader(RAGGED), values_loader(RAGGED)], "max_size")


def weighted() -> DataLoader[Any]:
    return values_loader(RAGGED, sampler=WeightedRandomSampler([1.0] * 8, 8))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (lambda: DataLoader(Stream()), "cannot balance the IterableDataset Stream"),
    "weighted": (weighted, "the validation DataLoader has the sampler WeightedRandomSampler"),
    "list": (lambda: [1, 2], "BalanceCallback balances one validation DataLoader, got a list: make it a DataLoader"),
    "joined": (joined, r"the validation loaders run as CombinedLoader\(mode='max_size'\)"),
    "no batch size": (lambda: DataLoader(Values(RAGGED), batch_size=None), "the validation DataLoader has batch_size"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_loaders_that_cannot_be_balanced_are_refused(kind: str) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises((TypeError, ValueError), match=sentence):
        trainer(callbacks=[BalanceCallback(stages=["validate"])]).validate(Evaluates(), make(), verbose=False)


def test_a_step_that_fetches_its_own_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Fetches\.validation_step\(dataloader_iter\) fetches its own"):
        trainer(callbacks=[BalanceCallback(stages=["validate"])]).validate(Fetches(), values_loader(RAGGED))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stages": "validate"}, "stages must be a list of some of 'fit', 'validate', 'test', 'predict', got 'vali"),
        ({"stages": []}, "stages must be a list of some of"),
        ({"stages": ["val"]}, "every entry of stages must be one of 'fit', 'validate', 'test', 'predict', got 'val'"),
        ({"eval_max_tokens": 0, "stages": ["test"]}, "eval_max_tokens must be an integer >= 1, got 0"),
        ({"eval_max_tokens": 64}, r"eval_max_tokens=64 is the budget of validate, test and predict, but stages is"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BalanceCallback(**options)


@pytest.mark.parametrize("value", ["auto", 1.5, True])
def test_the_budget_of_evaluation_is_an_integer(value: Any) -> None:
    with pytest.raises(TypeError, match="eval_max_tokens must be an integer >= 1, got"):
        BalanceCallback(stages=["test"], eval_max_tokens=value)


@pytest.mark.parametrize("name", ["eval_max_tokens", "max_tokens"])
def test_integers_of_numpy_are_integers(name: str) -> None:
    used = trainer(callbacks=[BalanceCallback(stages=["test"], **{name: np.int64(128)})])
    used.test(Evaluates(), values_loader(RAGGED), verbose=False)
    assert used.test_dataloaders.batch_sampler.plan.num_slots == 1


def test_a_sample_over_the_budget_is_named() -> None:
    for options, name in (({"eval_max_tokens": 3}, "eval_max_tokens"), ({"max_tokens": 3}, "max_tokens")):
        balance = BalanceCallback(stages=["test"], oversize="error", **options)
        sentence = f"sample 2 of the test loader has length 4, above {name}=3, and oversize is 'error': raise {name},"
        with pytest.raises(ValueError, match=sentence):
            trainer(callbacks=[balance]).test(Evaluates(), values_loader(RAGGED))
    for oversize in ("single", "skip"):  # nothing is left out of an evaluation
        balance = BalanceCallback(stages=["test"], oversize=oversize, eval_max_tokens=3)
        (logged,) = trainer(callbacks=[balance]).test(Evaluates(), values_loader(RAGGED), verbose=False)
        assert logged["mean"] == 3.5


def test_an_empty_loader_among_others_has_no_batches() -> None:
    used = trainer(callbacks=[BalanceCallback(stages=["predict"])])
    found = used.predict(Evaluates(), [values_loader([1, 2]), values_loader([])])
    assert [len(predictions) for predictions in found] == [2, 0]


def test_the_order_of_stages_does_not_matter() -> None:
    assert BalanceCallback(stages=["test", "fit"]).settings.stages == ("fit", "test")


def evaluate_other_data() -> None:
    import os

    data = RAGGED if os.environ["RANK"] == "0" else [*RAGGED[:-1], 7]
    trainer("ddp", 2, callbacks=[BalanceCallback(stages=["test"])]).test(Evaluates(), values_loader(data))


def evaluate_other_loaders() -> None:
    import os

    loaders = [values_loader(RAGGED)] * (1 + int(os.environ["RANK"]))
    trainer("ddp", 2, callbacks=[BalanceCallback(stages=["test"])]).test(Evaluates(), loaders)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (evaluate_other_data, "the fingerprint of the test loader's lengths"),
        (evaluate_other_loaders, "the number of test loaders"),
    ],
)
def test_ranks_with_other_data_stop_with_one_sentence(function: Callable[[], None], what: str) -> None:
    with pytest.raises(RanksError) as error:
        run_ranks(function, 2, timeout_s=40)
    for output in error.value.outputs:
        assert f"{what} differs between ranks" in output


def test_weights_stay_out_of_evaluation() -> None:
    module, _, _ = fit(["fit", "validate"])
    assert all(torch.isfinite(p).all() for p in module.parameters())
