"""What fillers and unequal numbers of samples must not change, in every place where a module can look."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import (
    CatMetric,
    MeanMetric,
    Metric,
    MetricCollection,
)
from torchmetrics.classification import BinaryAccuracy, BinaryRecall
from torchmetrics.text import ROUGEScore
from torchmetrics.wrappers import BootStrapper, MetricTracker, MinMaxMetric, Running

from lightning_balance import BalanceCallback
from lightning_balance.agreement import gather_objects
from tests.distributed import run_ranks
from tests.evaluation.toys import Evaluates, values_loader
from tests.toys import trainer

ONE_FILLER = [1, 1, 1]  # with a budget of 1, on two ranks
UNEVEN = [5, 1, 1, 1, 1, 1, 1]  # with a budget of 6: 1 + 3 and 3 samples, no filler


class Numbers(Metric):
    """Keeps one number per sample, with or without a reduction."""

    def __init__(self, reduction: str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_state("numbers", default=[], dist_reduce_fx=reduction)
        self.number_type = dtype

    def update(self, values: Tensor) -> None:
        self.numbers += [value.to(self.number_type) for value in values]

    def compute(self) -> Tensor:
        numbers = self.numbers if isinstance(self.numbers, list) else [self.numbers]
        return torch.cat([number.reshape(-1) for number in numbers]).sort().values


class Collects(Evaluates):
    """Uses metrics in every way; `found` has what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.by_update, self.by_call, self.in_step = MeanMetric(), MeanMetric(), MeanMetric()
        self.means_of_batches = CatMetric()
        self.listed = Numbers(None, torch.int64)
        self.joined = Numbers("cat", torch.float64)
        self.wrapped = MinMaxMetric(BinaryAccuracy())
        self.rouge = ROUGEScore(rouge_keys="rouge1")
        self.returned: list[float] = []
        self.steps: list[float] = []
        self.by_hand: list[float] = []

    def evaluate(self, batch: dict[str, Tensor], dataloader_idx: int) -> None:
        value = batch["value"]
        self.layer(batch["x"].unsqueeze(-1))
        self.by_update.update(value)
        self.returned.append(float(self.by_call(value)))
        self.in_step.update(value)
        self.steps.append(float(self.in_step.compute()))
        self.means_of_batches.update(value.mean())
        self.listed.update(value)
        self.joined.update(value)
        self.wrapped.update(torch.ones(len(value)), (value % 2).long())
        self.rouge.update([f"a b{v:.0f}" for v in value], ["a c"] * len(value))
        self.log("logged", self.by_update)
        self.log("double", value.double().mean(), sync_dist=True, on_step=True, on_epoch=True)
        if not any(balance.is_filler for balance in self.trainer.callbacks if isinstance(balance, BalanceCallback)):
            self.by_hand += value.tolist()

    def on_evaluation_end(self) -> None:
        self.found = {
            "by_call": float(self.by_call.compute()),
            "in_step": float(self.in_step.compute()),
            "listed": self.listed.compute().reshape(-1).tolist(),
            "joined": self.joined.compute().reshape(-1).tolist(),
            "num_means": self.means_of_batches.compute().numel(),
            "wrapped": float(self.wrapped.compute()["raw"]),
            "rouge": float(self.rouge.compute()["rouge1_fmeasure"]),
        }


def collect(strategy: str, num_ranks: int, of_loaders: list[tuple[list[int], ...]], budget: int) -> list[Any]:
    found = []
    for lengths in of_loaders:
        module = Collects()
        used = trainer(strategy, num_ranks, callbacks=[BalanceCallback(stages=["test"], eval_max_tokens=budget)])
        logged = used.test(module, [values_loader(of_one) for of_one in lengths], verbose=False)
        found.append((logged, module.found, module.by_hand, module.returned, module.steps))
    return gather_objects(found)


SETS: list[tuple[list[int], ...]] = [
    (ONE_FILLER,),
    ([1],),
    (UNEVEN,),
    (ONE_FILLER, [1, 1]),
    ([1, 1], ONE_FILLER),
    (ONE_FILLER, [1]),
    ([1], [1, 1, 1]),
]


def check(of_ranks: list[Any], lengths: tuple[list[int], ...], place: int) -> None:
    values = [float(value) for of_one in lengths for value in range(len(of_one))]
    mean = sum(values) / len(values)
    rouge = ROUGEScore(rouge_keys="rouge1")([f"a b{value:.0f}" for value in values], ["a c"] * len(values))
    for logged, found, *_ in (of_rank[place] for of_rank in of_ranks):
        assert found["by_call"] == found["in_step"] == pytest.approx(mean)
        assert found["listed"] == found["joined"] == sorted(values)
        assert found["wrapped"] == pytest.approx(sum(value % 2 for value in values) / len(values))
        assert found["rouge"] == pytest.approx(float(rouge["rouge1_fmeasure"]))
        for index, (of_loader, of_one) in enumerate(zip(logged, lengths, strict=True)):
            suffix = "" if len(lengths) == 1 else f"/dataloader_idx_{index}"
            own = sum(range(len(of_one))) / len(of_one)
            assert of_loader[f"double_epoch{suffix}"] == pytest.approx(own)
    assert sorted(sum((of_rank[place][2] for of_rank in of_ranks), [])) == sorted(values)  # noqa: RUF017
    last = [of_rank[place][4][-1] for of_rank in of_ranks]
    assert last == pytest.approx([mean] * len(last))  # the last step's value has all samples, and no filler


@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("fsdp2", 2), ("ddp", 3)])
def test_no_metric_counts_a_filler(strategy: str, num_ranks: int) -> None:
    for budget, sets in ((1, SETS), (6, SETS[2:3])):
        if num_ranks == 3:
            sets = sets[:3]
        of_ranks = run_ranks(collect, num_ranks, strategy, num_ranks, sets, budget, timeout_s=150)[0]
        for place, lengths in enumerate(sets):
            check(of_ranks, lengths, place)


class Caches(Evaluates):
    """Computes metrics in every hook, so that what is cached on one rank has to be cached on all."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.called, self.other = MeanMetric(), MeanMetric(), MeanMetric()
        self.bootstrapped = BootStrapper(MeanMetric(), num_bootstraps=3, raw=True)
        self.tracked = MetricTracker(MeanMetric(), maximize=False)
        self.running = Running(MeanMetric(), window=2)
        self.composed = self.called + self.other
        # Every first sample tells them apart: torchmetrics joins metrics whose first counts are equal.
        low, high = BinaryRecall(threshold=0.05), BinaryRecall(threshold=0.25)
        self.grouped = MetricCollection({"low": low, "high": high})
        self.kept: Any = None
        self.found: list[Any] = []

    def on_test_epoch_start(self) -> None:
        self.early.update(5.0)
        self.tracked.increment()
        assert float(self.early.compute()) == 5.0
        self.made_here = Numbers(None, torch.float32)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        value = batch["value"]
        if batch_idx == 0:
            self.made_in_step = CatMetric()
        self.called(value)
        self.bootstrapped(value)
        self.tracked(value)
        self.running(value)
        self.composed(value)
        self.grouped.update(value / 10, torch.ones_like(value).long())
        self.made_here.update(value)
        self.made_in_step.update(value)
        self.kept = pickle.loads(pickle.dumps(self.called)), copy.deepcopy(self.called)

    def on_test_epoch_end(self) -> None:
        self.found = [
            float(self.early.compute()), float(self.called.compute()), float(self.tracked.compute()),
            self.made_here.compute().reshape(-1).tolist(), sorted(self.made_in_step.compute().reshape(-1).tolist()),
            float(self.composed.compute()), self.bootstrapped.compute()["raw"].numel(),
            [float(value) for value in self.grouped.compute().values()],
        ]  # fmt: skip
        for kept in self.kept:  # copies count as ever
            before = kept.weight.clone()
            kept(100.0)
            kept.update(100.0)
            assert float(kept.weight - before) == 2.0


def cache(strategy: str, num_ranks: int, of_loaders: list[list[int]]) -> list[Any]:
    found = []
    for lengths in of_loaders:
        module = Caches()
        used = trainer(strategy, num_ranks, callbacks=[BalanceCallback(stages=["test"], eval_max_tokens=1)])
        for _ in range(2):
            used.test(module, values_loader(lengths, first=1.0), verbose=False)
            found.append(module.found)
            for metric in (module.early, module.called, module.other, module.grouped):
                metric.reset()
        hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
        assert not any(hooks)
        assert not any("_sync_dist" in vars(part) for part in module.modules())
    return found


def test_what_is_cached_on_one_rank_is_cached_on_all() -> None:
    of_loaders = [ONE_FILLER, [1], [1, 1]]
    alone = cache("single", 1, of_loaders)
    for of_rank in run_ranks(cache, 2, "ddp", 2, of_loaders, timeout_s=120):
        assert len(of_rank) == len(alone) == 6
        for found, expected in zip(of_rank, alone, strict=True):
            assert found[:5] == expected[:5]
            assert found[6:] == expected[6:]


class LooksAround(Evaluates):
    """Reads what a trainer has, on fillers as elsewhere."""

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((dataloader_idx, batch["value"].tolist()))
        assert self.trainer.checkpoint_callback.best_model_path == ""
        assert Path(self.logger.log_dir).name.startswith("version")
        assert self.trainer.log_dir is not None
        self.log("by_step", batch["value"].mean(), on_step=True, on_epoch=False)
        self.log("mean", batch["value"].mean(), sync_dist=True)

    def on_test_epoch_end(self) -> None:
        pass


class Exchanges(Callback):
    """Logs, and waits for the other ranks, where every micro-batch ends."""

    def __init__(self) -> None:
        self.num_calls = 0

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.num_calls += 1
        trainer.strategy.barrier()
        module.log("by_callback", batch["value"].mean(), on_step=True, on_epoch=True, sync_dist=True)
        module.log("by_callback_max", batch["value"].max(), reduce_fx="max", sync_dist=True)


def look_around(folder: Path) -> Any:
    found = []
    for lengths in (ONE_FILLER, [1]):
        exchanges, module = Exchanges(), LooksAround()
        balance = BalanceCallback(stages=["test"], eval_max_tokens=1)
        used = trainer(
            "ddp", 2, callbacks=[exchanges, ModelCheckpoint(folder), balance], logger=CSVLogger(folder / "logs"),
            enable_checkpointing=True, log_every_n_steps=1,
        )  # fmt: skip
        (logged,) = used.test(module, values_loader(lengths, first=2.0), verbose=False)
        found.append((logged, exchanges.num_calls, len(module.seen)))
    return found


def test_everything_is_there_on_a_filler_and_callbacks_exchange_as_ever(tmp_path: Path) -> None:
    for found in run_ranks(look_around, 2, tmp_path, timeout_s=60):
        for (logged, num_calls, num_steps), num_samples in zip(found, (3, 1), strict=True):
            mean = 2 + (num_samples - 1) / 2
            assert logged["mean"] == logged["by_callback_epoch"] == pytest.approx(mean)
            assert logged["by_callback_max"] == 2 + num_samples - 1
            assert num_calls == num_steps == -(-num_samples // 2)


def stop_early() -> int:
    """A rank that has no sample must not see a nan, which would end the training."""
    balance = BalanceCallback(stages=["validate"])
    stopper = EarlyStopping("own", patience=5)

    class LogsItsOwn(Evaluates):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("own", batch["value"].mean())

        def on_validation_epoch_end(self) -> None:
            pass

    used = trainer("ddp", 2, callbacks=[stopper, balance], max_epochs=3)
    used.fit(LogsItsOwn(), values_loader([1, 1, 1, 1]), values_loader([1], first=7.0))
    assert float(used.callback_metrics["own"]) == 7.0
    return used.current_epoch


def test_a_rank_without_samples_does_not_stop_the_run() -> None:
    assert run_ranks(stop_early, 2, timeout_s=60) == [3, 3]


class Fails(Evaluates):
    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        if any(balance.is_filler for balance in self.trainer.callbacks if isinstance(balance, BalanceCallback)):
            raise RuntimeError("on a filler")

    def on_test_epoch_end(self) -> None:
        pass


def fail_on_a_filler() -> Any:
    module, balance = Fails(), BalanceCallback(stages=["test"])
    used = trainer("ddp", 2, callbacks=[balance])
    try:
        used.test(module, values_loader([1]), verbose=False)
    except RuntimeError as error:
        left = [name for name in ("update", "forward") if name in vars(module.classified)]
        return str(error), balance.is_filler, left, sorted(vars(used._logger_connector).keys() & {"log_metrics"})
    return None


def test_nothing_is_left_of_a_filler_that_fails() -> None:
    assert run_ranks(fail_on_a_filler, 2, timeout_s=60)[1] == ("on a filler", False, [], [])


def test_means_are_exact_whatever_the_default_type() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        balance = BalanceCallback(stages=["test"])

        class LogsNumbers(Evaluates):
            def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
                self.log("mean", batch["value"].float().mean())

            def on_test_epoch_end(self) -> None:
                pass

        used = trainer(callbacks=[balance])
        (logged,) = used.test(LogsNumbers(), values_loader([1] * 1000, 8), verbose=False)
    finally:
        torch.set_default_dtype(before)
    # The values that are logged are rounded already: 1000 numbers as bfloat16 have the mean 499.504.
    assert logged["mean"] == pytest.approx(torch.arange(1000.0).bfloat16().double().mean().item(), abs=0.5)
