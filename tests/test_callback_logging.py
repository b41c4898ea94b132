"""What balanced training writes to loggers and the console, and what it leaves alone."""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_balance import BalanceCallback, BalancedDataModuleMixin, plan_epoch
from lightning_balance.efficiency import cost_spread
from tests.allocator import Allocator
from tests.distributed import run_ranks
from tests.toys import ScalarModel, TokenDataset, equal_samples, loader, trainer

LONG_TAIL = [9, 1, 2, 1, 7, 1, 1, 3, 1, 2, 1, 1, 5, 1, 1, 2, 4]
STEP_KEYS = {
    "balance/pad_efficiency",
    "balance/cost_spread",
    "balance/step_time_s",
    "balance/tokens_per_second",
    "balance/padded_tokens_per_second",
    "balance/samples_per_second",
    "balance/planning_time_s",
}
WAIT_KEYS = {
    "balance/wait_time_mean_s",
    "balance/wait_time_max_s",
    "balance/wait_time_s/rank_0",
    "balance/wait_time_s/rank_1",
}
EPOCH_KEYS = {"balance/pad_efficiency_epoch", "balance/cost_spread_epoch"}
MEMORY_KEYS = {"balance/peak_memory_gib", "balance/peak_rss_gib"}
BAREBONES: dict[str, Any] = {
    "barebones": True,
    "logger": None,
    "enable_checkpointing": None,
    "enable_progress_bar": None,
    "enable_model_summary": None,
    "limit_val_batches": None,
    "log_every_n_steps": None,
}
NOT_OURS = (
    "isinstance(treespec, LeafSpec)",
    "does not have many workers",
    "is smaller than the logging interval",
    "defined a `validation_step` but have no `val_dataloader`",
    "litlogger",
)


def fit(
    *,
    data: TokenDataset | None = None,
    batch_size: int = 2,
    strategy: str = "single",
    num_ranks: int = 1,
    model: ScalarModel | None = None,
    train: Any = None,
    ckpt_path: Any = None,
    options: dict[str, Any] | None = None,
    **trainer_arguments: Any,
) -> ScalarModel:
    callback = BalanceCallback(**{"loss_reduction": "token_mean", "print_summary": False, **(options or {})})
    callbacks = [callback, *trainer_arguments.pop("callbacks", [])]
    arguments = {"log_every_n_steps": 1, "limit_val_batches": 0, **trainer_arguments}
    model = model or ScalarModel()
    run = trainer(strategy, num_ranks, callbacks=callbacks, **arguments)
    run.fit(model, train or loader(data or equal_samples(LONG_TAIL), batch_size, shuffle=True), ckpt_path=ckpt_path)
    return model


def read_csv(folder: Path | str) -> list[dict[str, float]]:
    with next(Path(folder).rglob("metrics.csv")).open() as file:
        return [{key: float(value) for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def steps_of(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [row for row in rows if "balance/pad_efficiency" in row]


def epochs_of(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [row for row in rows if "balance/pad_efficiency_epoch" in row]


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_tokens": 9, "samples_per_step": 6}])
def test_a_csv_logger_has_every_step_and_the_plans_own_figures(options: dict[str, Any], tmp_path: Path) -> None:
    fit(options={"seed": 3, **options}, logger=CSVLogger(tmp_path), max_epochs=2)
    rows = read_csv(tmp_path)
    plan_options = options or {"samples_per_step": 2, "num_slots": 1}
    steps, epochs = steps_of(rows), epochs_of(rows)
    start = 0
    for epoch in range(2):
        plan = plan_epoch(LONG_TAIL, num_ranks=1, seed=3, epoch=epoch, sync="step", **plan_options)  # type: ignore[arg-type]
        real = [int(plan.step(i).real_tokens.sum()) for i in range(plan.num_steps)]
        padded = [int(plan.step(i).padded_tokens.sum()) for i in range(plan.num_steps)]
        logged = steps[start : start + plan.num_steps]
        assert [row["balance/pad_efficiency"] for row in logged] == pytest.approx(
            [r / p for r, p in zip(real, padded, strict=True)]
        )
        assert [row["step"] for row in logged] == list(range(start, start + plan.num_steps))
        assert epochs[epoch]["balance/pad_efficiency_epoch"] == pytest.approx(sum(real) / sum(padded))
        start += plan.num_steps
    assert len(steps) == start
    assert len(epochs) == 2
    for row in steps:
        assert set(row) >= STEP_KEYS
        assert len(set(row) & MEMORY_KEYS) == 1
        assert all(math.isfinite(value) for value in row.values())
        assert row["balance/tokens_per_second"] <= row["balance/padded_tokens_per_second"]
        assert row["balance/tokens_per_second"] > 0


def test_values_between_logs_are_those_of_all_steps_since_the_last(tmp_path: Path) -> None:
    fit(options={"seed": 3}, logger=CSVLogger(tmp_path), log_every_n_steps=3)
    plan = plan_epoch(LONG_TAIL, num_ranks=1, seed=3, samples_per_step=2, num_slots=1)
    steps = [plan.step(i) for i in range(plan.num_steps)]
    expected = [
        sum(int(step.real_tokens.sum()) for step in window) / sum(int(step.padded_tokens.sum()) for step in window)
        for window in (steps[0:3], steps[3:6], steps[6:9])
    ]
    assert [row["balance/pad_efficiency"] for row in steps_of(read_csv(tmp_path))] == pytest.approx(expected)


def test_tensorboard_reads_the_same_keys_from_disk(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = fit(logger=TensorBoardLogger(tmp_path), max_epochs=2)
    events = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= STEP_KEYS | EPOCH_KEYS
    assert tags & MEMORY_KEYS
    assert [event.step for event in events.Scalars("balance/pad_efficiency")] == list(range(len(model.gradients)))


def test_tensorboard_has_histograms_of_lengths_counts_and_costs(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, EventAccumulator

    fit(logger=TensorBoardLogger(tmp_path), max_epochs=2, options={"seed": 3})
    events = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent), size_guidance={HISTOGRAMS: 0})
    events.Reload()
    (lengths,) = (event.histogram_value for event in events.Histograms("balance/lengths"))
    assert (lengths.num, lengths.min, lengths.max, lengths.sum) == (17, 1, 9, sum(LONG_TAIL))
    counts = [event.histogram_value for event in events.Histograms("balance/samples_per_micro_batch/rank_0")]
    assert [histogram.sum for histogram in counts] == [17, 17]
    epochs = [event.step for event in events.Scalars("balance/pad_efficiency_epoch")]
    assert [event.step for event in events.Histograms("balance/samples_per_micro_batch/rank_0")] == epochs
    costs = [event.histogram_value for event in events.Histograms("balance/cost/rank_0")]
    plans = [plan_epoch(LONG_TAIL, num_ranks=1, seed=3, epoch=epoch, samples_per_step=2) for epoch in (0, 1)]
    planned = [sum(float(plan.step(step).costs.sum()) for step in plan.steps) for plan in plans]
    assert [histogram.sum for histogram in costs] == pytest.approx(planned)


def test_an_offline_wandb_run_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="balance", save_dir=tmp_path, offline=True)
    model = fit(logger=logger)
    wandb.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20  # another process writes the file, and may not have ended
    while len(rows := wandb_history(path)) < len(model.gradients) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set().union(*rows) >= STEP_KEYS | EPOCH_KEYS
    assert sum("balance/step_time_s" in row for row in rows) == len(model.gradients)


def wandb_history(path: Path) -> list[set[str]]:
    """Keys of every row of an offline run, as far as it is written.

    The file is a log as LevelDB's: a header of 7 bytes, then blocks of 32 KiB with parts of records, each behind 4
    bytes of check sum, 2 of length and 1 that says whether the record is whole (1), begins (2), goes on (3) or ends
    (4).
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    log, place, record, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(log):
        if (left := -place % 32768) < 7:
            place += left  # no room for a part: the rest of the block is empty
        size, part = struct.unpack_from("<HB", log, place + 4)
        record += log[place + 7 : place + 7 + size]
        place += 7 + size
        if part in (1, 4):
            try:
                entry, record = Record.FromString(record), b""
            except DecodeError:
                break
            if entry.HasField("history"):
                rows.append({item.key or ".".join(item.nested_key) for item in entry.history.item})
    return rows


def test_mlflow_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(save_dir=str(tmp_path))
    model = fit(logger=logger)
    history = client(tmp_path.as_uri()).get_metric_history(logger.run_id, "balance/step_time_s")
    assert [metric.step for metric in history] == list(range(len(model.gradients)))
    assert set(client(tmp_path.as_uri()).get_run(logger.run_id).data.metrics) >= STEP_KEYS | EPOCH_KEYS


@pytest.mark.parametrize("peak", ["balance/peak_memory_gib", "balance/peak_rss_gib"])
def test_peak_memory_is_absent_or_positive_never_zero(peak: str, tmp_path: Path) -> None:
    fit(logger=CSVLogger(tmp_path))
    rows = steps_of(read_csv(tmp_path))
    assert all(row[peak] > 0 for row in rows if peak in row)
    # The run is on the CPU, whatever the machine has.
    assert any(peak in row for row in rows) is (peak.endswith("rss_gib") and sys.platform in ("linux", "darwin"))


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="needs a system that tells the peak of a process")
def test_a_run_on_the_cpu_of_a_machine_with_an_accelerator_logs_its_own_memory(
    allocator: Allocator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(logger=CSVLogger(tmp_path), options={"print_summary": True})
    rows = steps_of(read_csv(tmp_path))
    assert [set(row) & MEMORY_KEYS for row in rows] == [{"balance/peak_rss_gib"}] * len(rows)
    assert "peak process memory (RSS)" in capsys.readouterr().out


def test_the_docs_list_every_key() -> None:
    table = (Path(__file__).parent.parent / "docs" / "logging.md").read_text()
    documented = set(re.findall(r"^\| `(balance/[^`]+)`", table, flags=re.MULTILINE))
    per_rank = {"balance/wait_time_s/rank_0", "balance/wait_time_s/rank_1"}
    keys = (STEP_KEYS | EPOCH_KEYS | MEMORY_KEYS | WAIT_KEYS | {"balance/max_tokens"}) - per_rank
    assert documented == keys | {key + "_epoch" for key in MEMORY_KEYS} | {"balance/wait_time_s/rank_R"}


def test_keys_can_be_monitored(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="balance/pad_efficiency_epoch", mode="max")
    fit(callbacks=[saver], enable_checkpointing=True, max_epochs=2)
    assert saver.best_model_score is not None
    assert 0 < float(saver.best_model_score) <= 1


def resume_at_step_2(folder: Path, options: dict[str, Any], accumulate: int) -> list[str]:
    """Warnings of a run that continues a checkpoint saved after optimizer step 2 of epoch 0."""
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    saved = {"callbacks": [saver], "enable_checkpointing": True}
    fit(options=options, accumulate_grad_batches=accumulate, **saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            options=options,
            accumulate_grad_batches=accumulate,
            logger=CSVLogger(folder),
            max_epochs=2,
            ckpt_path=folder / "step=2.ckpt",
        )
    return foreign_to_user(caught)


RESUMED = [({"seed": 0}, 1), ({"seed": 0}, 2), ({"seed": 0, "max_tokens": 9, "samples_per_step": 4}, 1)]


@pytest.mark.parametrize(("options", "accumulate"), RESUMED)
def test_step_numbers_go_on_after_a_resume_in_mid_epoch(
    options: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    resume_at_step_2(tmp_path, options, accumulate)
    rows = steps_of(read_csv(tmp_path))
    assert [row["step"] for row in rows] == list(range(2, 2 + len(rows)))


@pytest.mark.parametrize(("options", "accumulate"), RESUMED)
def test_a_resume_in_mid_epoch_is_not_called_unreliable(
    options: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    assert not [text for text in resume_at_step_2(tmp_path, options, accumulate) if "not resumable" in text]


# --- warnings ---------------------------------------------------------------------------------------------------------


class LogsLoss(ScalarModel):
    """Logs the loss as users do, with and without a batch size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["x"]), sync_dist=True)
        return loss


def foreign_to_user(caught: list[warnings.WarningMessage]) -> list[str]:
    texts = {str(warning.message) for warning in caught}
    return sorted(text for text in texts if not any(known in text for known in NOT_OURS))


def run_and_collect_warnings(strategy: str, num_ranks: int, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for accumulate, options in itertools.product((1, 2), ({}, {"max_tokens": 9})):
            fit(
                strategy=strategy,
                num_ranks=num_ranks,
                model=LogsLoss(),
                logger=CSVLogger(folder, name=f"{accumulate}-{len(options)}"),
                accumulate_grad_batches=accumulate,
                options={**options, "print_summary": True},
                max_epochs=2,
            )
    return foreign_to_user(caught)


def test_the_package_causes_no_warning(tmp_path: Path) -> None:
    assert run_and_collect_warnings("single", 1, str(tmp_path)) == []


def test_the_package_causes_no_warning_on_two_ranks(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    assert [rank["warnings"] for rank in two_ranks[0]] == [[], []]


class SlowToBegin(Callback):
    """Needs long for what is no step: the beginning of an epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(0.5)


def test_what_comes_before_an_epochs_first_micro_batch_is_no_step(tmp_path: Path) -> None:
    fit(logger=CSVLogger(tmp_path), callbacks=[SlowToBegin()], max_epochs=2)
    assert max(row["balance/step_time_s"] for row in steps_of(read_csv(tmp_path))) < 0.4


# --- two ranks --------------------------------------------------------------------------------------------------------


WORK_S = 0.05
BETWEEN_S = 0.5


class WorksLonger(ScalarModel):
    """Rank 0 needs longer for every micro-batch, so that rank 1 waits for it."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        end = time.thread_time() + WORK_S * (self.global_rank == 0)
        while time.thread_time() < end:
            math.sqrt(2.0)
        return super().training_step(batch, batch_idx)


class BusyBetween(Callback):
    """Rank 0 needs long for what is no step: the beginning of an epoch, validation, and its end."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(BETWEEN_S * trainer.is_global_zero)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(BETWEEN_S * trainer.is_global_zero)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(BETWEEN_S * trainer.is_global_zero)


class Validates(ScalarModel):
    def val_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples([1, 1]), 1)


def run_on_two_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp2"):
        logger = CSVLogger(folder, name=strategy)
        model = fit(strategy=strategy, num_ranks=2, logger=logger, options={"seed": 3}, batch_size=2, max_epochs=2)
        found[strategy] = {key: float(v) for key, v in model.trainer.callback_metrics.items()}
    board = TensorBoardLogger(folder, name="board")
    fit(strategy="ddp", num_ranks=2, logger=board, options={"max_tokens": 9}, log_every_n_steps=2)
    found["warnings"] = run_and_collect_warnings("ddp", 2, folder)
    fit(strategy="ddp", num_ranks=2, logger=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy="ddp", num_ranks=2, **BAREBONES)
    found["barebones"] = foreign_to_user(caught)
    for strategy in ("ddp", "fsdp2"):
        fit(model=WorksLonger(), strategy=strategy, num_ranks=2, logger=CSVLogger(folder, name=f"slow-{strategy}-1"))
    fit(model=WorksLonger(), strategy="ddp", num_ranks=2, logger=CSVLogger(folder, name="slow-ddp-4"),
        accumulate_grad_batches=4)  # fmt: skip
    fit(model=Validates(), strategy="ddp", num_ranks=2, logger=CSVLogger(folder, name="between"),
        callbacks=[BusyBetween()], limit_val_batches=1, val_check_interval=2, num_sanity_val_steps=0)  # fmt: skip
    # Rank 1 has only fillers.
    fit(data=equal_samples([3]), strategy="ddp", num_ranks=2, logger=CSVLogger(folder, name="one"), options={
        "print_summary": True})  # fmt: skip
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("logs")
    return run_ranks(run_on_two_ranks, 2, str(folder), timeout_s=120), folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_log_the_figures_of_all_ranks(two_ranks: tuple[list[dict[str, Any]], Path], strategy: str) -> None:
    rows = read_csv(two_ranks[1] / strategy)
    logged, epochs = steps_of(rows), epochs_of(rows)
    start = 0
    for epoch in range(2):
        plan = plan_epoch(LONG_TAIL, num_ranks=2, seed=3, epoch=epoch, samples_per_step=4, num_slots=1)
        steps = [plan.step(i) for i in range(plan.num_steps)]
        shares = [int(step.real_tokens.sum()) / int(step.padded_tokens.sum()) for step in steps]
        spreads = [cost_spread(step.costs) for step in steps]
        these = logged[start : start + plan.num_steps]
        assert [row["balance/pad_efficiency"] for row in these] == pytest.approx(shares)
        assert [row["balance/cost_spread"] for row in these] == pytest.approx(spreads)
        assert epochs[epoch]["balance/cost_spread_epoch"] == pytest.approx(sum(spreads) / len(spreads), rel=1e-5)
        total_real = sum(int(step.real_tokens.sum()) for step in steps)
        total_padded = sum(int(step.padded_tokens.sum()) for step in steps)
        assert epochs[epoch]["balance/pad_efficiency_epoch"] == pytest.approx(total_real / total_padded)
        start += plan.num_steps
    assert len(logged) == start
    assert total_real == sum(LONG_TAIL)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_agree_about_the_epochs_figures(two_ranks: tuple[list[dict[str, Any]], Path], strategy: str) -> None:
    first, second = (rank[strategy] for rank in two_ranks[0])
    for key in EPOCH_KEYS | {key + "_epoch" for key in MEMORY_KEYS if key + "_epoch" in first}:
        assert first[key] == second[key]


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("ddp", 4), ("fsdp2", 1)])
def test_the_rank_that_waits_for_the_slowest_is_named(
    two_ranks: tuple[list[dict[str, Any]], Path], strategy: str, accumulate: int
) -> None:
    rows = steps_of(read_csv(two_ranks[1] / f"slow-{strategy}-{accumulate}"))
    assert all(set(row) >= WAIT_KEYS for row in rows)
    medians = {key: statistics.median(row[key] for row in rows) for key in WAIT_KEYS}
    # Both also lose the time in which others have the cores. Inside a window DDP waits where the loop asks all ranks.
    difference = medians["balance/wait_time_s/rank_1"] - medians["balance/wait_time_s/rank_0"]
    assert difference > 0.5 * accumulate * WORK_S
    for row in rows:
        of_ranks = [row["balance/wait_time_s/rank_0"], row["balance/wait_time_s/rank_1"]]
        assert row["balance/wait_time_max_s"] == pytest.approx(max(of_ranks))
        assert row["balance/wait_time_mean_s"] == pytest.approx(sum(of_ranks) / 2)
    # The step time is rank 0's; where ranks end a single step differs, where they end the run hardly does.
    for rank in range(2):
        waited = sum(row[f"balance/wait_time_s/rank_{rank}"] for row in rows)
        assert waited <= 1.05 * sum(row["balance/step_time_s"] for row in rows)


def test_what_is_no_time_of_a_step_is_no_waiting_either(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    rows = steps_of(read_csv(two_ranks[1] / "between"))
    assert len(rows) == 5
    for row in rows:
        assert max(row["balance/step_time_s"], row["balance/wait_time_max_s"]) < 0.8 * BETWEEN_S


def test_only_rank_zero_writes_tensorboard_events(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list((two_ranks[1] / "board").rglob("events.*"))
    assert len(files) == 1
    events = EventAccumulator(str(files[0].parent))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= STEP_KEYS | EPOCH_KEYS


def test_barebones_is_quiet_on_two_ranks(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    assert [rank["barebones"] for rank in two_ranks[0]] == [[], []]


def test_a_rank_that_only_has_fillers_has_defined_figures(two_ranks: tuple[list[dict[str, Any]], Path]) -> None:
    rows = read_csv(two_ranks[1] / "one")
    # One real sample of 3 tokens; its copy on the other rank runs 3 tokens that count for nothing.
    assert steps_of(rows)[0]["balance/pad_efficiency"] == pytest.approx(0.5)
    assert epochs_of(rows)[0]["balance/pad_efficiency_epoch"] == pytest.approx(0.5)


# --- console ----------------------------------------------------------------------------------------------------------


def test_the_table_at_the_end_has_the_runs_figures(capsys: pytest.CaptureFixture[str]) -> None:
    fit(options={"print_summary": True, "seed": 3}, batch_size=4, max_epochs=2)
    out = capsys.readouterr().out
    plans = [
        plan_epoch(LONG_TAIL, num_ranks=1, seed=3, epoch=epoch, samples_per_step=4, num_slots=1) for epoch in (0, 1)
    ]
    steps = [plan.step(i) for plan in plans for i in range(plan.num_steps)]
    share = sum(int(step.real_tokens.sum()) for step in steps) / sum(int(step.padded_tokens.sum()) for step in steps)
    assert "Balanced training" in out
    line = next(line for line in out.splitlines() if "pad efficiency" in line)
    assert f"{share * 100:.1f} %" in line
    for text in ("plain shuffle (from the plan)", "cost spread", "real tokens per second", "optimizer steps"):
        assert text in out
    assert "peak" in out
    assert "nan" not in out


def test_the_tables_plain_side_is_that_of_plain_batches(capsys: pytest.CaptureFixture[str]) -> None:
    # Without shuffling and in one epoch the plain run's batches are known: slices of the data.
    fit(
        options={"print_summary": True, "max_tokens": 9, "samples_per_step": 17},
        train=loader(equal_samples(LONG_TAIL), 4),
    )
    batches = [LONG_TAIL[i : i + 4] for i in range(0, 17, 4)]
    share = sum(LONG_TAIL) / sum(len(batch) * max(batch) for batch in batches)
    line = next(line for line in capsys.readouterr().out.splitlines() if "pad efficiency" in line)
    assert f"{share * 100:.1f} %" in line


def test_the_table_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    fit(options={"print_summary": False})
    assert "Balanced training" not in capsys.readouterr().out


def test_a_run_without_a_step_prints_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    fit(options={"print_summary": True}, limit_train_batches=0)
    assert "Balanced training" not in capsys.readouterr().out


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_the_length_of_each_epoch(bar: type, capfd: pytest.CaptureFixture[str]) -> None:
    progress = bar()
    totals: list[Any] = []

    class Totals(ScalarModel):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            totals.append(progress.total_train_batches)

    fit(
        model=Totals(),
        data=equal_samples([6, 6] + [1] * 12),
        options={"max_tokens": 12, "seed": 1884, "step_unit": "tokens", "print_summary": True},
        callbacks=[progress],
        enable_progress_bar=True,
        max_epochs=3,
    )
    assert totals == [3] * 3 + [5] * 5 + [2] * 2
    captured = capfd.readouterr()
    assert "Balanced training" in captured.out
    assert all(field in captured.out + captured.err for field in ("pad_eff", "tok/s"))


def test_it_works_without_a_logger() -> None:
    model = fit(logger=False, max_epochs=2)
    assert len(model.gradients) == 2 * math.ceil(len(LONG_TAIL) / 2)


def test_barebones_trains_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit(**BAREBONES)
    assert len(model.gradients) == 9
    assert foreign_to_user(caught) == []


# --- other loaders ----------------------------------------------------------------------------------------------------


class AllStages(ScalarModel):
    """Keeps the loaders of the other stages, and what they served."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loader = self.trainer.val_dataloaders
        self.batches.append(batch["index"].tolist())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loader = self.trainer.test_dataloaders
        self.batches.append(batch["index"].tolist())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch["index"].tolist())
        return batch["index"]


PLAIN_BATCHES = [[i, i + 1] for i in range(0, 16, 2)] + [[16]]


def test_other_loaders_are_the_users_own_objects() -> None:
    data = equal_samples(LONG_TAIL)
    train, val, test, predict = (loader(data, 2) for _ in range(4))
    model = AllStages()
    run = trainer(
        callbacks=[BalanceCallback(max_tokens=9, print_summary=False, loss_reduction="token_mean")],
        num_sanity_val_steps=0,
    )
    run.fit(model, train, val)
    assert model.loader is val
    assert model.batches == PLAIN_BATCHES
    for stage, own in (("validate", val), ("test", test)):
        model.batches = []
        getattr(run, stage)(model, own)
        assert model.loader is own
        assert model.batches == PLAIN_BATCHES
    predictions = run.predict(model, predict)  # Lightning itself replaces this loader by a copy
    assert [indices.tolist() for indices in predictions] == PLAIN_BATCHES  # type: ignore[union-attr]


def test_the_users_training_loader_is_left_as_it_was() -> None:
    train = loader(equal_samples(LONG_TAIL), 3, shuffle=True, drop_last=True)
    before = dict(train.__dict__)
    fit(train=train, options={"max_tokens": 9})
    assert train.__dict__ == before
    assert len(train) == len(list(train)) == 5


class BalancedData(BalancedDataModuleMixin, LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples(LONG_TAIL), 2)

    def test_dataloader(self) -> DataLoader[Any]:
        return loader(equal_samples(LONG_TAIL), 2)

    predict_dataloader = test_dataloader


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_test_and_predict_without_fit_are_untouched(stage: str) -> None:
    model, run = AllStages(), trainer()
    getattr(run, stage)(model, datamodule=BalancedData(max_tokens=9))
    assert model.batches == PLAIN_BATCHES
    assert "balance/pad_efficiency" not in run.callback_metrics


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an allocator whose counter can be restarted")
def test_the_peak_is_that_of_micro_batches_since_the_last_log(tmp_path: Path) -> None:
    class AllocatesOnce(ScalarModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                torch.empty(2**28, device=self.device)  # 1 GiB
            return super().training_step(batch, batch_idx)

    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False)
    used = trainer(
        accelerator="cuda", callbacks=[balance], logger=CSVLogger(tmp_path), log_every_n_steps=1, max_epochs=1
    )
    used.fit(AllocatesOnce(), loader(equal_samples([1] * 8), 2))
    peaks = [row["balance/peak_memory_gib"] for row in steps_of(read_csv(tmp_path))]
    assert peaks[0] >= 1 > max(peaks[1:])
