"""The token budget of a running job changes on all ranks after the same step; samples and gradients stay the same."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_balance import BalanceCallback, BalancedBatchSampler
from lightning_balance.agreement import gather_objects
from lightning_balance.cli import main
from lightning_balance.control import (
    REQUEST_FILE,
    RUN_FILE,
    RunDescription,
    begin_run,
    end_run,
    request_max_tokens,
    take_request,
)
from tests.distributed import run_ranks
from tests.stopping import StopAtStep
from tests.toys import ScalarModel, equal_samples, loader, trainer

DATA = equal_samples(np.random.default_rng(7).integers(1, 12, 24).tolist())
RUN = RunDescription(max_tokens=40, smallest_max_tokens=11, every_n_steps=5)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    RUN.write(tmp_path)
    assert take_request(tmp_path) is None
    assert request_max_tokens(tmp_path, 64) == RUN
    request_max_tokens(tmp_path, 65)
    assert take_request(tmp_path) == 65
    assert take_request(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


BAD_REQUESTS = ["", "[1]", '{"max_tokens": 0}', '{"max_tokens": "8"}', '{"max_tokens": 8.5}', "{}"]


@pytest.mark.parametrize("text", [*BAD_REQUESTS, "[" * 200_000, '{"max_tokens": 100000000000000000000}'], ids=range(8))
def test_a_request_without_a_budget_is_an_error_once(text: str, tmp_path: Path) -> None:
    (tmp_path / REQUEST_FILE).write_text(text)
    with pytest.raises(ValueError, match="asks for no token budget"):
        take_request(tmp_path)
    assert take_request(tmp_path) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["0"], "max_tokens must be an integer >= 1, got 0"),
        (["-5"], "max_tokens must be an integer >= 1, got -5"),
        ([str(2**63)], "max_tokens must be .*, got 9223372036854775808"),
        (["many"], "invalid int value: 'many'"),
        (["10"], "max_tokens=10 is too small for the job in .*: .* needs at least 11"),
    ],
)
def test_the_command_refuses_bad_values(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RUN.write(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["set-max-tokens", "--run", str(tmp_path), "--", *words])
    error = capsys.readouterr().err.replace("\n", " ")
    assert re.search(sentence, error), error
    assert take_request(tmp_path) is None


def test_the_command_says_when_no_job_logs_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["set-max-tokens", "64", "--run", str(tmp_path)])
    assert "is not the log folder of a running job with a token budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "[" * 200_000, '{"max_tokens": 64, "smallest_max_tokens": null, "every_n_steps": 1}'],
    ids=range(4),
)
def test_the_command_says_that_a_run_file_is_broken(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["set-max-tokens", "64", "--run", str(tmp_path)])
    assert f"{RUN_FILE} cannot be read: " in capsys.readouterr().err


def test_the_command_says_that_a_request_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUN.write(tmp_path)
    (tmp_path / REQUEST_FILE).mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["set-max-tokens", "64", "--run", str(tmp_path)])
    assert f"{REQUEST_FILE} cannot be written: " in capsys.readouterr().err


def test_many_may_ask_at_once(tmp_path: Path) -> None:
    RUN.write(tmp_path)
    budgets = [100, 100_000] * 200
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(request_max_tokens, tmp_path, budget) for budget in budgets]
        taken = [take_request(tmp_path) for _ in budgets]
    assert [request.result() for request in asked] == [RUN] * len(budgets)
    assert set(taken) <= {None, 100, 100_000}
    assert {path.name for path in tmp_path.iterdir()} <= {RUN_FILE, REQUEST_FILE}


def pid_of_an_ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_job_that_was_killed_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = pid_of_an_ended_process()
    RunDescription(max_tokens=40, smallest_max_tokens=11, every_n_steps=5, pid=pid).write(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["set-max-tokens", "64", "--run", str(tmp_path)])
    assert re.search(f"has ended without a word: its process {pid} on .* is gone", capsys.readouterr().err)


@pytest.mark.parametrize("host", [None, "another.machine"])
def test_a_job_takes_no_request_that_one_before_it_was_sent(host: str | None, tmp_path: Path) -> None:
    of_host = {} if host is None else {"host": host}
    RunDescription(
        max_tokens=40, smallest_max_tokens=11, every_n_steps=5, pid=pid_of_an_ended_process(), **of_host
    ).write(tmp_path)
    (tmp_path / REQUEST_FILE).write_text('{"max_tokens": 64}')
    begin_run(tmp_path, RUN)
    assert RunDescription.read(tmp_path) == RUN
    assert take_request(tmp_path) is None


def test_two_jobs_in_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        first = RunDescription(max_tokens=40, smallest_max_tokens=11, every_n_steps=5, pid=other.pid)
        first.write(tmp_path)
        request_max_tokens(tmp_path, 64)
        with pytest.raises(ValueError, match=f"is the log folder of process {other.pid} too, which is running"):
            begin_run(tmp_path, RUN)
        assert take_request(tmp_path) is None
        end_run(tmp_path)
        assert RunDescription.read(tmp_path) == first
        assert json.loads((tmp_path / REQUEST_FILE).read_text()) == {"max_tokens": 64}
    finally:
        other.kill()
        other.communicate()


# --- samplers ---------------------------------------------------------------------------------------------------------


def test_a_sampler_keeps_its_budget_when_it_cannot_have_another() -> None:
    sampler = BalancedBatchSampler([9, 1, 2, 7], samples_per_step=2, max_tokens=9, oversize="error", rank=0)
    before = list(sampler)
    with pytest.raises(ValueError, match="above max_tokens=8"):
        sampler.set_max_tokens(8)
    assert sampler.max_tokens == 9
    assert list(sampler) == before
    with pytest.raises(ValueError, match="there is no token budget to change"):
        BalancedBatchSampler([9, 1], batch_size=1, rank=0).set_max_tokens(8)


# --- runs -------------------------------------------------------------------------------------------------------------


class Asks(Callback):
    """Asks for a budget after some optimizer steps, and notes the budget of every micro-batch that runs."""

    def __init__(
        self, balance: BalanceCallback, at_steps: dict[int, int], ask: Callable[..., None] | None = None
    ) -> None:
        self.balance, self.at_steps, self.ask = balance, at_steps, ask
        self.budgets: list[tuple[int, int | None]] = []
        self.largest: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self.budgets.append((step, trainer.train_dataloader.batch_sampler.max_tokens))
        self.largest.append(batch["x"].numel())
        if step in self.at_steps:
            asked = self.at_steps.pop(step)
            if self.ask is None:
                self.balance.set_max_tokens(asked)
            else:
                self.ask(trainer, asked)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.estimated_steps = trainer.estimated_stepping_batches


def train(
    at_steps: dict[int, int],
    *callbacks: Callback,
    options: dict[str, Any] | None = None,
    place: tuple[str, int] = ("single", 1),
    ask: Callable[..., None] | None = None,
    checkpoint: Path | None = None,
    workers: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[ScalarModel, Asks, Any]:
    options = {"max_tokens": 26, "samples_per_step": 4, "seed": 3, **(options or {})}
    balance = BalanceCallback(loss_reduction="token_mean", print_summary=False, **options)
    model, asks = ScalarModel(lr=0.01), Asks(balance, at_steps, ask)
    arguments = {"max_epochs": 2, **arguments}
    used = trainer(*place, callbacks=[balance, asks, *callbacks], **arguments)
    train_loader = loader(DATA, 2, shuffle=True, **(workers or {}))
    used.fit(model, train_loader, loader(DATA, 12), ckpt_path=checkpoint)
    return model, asks, used


def samples_of(model: ScalarModel, epoch: int) -> list[int]:
    batches = zip(model.served, model.epochs, strict=True)
    return sorted(sample for batch, of_epoch in batches if of_epoch == epoch for sample in batch)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["0", "2"])
@pytest.mark.parametrize(
    "at_steps", [{0: 12}, {2: 12}, {1: 60, 3: 12, 4: 30}, {5: 60}, {5: 12, 6: 60}, {11: 12}], ids=str
)
def test_a_budget_changes_after_the_step(at_steps: dict[int, int], workers: dict[str, Any]) -> None:
    whole, _, _ = train({})
    expected = [26] * 12
    for step, budget in at_steps.items():
        expected[step + 1 :] = [budget] * (11 - step)
    model, asks, used = train(dict(at_steps), workers=workers)
    assert dict(asks.budgets) == dict(enumerate(expected))
    assert all(size <= expected[step] for (step, _), size in zip(asks.budgets, asks.largest, strict=True))
    assert [samples_of(model, epoch) for epoch in (0, 1)] == [list(range(24))] * 2
    assert used.global_step == asks.estimated_steps == 12
    assert model.layer.weight.item() == pytest.approx(whole.layer.weight.item(), rel=1e-6)
    assert model.gradients == pytest.approx(whole.gradients, rel=1e-6)
    assert model.num_validations == 2


def test_steps_that_are_filled_to_the_budget_change_too() -> None:
    model, asks, _ = train({1: 60}, options={"max_tokens": 20, "samples_per_step": None, "step_unit": "tokens"})
    assert [samples_of(model, epoch) for epoch in (0, 1)] == [list(range(24))] * 2
    assert {budget for _, budget in asks.budgets} == {20, 60}
    assert max(asks.largest) > 20
    assert asks.balance.max_tokens == 60


@pytest.mark.parametrize("limit", [3, 0.5])
def test_a_limit_of_batches_still_ends_the_epoch(limit: float) -> None:
    model, _, _ = train({1: 12}, limit_train_batches=limit)
    assert model.num_validations == 2
    if limit == 3:
        assert [model.epochs.count(epoch) for epoch in (0, 1)] == [3, 3]


def test_a_budget_that_the_data_cannot_have_is_ignored_with_a_warning() -> None:
    options = {"oversize": "error", "max_tokens": 26}
    with pytest.warns(UserWarning, match="keeps max_tokens=26, because 5 was refused: .*above max_tokens=5"):
        model, asks, _ = train({2: 5}, options=options)
    assert {budget for _, budget in asks.budgets} == {26}
    assert samples_of(model, 0) == list(range(24))


def test_a_request_that_is_no_budget_is_ignored_with_a_warning(tmp_path: Path) -> None:
    def scribble(trainer: Any, _: int) -> None:
        (Path(trainer.log_dir) / REQUEST_FILE).write_text("faster, please")

    with pytest.warns(UserWarning, match="keeps its token budget: .*'faster, please'"):
        _, asks, _ = train({2: 5}, ask=scribble, logger=CSVLogger(tmp_path))
    assert {budget for _, budget in asks.budgets} == {26}


def test_a_request_that_is_a_folder_is_ignored_with_a_warning(tmp_path: Path) -> None:
    def block(trainer: Any, _: int) -> None:
        (Path(trainer.log_dir) / REQUEST_FILE).mkdir()

    with pytest.warns(UserWarning, match=f"keeps its token budget: .*{REQUEST_FILE} cannot be read: "):
        _, asks, _ = train({2: 5}, ask=block, logger=CSVLogger(tmp_path))
    assert {budget for _, budget in asks.budgets} == {26}


def test_a_run_file_that_can_no_longer_be_written_is_a_warning(tmp_path: Path) -> None:
    def block(trainer: Any, asked: int) -> None:
        (Path(trainer.log_dir) / RUN_FILE).unlink()
        (Path(trainer.log_dir) / RUN_FILE).mkdir()
        next(c for c in trainer.callbacks if isinstance(c, BalanceCallback)).set_max_tokens(asked)

    with pytest.warns(UserWarning, match=f"is out of date: .*{RUN_FILE} cannot be written: "):
        _, asks, _ = train({2: 60}, ask=block, logger=CSVLogger(tmp_path))
    assert {budget for step, budget in asks.budgets if step > 2} == {60}


@pytest.mark.parametrize("is_command", [False, True])
def test_a_request_that_comes_too_late_is_a_warning(is_command: bool, tmp_path: Path) -> None:
    class AsksLate(Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            if is_command:
                main(["set-max-tokens", "60", "--run", trainer.log_dir])
            else:
                next(c for c in trainer.callbacks if isinstance(c, BalanceCallback)).set_max_tokens(60)

    with pytest.warns(UserWarning, match="max_tokens=60 came too late: .* every 1 .* ended with max_tokens=26"):
        _, _, used = train({}, AsksLate(), logger=CSVLogger(tmp_path))
    assert not (Path(used.log_dir) / REQUEST_FILE).exists()


def test_a_request_for_the_budget_in_force_is_never_too_late(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    class AsksLate(Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            main(["set-max-tokens", "26", "--run", trainer.log_dir])

    train({}, AsksLate(), logger=CSVLogger(tmp_path))
    assert [str(warning.message) for warning in recwarn if "too late" in str(warning.message)] == []


class LogsTo(DummyLogger):
    """Says that it writes to a folder, and writes nothing."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return self.folder


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot reach this run of BalanceCallback, which goes on: .*file/run"):
        _, asks, _ = train({2: 60}, logger=LogsTo(str(tmp_path / "file" / "run")))
    assert {budget for step, budget in asks.budgets if step > 2} == {60}


def test_a_remote_folder_is_not_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        _, asks, _ = train({2: 60}, logger=LogsTo("memory://logs/run"))
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("log folder memory://logs/run is not one of a local file system") == 1
    assert {budget for step, budget in asks.budgets if step > 2} == {60}


def test_any_whole_number_of_int64_is_taken(tmp_path: Path) -> None:
    at_steps = {1: np.int64(60), 3: 2**63 - 1}
    _, asks, _ = train(at_steps, logger=CSVLogger(tmp_path))  # type: ignore[arg-type]
    assert dict(asks.budgets) == {step: 26 if step < 2 else 60 if step < 4 else 2**63 - 1 for step in range(12)}
    assert all(type(budget) is int for _, budget in asks.budgets)
    assert BalancedBatchSampler([9, 1], batch_size=1, max_tokens=np.int64(9), rank=0).description()["max_tokens"] == 9


@pytest.mark.parametrize("step", [2, 5])
def test_samples_that_a_new_budget_leaves_out_are_counted(step: int) -> None:
    num_over = sum(length > 5 for length in DATA.lengths)
    with pytest.warns(UserWarning, match=f"{num_over} of 24 samples are longer than max_tokens=5 and are left out"):
        model, _, _ = train({step: 5}, options={"oversize": "skip"})
    assert len(samples_of(model, 1)) == 24 - num_over


def test_only_a_training_run_with_a_budget_can_be_asked() -> None:
    balance = BalanceCallback()
    with pytest.raises(
        ValueError, match="set_max_tokens\\(64\\) changes the budget of a run that is training with one"
    ):
        balance.set_max_tokens(64)
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 1, got 0"):
        balance.set_max_tokens(0)
    with pytest.raises(ValueError, match=r"max_tokens must be .*, got 100000000000000000000"):
        balance.set_max_tokens(10**20)


def test_the_change_is_logged_and_the_run_says_what_it_has(tmp_path: Path) -> None:
    seen = {}

    def ask(trainer: Any, asked: int) -> None:
        seen["before"] = RunDescription.read(Path(trainer.log_dir))
        main(["set-max-tokens", str(asked), "--run", trainer.log_dir])

    class Looks(Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            seen["after"] = RunDescription.read(Path(trainer.log_dir))

    _, asks, used = train({2: 60}, Looks(), ask=ask, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert seen["before"] == RunDescription(max_tokens=26, smallest_max_tokens=1, every_n_steps=1)
    assert seen["after"] == RunDescription(max_tokens=60, smallest_max_tokens=1, every_n_steps=1)
    with (Path(used.log_dir) / "metrics.csv").open() as file:
        logged = [float(row["balance/max_tokens"]) for row in csv.DictReader(file) if row["balance/max_tokens"]]
    assert logged == [26.0] * 3 + [60.0] * 9
    assert not (Path(used.log_dir) / RUN_FILE).exists()  # the run has ended
    assert {budget for step, budget in asks.budgets if step > 2} == {60}


@pytest.mark.parametrize("stop", [4, 6, 8])
def test_the_change_survives_a_restart_unless_the_option_was_changed(stop: int, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    whole, _, _ = train({})
    stopped, _, _ = train({2: 12}, StopAtStep(stop, path))
    for option, budget in ((26, 12), (40, 40)):
        resumed, asks, used = train({}, checkpoint=path, options={"max_tokens": option})
        assert {given for _, given in asks.budgets} == {budget}
        assert used.global_step == asks.estimated_steps == 12
        assert resumed.layer.weight.item() == pytest.approx(whole.layer.weight.item(), rel=1e-6)
        for epoch in (0, 1):
            assert sorted(samples_of(stopped, epoch) + samples_of(resumed, epoch)) == list(range(24))


def train_ranks(strategy: str, folder: Path) -> list[Any]:
    """Rank 0 uses the command while the job runs; rank 1 never hears of it by itself."""

    def ask(trainer: Any, asked: int) -> None:
        log_dir = trainer.log_dir
        if trainer.is_global_zero:
            main(["set-max-tokens", str(asked), "--run", log_dir])

    # A fork of a process with the threads of a process group may hang in a lock that one of them held (documented at
    # torch's DistributedDataParallel): this happened once here.
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
    model, asks, used = train(
        {1: 12}, place=(strategy, 2), ask=ask, logger=CSVLogger(folder), log_every_n_steps=4, workers=workers
    )
    return gather_objects((model.served, model.epochs, asks.budgets, model.gradients, used.global_step))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_change_after_the_same_step(strategy: str, tmp_path: Path) -> None:
    whole, _, _ = train({})
    ranks = run_ranks(train_ranks, 2, strategy, tmp_path, timeout_s=120)[0]
    assert ranks[0][2] == ranks[1][2]
    assert dict(ranks[0][2]) == {step: 26 if step < 4 else 12 for step in range(12)}
    for epoch in (0, 1):
        samples = [
            s
            for served, epochs, *_ in ranks
            for batch, e in zip(served, epochs, strict=True)
            if e == epoch
            for s in batch
        ]
        assert set(samples) == set(range(24))
    for rank in ranks:
        assert rank[3] == pytest.approx(whole.gradients, rel=1e-6)
        assert rank[4] == 12


def train_without_logged_steps(folder: Path) -> tuple[list[str], str]:
    """The warnings of a run that is asked at its second step, and the command's answer."""

    def ask(trainer: Any, asked: int) -> None:
        log_dir = trainer.log_dir  # a collective call
        if trainer.is_global_zero:
            main(["set-max-tokens", str(asked), "--run", log_dir])

    output = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
        warnings.simplefilter("always")
        train({1: 12}, place=("ddp", 2), ask=ask, logger=CSVLogger(folder), log_every_n_steps=0)
    return [str(warning.message) for warning in caught], " ".join(output.getvalue().split())


def test_ranks_that_never_log_look_every_50_steps(tmp_path: Path) -> None:
    (told, answer), (of_other, _) = run_ranks(train_without_logged_steps, 2, tmp_path, timeout_s=120)
    assert "looks for requests every 50 optimizer step(s)" in answer
    late = [message for message in told if "max_tokens=12 came too late" in message]
    assert len(late) == 1
    assert "every 50 optimizer step(s), ended with max_tokens=26" in late[0]
    assert [message for message in of_other if "too late" in message] == []
