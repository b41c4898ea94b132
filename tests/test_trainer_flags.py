"""Every Trainer flag in every mode: each cell of the tables in docs/trainer-flags.md is a test, and each test a cell.

A claim is a function with the name of what it claims. Those marked `@row` are about a run with the Trainer arguments of
the mark; those marked `@cell` train themselves. `ON_RANKS` are the rows that also train on two ranks.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from tests.command import REPOSITORY
from tests.distributed import run_ranks
from tests.test_trainer_refusals import LOADERS_REFUSED, REFUSALS
from tests.trainer_flags import (
    LR,
    LR_FACTOR,
    MODES,
    MODES_ON_RANKS,
    AsksEarly,
    Epoch,
    Mode,
    Observed,
    Record,
    Reloads,
    check,
    run,
)

Claim = Callable[[Sequence[Record], list[Epoch]], None]
NO_TIME = timedelta(microseconds=1)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        holds: what holds in every cell.
        cells: the text of the cells; a dict where modes differ.
        test: trains in a mode and asserts the claim.
        arguments: of the Trainer, and `model`; a function is called for each run. None: `test` trains as it likes.
        claim: what is asserted of the records of all ranks.
    """

    holds: str
    cells: str | dict[str, str]
    test: Callable[[Mode, Path], None]
    arguments: dict[str, Any] | None = None
    claim: Claim | None = None


ROWS: dict[str, Row] = {}


def train(mode: Mode, arguments: dict[str, Any], place: tuple[str, int] = ("single", 1)) -> Record:
    return run(mode, place=place, **{name: value() if callable(value) else value for name, value in arguments.items()})


def planned(mode: Mode, arguments: dict[str, Any], place: tuple[str, int] = ("single", 1)) -> list[Epoch]:
    accumulate = arguments.get("accumulate_grad_batches", mode.accumulate)
    sync = "micro_batch" if place[1] > 1 else "step"
    return dataclasses.replace(mode, accumulate=accumulate).epochs(9, place[1], sync)


def row(flag: str, holds: str, cells: str | dict[str, str] = "exact", **arguments: Any) -> Callable[[Claim], Claim]:
    """A claim about a run with these Trainer arguments, in every mode and on any number of ranks."""

    def add(claim: Claim) -> Claim:
        def test(mode: Mode, folder: Path) -> None:
            claim([train(mode, arguments)], planned(mode, arguments))

        assert flag not in ROWS
        ROWS[flag] = Row(holds, cells, test, arguments, claim)
        return claim

    return add


def cell(flag: str, holds: str, cells: str | dict[str, str] = "exact") -> Callable[[Any], Any]:
    """A claim that trains by itself, once in every mode."""

    def add(test: Callable[[Mode, Path], None]) -> Callable[[Mode, Path], None]:
        assert flag not in ROWS
        ROWS[flag] = Row(holds, cells, test)
        return test

    return add


def every_place(epochs: Sequence[Epoch], interval: float) -> list[tuple[int, int]]:
    """Epoch and micro-batches done after so many of them; a float is a share of each epoch."""
    found = []
    for index, epoch in enumerate(epochs):
        share = max(1, int(epoch.length * interval)) if isinstance(interval, float) else min(interval, epoch.length)
        found += [(index, end) for end in range(share, epoch.length + 1, share)]
    return found


def share_of(epochs: Sequence[Epoch], share: float) -> list[Epoch]:
    return [epoch.limited(max(1, int(share * epoch.length))) for epoch in epochs]


def all_steps(epochs: Sequence[Epoch]) -> int:
    return sum(len(epoch.steps) for epoch in epochs)


# --- the length of an epoch, and validation in it ---------------------------------------------------------------------


@row("`max_epochs`", "epochs are whole", max_epochs=3)
def epochs_are_as_long_as_planned_and_validated_once(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])


@row("`max_epochs=-1` with `max_steps`", "the run ends at an optimizer step", max_epochs=-1, max_steps=11)
def an_endless_run_goes_through_whole_epochs_until_its_last_step(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check_ends_at_step(ranks, epochs, 11)


@row("`max_steps`", "counts optimizer steps", max_steps=4)
def max_steps_ends_the_run_at_an_optimizer_step(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check_ends_at_step(ranks, epochs, 4)


def until_step(epochs: list[Epoch], num_steps: int) -> list[Epoch]:
    """The epochs of a run that ends after so many optimizer steps."""
    run_epochs: list[Epoch] = []
    for epoch in epochs:
        if num_steps:
            run_epochs.append(epoch.stopped(epoch.ends[min(num_steps, len(epoch.steps)) - 1]))
            num_steps -= len(run_epochs[-1].steps)
    return run_epochs


def check_ends_at_step(ranks: Sequence[Record], epochs: list[Epoch], num_steps: int) -> None:
    run_epochs = until_step(epochs, num_steps)
    ends = [(index, epoch.length) for index, epoch in enumerate(run_epochs) if not epoch.is_cut]
    check(ranks, run_epochs, validations=ends)


@row("`max_time`", "the run ends at a micro-batch", max_time=NO_TIME, max_epochs=-1)
def a_run_out_of_time_ends_at_a_micro_batch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, [epochs[0].stopped(1)], validations=[(0, 1)], estimate=float("inf"))


@row("`min_steps`", "counts optimizer steps", min_steps=7, max_time=NO_TIME)
def min_steps_are_optimizer_steps(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    run_epochs = until_step(epochs, 7)
    at = [(index, len(epoch.slots)) for index, epoch in enumerate(run_epochs)]
    check(ranks, run_epochs, validations=at, estimate=all_steps(epochs[:3]))


@row("`min_epochs`", "counts whole epochs", min_epochs=2, max_time=NO_TIME)
def min_epochs_are_whole_epochs(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:2], estimate=all_steps(epochs[:3]))


@row("`limit_train_batches=2`", "counts micro-batches; a step that is cut weighs what ran", limit_train_batches=2)
def a_limited_epoch_has_so_many_micro_batches(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, [epoch.limited(2) for epoch in epochs[:3]])


@row(
    "`limit_train_batches=0.4`", "a share of each epoch's own length, at least one micro-batch", limit_train_batches=0.4
)
def a_share_of_an_epoch_is_that_of_its_own_length_and_at_least_one(
    ranks: Sequence[Record], epochs: list[Epoch]
) -> None:
    check(ranks, share_of(epochs[:3], 0.4))


@row("`limit_train_batches=0`", "nothing runs", limit_train_batches=0)
def no_batches_are_no_epoch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    assert [record.served for record in ranks] == [[]] * len(ranks)
    assert [record.global_step for record in ranks] == [0] * len(ranks)
    assert {record.weight for record in ranks} == {1.0}


@row("`val_check_interval=0.5`", "a share of each epoch's own length", val_check_interval=0.5)
def a_share_of_every_epoch_is_validated_after(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], validations=every_place(epochs[:3], 0.5))


@row("`val_check_interval=3`", "counts micro-batches; a shorter epoch is validated at its end", val_check_interval=3)
def an_interval_counts_micro_batches_within_each_epoch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], validations=every_place(epochs[:3], 3))


@row(
    "`val_check_interval=4`, `check_val_every_n_epoch=None`",
    "counts micro-batches, on through the epochs",
    val_check_interval=4,
    check_val_every_n_epoch=None,
)
def an_interval_counts_on_through_the_epochs(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], validations=every_place(epochs[:3], 1)[3::4])


@row("`val_check_interval` (time)", "after a micro-batch", val_check_interval=NO_TIME)
def validation_by_the_clock_comes_after_a_micro_batch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], validations=every_place(epochs[:3], 1))


@cell("`val_check_interval` (time string)", "never before the time is over")
def a_clock_that_does_not_strike_never_validates(mode: Mode, folder: Path) -> None:
    check([run(mode, val_check_interval="01:00:00:00")], mode.epochs(3), validations=[])


@row("`check_val_every_n_epoch=2`", "at the epoch's real end", check_val_every_n_epoch=2)
def every_second_epoch_is_validated(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], validations=[(1, epochs[1].length)])


@cell("`limit_val_batches`", "the validation loader is left alone")
def validation_runs_its_own_batches(mode: Mode, folder: Path) -> None:
    epochs, num_batches = mode.epochs(3), -(-len(mode.lengths) // 6)
    for limit, expected in ((1.0, num_batches), (2, 2), (0.4, 1)):
        record = run(mode, limit_val_batches=limit)
        check([record], epochs)
        assert record.validation_batches == [expected] * 3
    check([run(mode, limit_val_batches=0)], epochs, validations=[])


@row("`num_sanity_val_steps`", "takes nothing from training", num_sanity_val_steps=2)
def the_sanity_check_takes_nothing_from_training(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])
    assert [record.num_sanity_batches for record in ranks] == [2] * len(ranks)


@cell("`reload_dataloaders_every_n_epochs`", "every loader is balanced again")
def a_reloaded_loader_is_balanced_again(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(4)
    for every, requests in ((0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2])):
        record = run(mode, model=Reloads(), max_epochs=4, reload_dataloaders_every_n_epochs=every)
        check([record], epochs)
        assert record.requests == requests


@row(
    "`reload_dataloaders_every_n_epochs` with `val_check_interval=3`",
    "a shorter epoch is validated at its end",
    reload_dataloaders_every_n_epochs=1,
    val_check_interval=3,
)
def a_reloaded_epoch_that_is_shorter_than_the_interval_is_validated_at_its_end(
    ranks: Sequence[Record], epochs: list[Epoch]
) -> None:
    an_interval_counts_micro_batches_within_each_epoch(ranks, epochs)


@row(
    "`reload_dataloaders_every_n_epochs` with `limit_train_batches=0.4`",
    "at least one micro-batch",
    reload_dataloaders_every_n_epochs=1,
    limit_train_batches=0.4,
)
def a_share_of_a_reloaded_epoch_is_at_least_one_micro_batch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    a_share_of_an_epoch_is_that_of_its_own_length_and_at_least_one(ranks, epochs)


@cell("`fit(ckpt_path=...)` with `val_check_interval=3`", "a shorter epoch is validated at its end")
def a_run_continues_in_an_epoch_that_is_shorter_than_the_interval(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    saver = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True, filename="{epoch}")
    run(mode, saver, enable_checkpointing=True, max_epochs=2)
    record = run(mode, model=AsksEarly(), ckpt_path=folder / "epoch=1.ckpt", val_check_interval=3)
    assert record.served == [epochs[2].served(0)]
    assert record.validations == [(2, end) for _, end in every_place(epochs[2:], 3)]
    assert record.gradients == pytest.approx(epochs[2].gradients)
    assert record.global_step == all_steps(epochs)
    assert record.estimates == {all_steps(epochs)}


@row("`fast_dev_run`", "counts micro-batches", fast_dev_run=2)
def a_fast_run_is_so_many_micro_batches(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, [epochs[0].limited(2)])


@cell("`overfit_batches`", "would replace the sampler", "refused")
def overfit_batches_is_refused(mode: Mode, folder: Path) -> None:
    for batches in (1, 0.5):
        check_refused(mode, f"does not support Trainer(overfit_batches={float(batches)})", overfit_batches=batches)


def check_refused(mode: Mode, sentence: str, *callbacks: Any, **arguments: Any) -> None:
    """Nothing is trained, and what is wrong is said in one sentence."""
    model = arguments.pop("model", None) or Observed()
    with pytest.raises(ValueError, match="BalanceCallback") as error:
        run(mode, *callbacks, model=model, **arguments)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert model.record.served == []


# --- steps ------------------------------------------------------------------------------------------------------------


class OneCycle(AsksEarly):
    """A schedule that fails when it is stepped once too often (PL#12894)."""

    def make_scheduler(self, optimizer: Any) -> Any:
        total = int(self.trainer.estimated_stepping_batches)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=total, cycle_momentum=False)


class KeepsRates(OneCycle):
    """Keeps the learning rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.rates.append(optimizer.param_groups[0]["lr"])


@row("`estimated_stepping_batches`", "the steps really taken, in every hook", model=AsksEarly)
def the_estimate_is_the_number_of_steps_in_every_hook(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])


@cell("`estimated_stepping_batches` under limits", "the steps really taken")
def the_estimate_counts_the_steps_of_limited_epochs(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    check([run(mode, model=AsksEarly(), limit_train_batches=2)], [epoch.limited(2) for epoch in epochs])
    check([run(mode, model=AsksEarly(), limit_train_batches=0.7)], share_of(epochs, 0.7))
    check_ends_at_step([run(mode, model=AsksEarly(), max_steps=4)], epochs, 4)


@cell('LR scheduler, `interval="step"`', "once per optimizer step")
def a_schedule_over_all_steps_ends_with_the_run(mode: Mode, folder: Path) -> None:
    model, epochs = KeepsRates(), mode.epochs(3)
    check([run(mode, model=model)], epochs, learning_rates=model.rates)
    wanted = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        wanted, max_lr=LR, total_steps=all_steps(epochs), cycle_momentum=False
    )
    rates = []
    for _ in range(all_steps(epochs)):
        rates.append(schedule.get_last_lr()[0])
        wanted.step()
        if len(rates) < all_steps(epochs):
            schedule.step()
    assert model.rates == pytest.approx(rates)


class EveryEpoch(Observed):
    interval = "epoch"


class EverySecond(Observed):
    frequency = 2


@row('LR scheduler, `interval="epoch"`', "once per epoch", model=EveryEpoch)
def a_schedule_by_epochs_steps_once_per_epoch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    rates = [LR * LR_FACTOR**index for index, epoch in enumerate(epochs[:3]) for _ in epoch.steps]
    check(ranks, epochs[:3], learning_rates=rates, num_lr_steps=3)


@row(
    "LR scheduler, `frequency=2`",
    "after steps that end at an even micro-batch, as in Lightning",
    {
        "rebalance": "every second step of an epoch",
        "rebalance, accumulate 2": "every step",
        "token budget": "irregular: use 1",
        "filled to the budget": "every second step of an epoch",
        "lookahead": "irregular: use 1",
    },
    model=EverySecond,
)
def a_frequency_counts_micro_batches(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    rates, num_lr_steps = [], 0
    for end in itertools.chain(*(epoch.ends for epoch in epochs[:3])):
        rates.append(LR * LR_FACTOR**num_lr_steps)
        num_lr_steps += end % 2 == 0
    check(ranks, epochs[:3], learning_rates=rates, num_lr_steps=num_lr_steps)


@row(
    "`accumulate_grad_batches=3`",
    "says what a step is, and is 3 again after `fit`",
    {
        "rebalance": "micro-batches",
        "rebalance, accumulate 2": "micro-batches",
        "token budget": "batches of samples",
        "filled to the budget": "micro-batches",
        "lookahead": "batches of samples",
    },
    model=AsksEarly,
    accumulate_grad_batches=3,
)
def accumulation_sets_what_a_step_is(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])
    assert {record.accumulate for record in ranks} == {3}, "the trainer's own value is not back"


@row("`gradient_clip_val` (norm)", "clips the gradient of the step", gradient_clip_val=9.0)
def the_norm_that_is_clipped_is_that_of_the_step(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], update=lambda gradient: min(gradient, 9.0))
    assert min(ranks[0].gradients) < 9.0 < max(ranks[0].gradients), "nothing or everything was clipped"


@row(
    '`gradient_clip_algorithm="value"`',
    "clips the gradient of the step",
    gradient_clip_val=9.0,
    gradient_clip_algorithm="value",
)
def the_value_that_is_clipped_is_that_of_the_step(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    the_norm_that_is_clipped_is_that_of_the_step(ranks, epochs)


@row("`use_distributed_sampler=False`", "the same samples", use_distributed_sampler=False)
def the_trainers_own_sampler_is_not_needed(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])


# --- how a step is computed -------------------------------------------------------------------------------------------


@row('`precision="bf16-mixed"`', "the step's gradient", "within rounding", precision="bf16-mixed")
def mixed_precision_has_the_steps_gradient(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], rel=0.02)


@row('`precision="bf16-true"`', "the step's gradient", "within rounding", precision="bf16-true")
def low_precision_has_the_steps_gradient(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], rel=0.05)


@row('`precision="64-true"`', "the step's gradient to 12 digits", precision="64-true")
def double_precision_has_the_steps_gradient(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], rel=1e-12)


@row("`detect_anomaly`", "finds none", detect_anomaly=True)
def anomaly_detection_finds_none(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])


@cell("`deterministic`", "two runs are equal, bit by bit")
def a_deterministic_run_is_the_same_twice(mode: Mode, folder: Path) -> None:
    try:
        one, other = (run(mode, deterministic=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    check([one], mode.epochs(3))
    assert dataclasses.replace(one, metrics={}) == dataclasses.replace(other, metrics={})  # memory is measured


@row("`inference_mode=False`", "is for validation only", inference_mode=False)
def inference_mode_is_for_validation_only(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])
    assert [record.inference_modes for record in ranks] == [{False}] * len(ranks)


class Normalized(Observed):
    """Feeds what it reads to a batch norm layer as well, whose statistics say what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.record.norm_layers.add(type(self.norm).__name__)
        self.norm(torch.cat([batch["index"], batch["index"]]).float().unsqueeze(1))
        return super().training_step(batch, batch_idx)

    def gradient(self) -> float:
        return float("nan") if self.layer.weight.grad is None else super().gradient()


@row("`sync_batchnorm`", "nothing to synchronise on one device", "no effect", model=Normalized, sync_batchnorm=True)
def synchronised_layers_change_nothing_else(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])
    assert [record.norm_layers for record in ranks] == [{"BatchNorm1d"}]


# --- what is shown and logged -----------------------------------------------------------------------------------------


def logged(folder: Path, column: str) -> dict[int, float]:
    """Values of a column by step, as the CSV logger wrote them."""
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    return {int(line["step"]): float(line[column]) for line in rows if line.get(column)}


class LogsSteps(Observed):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("first_sample", float(batch["index"][0]), on_step=True, batch_size=1)
        return super().training_step(batch, batch_idx)


@cell("`log_every_n_steps`", "counts optimizer steps")
def loggers_write_at_every_second_optimizer_step(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    check([run(mode, model=LogsSteps(), logger=CSVLogger(folder), log_every_n_steps=2)], epochs)
    windows = [window for epoch in epochs for window in epoch.steps]
    last = {step: window[-1][0][0][0] for step, window in enumerate(windows) if step % 2}
    assert logged(folder, "first_sample") == last
    assert [*logged(folder, "balance/pad_efficiency")] == [*last]


def watched(bar: type) -> Any:
    """A progress bar that keeps total and position at the end of every epoch."""

    class Watched(bar):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[float, float]] = []

        def on_train_epoch_end(self, *arguments: Any) -> None:
            super().on_train_epoch_end(*arguments)
            shown = self.train_progress_bar
            self.seen.append((shown.total, getattr(shown, "completed", getattr(shown, "n", None))))

    return Watched()


@cell("`enable_progress_bar` (TQDM)", "total and end are each epoch's own length")
def the_bar_is_as_long_as_each_epoch(mode: Mode, folder: Path) -> None:
    check_bar(mode, watched(TQDMProgressBar))


@cell("`enable_progress_bar` (Rich)", "total and end are each epoch's own length")
def the_rich_bar_is_as_long_as_each_epoch(mode: Mode, folder: Path) -> None:
    check_bar(mode, watched(RichProgressBar))


def check_bar(mode: Mode, bar: Any) -> None:
    epochs = mode.epochs(3)
    check([run(mode, bar, enable_progress_bar=True)], epochs)
    assert bar.seen == [(epoch.length, epoch.length) for epoch in epochs]
    bar.seen.clear()
    limited = share_of(epochs, 0.4)
    check([run(mode, bar, enable_progress_bar=True, limit_train_batches=0.4)], limited)
    assert bar.seen == [(epoch.length, epoch.length) for epoch in limited]


@row("`barebones`", "nothing is logged", barebones=True)
def barebones_logs_nothing(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3])
    assert [record.metrics for record in ranks] == [{}] * len(ranks)


@cell("`profiler`", "counts micro-batches and steps")
def the_profiler_counts_micro_batches_and_steps(mode: Mode, folder: Path) -> None:
    profiler, epochs = SimpleProfiler(folder), mode.epochs(3)
    check([run(mode, profiler=profiler)], epochs)
    times = profiler.recorded_durations
    assert len(times["run_training_batch"]) == sum(epoch.length for epoch in epochs)
    assert len(times["[LightningModule]Observed.optimizer_step"]) == all_steps(epochs)
    assert len(times["run_training_epoch"]) == 3


# --- callbacks of Lightning -------------------------------------------------------------------------------------------


def stopper() -> list[EarlyStopping]:
    return [EarlyStopping("val_loss", patience=1)]


@row("`EarlyStopping`", "the run ends after a whole epoch", callbacks=stopper)
def early_stopping_ends_the_run_after_an_epoch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:2], estimate=all_steps(epochs[:3]))


@row(
    "`EarlyStopping` with `min_epochs`",
    "the run ends after a whole epoch",
    callbacks=stopper,
    min_epochs=3,
    max_epochs=5,
)
def early_stopping_waits_for_min_epochs(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    check(ranks, epochs[:3], estimate=all_steps(epochs[:5]))


@row(
    "`EarlyStopping` with `val_check_interval=2`",
    "the run ends at a micro-batch",
    callbacks=stopper,
    val_check_interval=2,
)
def early_stopping_inside_an_epoch_ends_at_a_micro_batch(ranks: Sequence[Record], epochs: list[Epoch]) -> None:
    at = every_place(epochs[:2], 2)[:2]  # the first validation is the best one, the second is worse
    last, num_batches = at[-1]
    run_epochs = [*epochs[:last], epochs[last].stopped(num_batches)]
    check(ranks, run_epochs, validations=at, estimate=all_steps(epochs[:3]))


@cell("`ModelCheckpoint(every_n_train_steps=2)`", "counts optimizer steps")
def checkpoints_are_saved_at_every_second_optimizer_step(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    check([run(mode, saver, enable_checkpointing=True)], epochs)
    assert saved(folder) == {f"step={step}" for step in range(2, all_steps(epochs) + 1, 2)}


@cell("`ModelCheckpoint(every_n_epochs=2)`", "counts epochs")
def checkpoints_are_saved_after_every_second_epoch(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(5)
    saver = ModelCheckpoint(folder, every_n_epochs=2, save_top_k=-1, filename="{epoch}-{step}")
    check([run(mode, saver, enable_checkpointing=True, max_epochs=5)], epochs)
    assert saved(folder) == {f"epoch={last}-step={all_steps(epochs[: last + 1])}" for last in (1, 3)}


@cell("`ModelCheckpoint(train_time_interval=...)`", "saves after an optimizer step")
def checkpoints_by_the_clock_are_saved_after_a_step(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    saver = ModelCheckpoint(folder, train_time_interval=NO_TIME, save_top_k=-1, filename="{step}")
    check([run(mode, saver, enable_checkpointing=True)], epochs)
    assert saved(folder) == {f"step={step}" for step in range(1, all_steps(epochs) + 1)}


def saved(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.ckpt")}


@cell("`LearningRateMonitor`", "logs once per optimizer step")
def learning_rates_are_logged_once_per_step(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    check([run(mode, LearningRateMonitor("step"), logger=CSVLogger(folder), log_every_n_steps=1)], epochs)
    rates = {step: LR * LR_FACTOR**step for step in range(all_steps(epochs))}
    assert logged(folder, "lr-SGD") == pytest.approx(rates)


@cell("`ThroughputMonitor`", "counts served samples")
def throughput_counts_what_was_served(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["index"]))
    check([run(mode, monitor, logger=CSVLogger(folder), log_every_n_steps=1)], epochs)
    served = [len(indices) for epoch in epochs for indices in epoch.served(0)]
    ends = itertools.accumulate(len(window) for epoch in epochs for window in epoch.steps)
    assert logged(folder, "train/samples") == {step: sum(served[:end]) for step, end in enumerate(ends)}


@cell("`StochasticWeightAveraging`", "averages at the epochs' starts, as in Lightning")
def stochastic_averaging_is_the_mean_over_epochs(mode: Mode, folder: Path) -> None:
    record = run(mode, StochasticWeightAveraging(swa_lrs=LR, swa_epoch_start=1))
    check_steps_only(record, mode.epochs(3))
    assert record.weight == pytest.approx(sum(record.epoch_weights) / 3)
    assert len(set(record.epoch_weights)) == 3


@cell("`StochasticWeightAveraging` with batch norm", "a whole pass over an epoch that changes no weight")
def the_pass_for_batch_norm_reads_an_epoch_and_changes_no_weight(mode: Mode, folder: Path) -> None:
    model, epochs = Normalized(), mode.epochs(4)
    averaging = StochasticWeightAveraging(swa_lrs=LR, swa_epoch_start=1)
    record = run(mode, averaging, model=model, limit_val_batches=0)
    assert record.served == [epoch.served(0) for epoch in epochs]
    assert record.gradients[:-1] == pytest.approx([gradient for epoch in epochs[:3] for gradient in epoch.gradients])
    assert record.global_step == all_steps(epochs[:3]) + 1, "Lightning counts a step at the end of the pass"
    assert record.weight == pytest.approx(sum(record.epoch_weights[:3]) / 3)
    means = [sum(indices) / len(indices) for indices in epochs[3].served(0)]
    assert float(model.norm.running_mean) == pytest.approx(sum(means) / len(means))  # type: ignore[arg-type]


def check_steps_only(record: Record, epochs: Sequence[Epoch]) -> None:
    """What holds when the weight is not the one that the optimizer left."""
    assert record.served == [epoch.served(0) for epoch in epochs]
    assert record.gradients == pytest.approx([gradient for epoch in epochs for gradient in epoch.gradients])
    assert record.global_step == all_steps(epochs)


@cell("`WeightAveraging`", "averages after each optimizer step")
def averaged_weights_are_those_after_each_step(mode: Mode, folder: Path) -> None:
    epochs = mode.epochs(3)
    record = run(mode, WeightAveraging())
    check_steps_only(record, epochs)
    gradients = [gradient for epoch in epochs for gradient in epoch.gradients]
    updates = [-LR * LR_FACTOR**step * gradient for step, gradient in enumerate(gradients)]
    weights = [*itertools.accumulate(updates, initial=1.0)][1:]
    assert record.weight == pytest.approx(sum(weights) / len(weights))


@cell("`Timer`", "the run ends at a micro-batch, or at an epoch's end")
def a_timer_ends_the_run_after_a_micro_batch_or_an_epoch(mode: Mode, folder: Path) -> None:
    epochs, steps = mode.epochs(3), all_steps(mode.epochs(3))
    check([run(mode, Timer(NO_TIME))], [epochs[0].stopped(1)], validations=[(0, 1)], estimate=steps)
    check([run(mode, Timer(NO_TIME, interval="epoch"))], epochs[:1], estimate=steps)


@cell("`GradientAccumulationScheduler`", "would set the windows, too", "refused")
def the_accumulation_scheduler_is_refused(mode: Mode, folder: Path) -> None:
    sentence = "BalanceCallback and GradientAccumulationScheduler both set the accumulation windows"
    check_refused(mode, sentence, GradientAccumulationScheduler({0: 2}))


class HasBatchSize(Reloads):
    batch_size = 2


@cell("`BatchSizeFinder`", "would set the batch size, too", "refused")
def the_batch_size_finder_is_refused(mode: Mode, folder: Path) -> None:
    sentence = "BalanceCallback and the batch size finder (Tuner.scale_batch_size) both set the batch size"
    check_refused(mode, sentence, BatchSizeFinder(), model=HasBatchSize())


@cell("`LearningRateFinder`", "would run without weights", "refused")
def the_learning_rate_finder_is_refused(mode: Mode, folder: Path) -> None:
    check_refused(mode, "the learning rate finder (Tuner.lr_find) runs without", LearningRateFinder())


# --- the tables -------------------------------------------------------------------------------------------------------

PLACES = {"DDP x 2": ("ddp", 2), "FSDP2 x 2": ("fsdp2", 2)}
ON_RANKS = [
    "`max_steps`",
    "`max_time`",
    "`limit_train_batches=0.4`",
    "`val_check_interval=3`",
    "`reload_dataloaders_every_n_epochs` with `limit_train_batches=0.4`",
    "`estimated_stepping_batches`",
    "`accumulate_grad_batches=3`",
    "`gradient_clip_val` (norm)",
    "`EarlyStopping` with `val_check_interval=2`",
]


def name(*parts: str) -> str:
    return "-".join(parts).replace("`", "").replace('"', "'")


CELLS = [pytest.param(flag, mode, id=name(flag, mode)) for flag in ROWS for mode in MODES]
CELLS_ON_RANKS = [
    pytest.param(flag, place, mode, id=name(flag, place, mode))
    for flag, place, mode in itertools.product(ON_RANKS, PLACES, MODES)
]


@pytest.mark.parametrize(("flag", "mode"), CELLS)
def test_in_one_process(flag: str, mode: str, tmp_path: Path) -> None:
    ROWS[flag].test(MODES[mode], tmp_path)


def train_all_on_this_rank() -> dict[tuple[str, str, str], Record]:
    """Every cell on two ranks, one after another in the same processes."""
    return {
        (flag, place, mode): train(MODES_ON_RANKS[mode], ROWS[flag].arguments or {}, PLACES[place])
        for place, flag, mode in itertools.product(PLACES, ON_RANKS, MODES)
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str, str], Record]]:
    return run_ranks(train_all_on_this_rank, 2, timeout_s=200)


@pytest.mark.parametrize(("flag", "place", "mode"), CELLS_ON_RANKS)
def test_on_two_ranks(flag: str, place: str, mode: str, ranks: list[dict[tuple[str, str, str], Record]]) -> None:
    records = [rank[flag, place, mode] for rank in ranks]
    arguments, claim = ROWS[flag].arguments, ROWS[flag].claim
    assert arguments is not None
    assert claim is not None
    claim(records, planned(MODES_ON_RANKS[mode], arguments, PLACES[place]))


@pytest.mark.parametrize(("mode", "has_step"), [("rebalance", True), ("rebalance, accumulate 2", False)])
def test_an_epoch_that_ends_inside_its_first_window_logs_no_planned_figures(mode: str, has_step: bool) -> None:
    record = run(MODES[mode], max_time=NO_TIME)
    assert bool(record.gradients) == has_step
    assert ("balance/pad_efficiency_epoch" in record.metrics) == has_step
    assert ("balance/cost_spread_epoch" in record.metrics) == has_step


# --- can the cells fail? ----------------------------------------------------------------------------------------------

REFUSED = [flag for flag, row in ROWS.items() if row.cells == "refused"]
# One micro-batch is one whether or not the epoch's length is right, and nothing is nothing.
HOLD_WITHOUT = ["`max_time`", "`limit_train_batches=2`", "`limit_train_batches=0`", "`fast_dev_run`"]
DIFFER_FROM_LIGHTNING = [
    *REFUSED,
    "`accumulate_grad_batches=3`",  # Lightning takes the mean of means
    "`log_every_n_steps`",  # Lightning has no balance/pad_efficiency
    "`StochasticWeightAveraging` with batch norm",  # Lightning applies the last gradient once more
]


@pytest.mark.parametrize("flag", [flag for flag in ROWS if flag not in HOLD_WITHOUT + REFUSED], ids=name)
def test_a_claim_does_not_hold_without_the_callback(flag: str, tmp_path: Path) -> None:
    """The same micro-batches from the sampler alone: Lightning cuts the epoch of five and loses a validation."""
    mode = dataclasses.replace(MODES["filled to the budget"], is_plain=True)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        ROWS[flag].test(mode, tmp_path)


@pytest.mark.parametrize("flag", [flag for flag in ROWS if flag not in DIFFER_FROM_LIGHTNING], ids=name)
def test_a_claim_is_what_lightning_does_where_all_epochs_are_alike(flag: str, tmp_path: Path) -> None:
    ROWS[flag].test(dataclasses.replace(MODES["rebalance"], is_plain=True), tmp_path)


def test_lightning_cuts_epochs_of_three_five_and_two_micro_batches() -> None:
    """PL#18023, PL#20330."""
    record = run(dataclasses.replace(MODES["filled to the budget"], is_plain=True))
    assert [epoch.length for epoch in MODES["filled to the budget"].epochs(3)] == [3, 5, 2]
    assert [len(served) for served in record.served] == [3, 3, 2]
    assert len(record.validations) == 2
    assert record.estimates == {9}


# --- the docs ---------------------------------------------------------------------------------------------------------

PAGE = REPOSITORY / "docs" / "trainer-flags.md"


def text(flag: str, mode: str) -> str:
    cells = ROWS[flag].cells
    return cells if isinstance(cells, str) else cells[mode]


def tables() -> dict[str, list[list[str]]]:
    """The tables that the docs have to hold, by the heading above them."""
    return {
        "In one process": [
            ["flag", "what holds", *MODES],
            *([flag, ROWS[flag].holds, *(text(flag, mode) for mode in MODES)] for flag in ROWS),
        ],
        "On two ranks": [
            ["flag", "strategy", *MODES],
            *([flag, place, *(text(flag, mode) for mode in MODES)] for flag in ON_RANKS for place in PLACES),
        ],
        "Refused": [
            ["what", "the sentence"],
            *([what, sentence] for what, (sentence, _) in REFUSALS.items()),
            *([what, f"... {sentence} ..."] for what, sentence in LOADERS_REFUSED.items()),
        ],
    }


def markdown(table: list[list[str]]) -> str:
    head, *body = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


@pytest.mark.parametrize("heading", tables())
def test_the_docs_have_every_cell_and_no_other(heading: str) -> None:
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    written = [line for line in section[1].splitlines() if line.startswith("|")]
    assert written == markdown(tables()[heading]).splitlines()
