"""However the processes of a run are started, every rank trains its part, once, with the gradient of the whole step."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from tests import launched
from tests.jobs import Job, torchrun
from tests.launched import LEARNING_RATE, LENGTHS, OTHER_LENGTHS, SAMPLES_PER_STEP, SEED, Record, Recorder
from tests.toys import ScalarModel

SCRIPT = Path(launched.__file__)
TIMEOUT_S = 120.0
ONE_PROCESS = {"accumulate_grad_batches": 4}  # the samples per step of two ranks that accumulate two


def gradients_of_epoch(lengths: Sequence[int], epoch: int, samples_per_step: int) -> list[float]:
    """The mean token of every step's samples, by the documented shuffle: what each step's gradient has to be."""
    order = np.random.default_rng([SEED, epoch]).permutation(len(lengths))
    steps = [order[start : start + samples_per_step] for start in range(0, len(lengths), samples_per_step)]
    return [
        sum(lengths[i] * (i + 1) for i in step) / sum(lengths[i] for i in step)  # sample i holds the value i + 1
        for step in steps
    ]


def check(
    records: list[Record],
    epochs: Sequence[int],
    *,
    num_ranks: int = 2,
    lengths: Sequence[int] = LENGTHS,
    samples_per_step: int = SAMPLES_PER_STEP,
    num_steps_before: int = 0,
    launcher: str | None = None,
) -> None:
    """Whether all ranks together trained the whole of these epochs as they should have."""
    assert [record.rank for record in records] == list(range(num_ranks))
    assert len({record.pid for record in records}) == num_ranks
    assert {record.num_ranks for record in records} == {num_ranks}
    if launcher is not None:
        assert {record.launcher for record in records} == {launcher}
    for epoch in epochs:
        assert sorted(samples_of_epoch(records, epoch)) == list(range(len(lengths))), f"epoch {epoch}"
    expected = [gradient for epoch in epochs for gradient in gradients_of_epoch(lengths, epoch, samples_per_step)]
    for record in records:
        assert set(record.epochs) == set(epochs)
        assert len(record.served) == len(records[0].served)
        assert record.gradients == pytest.approx(expected, rel=1e-6)
        assert record.num_steps == num_steps_before + len(expected)
        assert record.weight == pytest.approx(1 - LEARNING_RATE * math.fsum(expected), rel=1e-5)
        assert record.num_validations == len(epochs)


def samples_of_epoch(records: list[Record], epoch: int) -> list[int]:
    return [
        sample
        for record in records
        for micro_batch, own_epoch in zip(record.served, record.epochs, strict=True)
        if own_epoch == epoch
        for sample in micro_batch
    ]


def check_one_after_the_other(folder: Path, num_ranks: int = 2, launcher: str | None = None) -> None:
    for name, epochs in (("slots", [0, 1]), ("first", [0])):
        check(Record.read(folder, name), epochs, num_ranks=num_ranks, launcher=launcher)
    second = Record.read(folder, "second")
    assert all(set(record.epochs) == {1} and record.num_validations == 1 for record in second)
    assert sorted(samples_of_epoch(second, 1)) == list(range(len(LENGTHS)))
    whole = [gradient for epoch in (0, 1) for gradient in gradients_of_epoch(LENGTHS, epoch, SAMPLES_PER_STEP)]
    for record in second:
        assert record.num_steps == len(whole)
        assert record.weight == pytest.approx(1 - LEARNING_RATE * math.fsum(whole), rel=1e-5)


def words(scenario: str, place: dict[str, Any], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return [scenario, json.dumps(place), str(folder)]


def script(scenario: str, place: dict[str, Any], folder: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *words(scenario, place, folder)]


# ---------------------------------------------------------------------- launchers


def test_one_process_trains_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all others are compared with is what a run in this process gives."""
    monkeypatch.chdir(tmp_path)
    launched.one_after_the_other(ONE_PROCESS, tmp_path)
    check_one_after_the_other(tmp_path, num_ranks=1, launcher="NoneType")


@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        ("ddp", "_SubprocessScriptLauncher"),
        ("ddp_spawn", "_MultiProcessingLauncher"),
        ("ddp_fork", "_MultiProcessingLauncher"),
    ],
)
def test_a_script_trains_so_under_every_launcher(strategy: str, launcher: str, tmp_path: Path) -> None:
    with Job(script("one_after_the_other", {"strategy": strategy, "num_ranks": 2}, tmp_path), cwd=tmp_path) as job:
        job.wait(TIMEOUT_S)
    check_one_after_the_other(tmp_path, launcher=launcher)


@pytest.mark.parametrize("strategy", ["ddp_notebook", "auto"])
def test_an_interactive_session_trains_so(strategy: str, tmp_path: Path) -> None:
    """As in a notebook, where Lightning chooses forked processes and refuses all others."""
    arguments = words("one_after_the_other", {"strategy": strategy, "num_ranks": 2}, tmp_path)
    typed = f"from tests.launched import main\nmain(*{arguments!r})\n"
    with Job([sys.executable, "-i"], cwd=tmp_path, stdin=typed) as job:
        output = job.wait(TIMEOUT_S)
    assert ">>>" in output
    check_one_after_the_other(tmp_path, launcher="_MultiProcessingLauncher")


def test_torchrun_with_two_nodes_trains_so(tmp_path: Path) -> None:
    place = {"strategy": "ddp", "num_ranks": 1, "num_nodes": 2}
    commands = torchrun(SCRIPT, *words("one_after_the_other", place, tmp_path), num_nodes=2)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Job(command, cwd=tmp_path)) for command in commands]
        for node in nodes:
            node.wait(TIMEOUT_S)
    check_one_after_the_other(tmp_path)


def test_two_jobs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """They share the working directory and with it the folder of scanned lengths."""
    place = {"strategy": "ddp", "num_ranks": 2}
    folders = [tmp_path / "one", tmp_path / "other"]
    with contextlib.ExitStack() as stack:
        commands = [script("one_after_the_other", place, folder) for folder in folders]
        jobs = [stack.enter_context(Job(command, cwd=tmp_path)) for command in commands]
        for job in jobs:
            job.wait(TIMEOUT_S)
    for folder in folders:
        check_one_after_the_other(folder)
    assert len(list((tmp_path / "lengths").glob("*.npy"))) == 1


# ---------------------------------------------------------------------- several fits, several trainers


def check_fit_again(folder: Path, num_ranks: int) -> None:
    for mode in ("slots", "budget"):
        check(Record.read(folder, f"{mode}-begun"), [0, 1], num_ranks=num_ranks)
        continued = Record.read(folder, f"{mode}-continued")
        check(continued, [0, 1, 2, 3], num_ranks=num_ranks)
        check(
            Record.read(folder, f"{mode}-other"),
            [4, 5],
            num_ranks=num_ranks,
            lengths=OTHER_LENGTHS,
            samples_per_step=12,  # batches of 3, four of them in a step
            num_steps_before=continued[0].num_steps,
        )


def test_one_trainer_fits_again_further_and_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launched.fit_again(ONE_PROCESS, tmp_path)
    check_fit_again(tmp_path, num_ranks=1)


def test_one_trainer_fits_again_on_two_ranks(tmp_path: Path) -> None:
    with Job(script("fit_again", {"strategy": "ddp", "num_ranks": 2}, tmp_path), cwd=tmp_path) as job:
        job.wait(TIMEOUT_S)
    check_fit_again(tmp_path, num_ranks=2)


def test_a_callback_that_was_used_and_a_data_module_reach_spawned_processes(tmp_path: Path) -> None:
    with Job(script("used_before", {"strategy": "ddp_spawn", "num_ranks": 2}, tmp_path), cwd=tmp_path) as job:
        job.wait(TIMEOUT_S)
    check(Record.read(tmp_path, "alone"), [0, 1], num_ranks=1, samples_per_step=4)
    for name in ("launched", "data_module"):
        check(Record.read(tmp_path, name), [0, 1], launcher="_MultiProcessingLauncher")


@pytest.mark.parametrize("mode", ["slots", "budget"])
def test_a_pickled_callback_has_the_options_and_nothing_of_a_run(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = launched.balance(mode)
    launched.fit(launched.make_trainer(ONE_PROCESS, callback))
    assert len(pickle.dumps(callback)) < 10_000
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert copied.settings.differing_options(callback.settings) == []
        launched.fit(launched.make_trainer(ONE_PROCESS, copied, Recorder(tmp_path, "copied")))
        check(Record.read(tmp_path, "copied"), [0, 1], num_ranks=1)


class FailsOnce(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.batch = -1
            raise RuntimeError("fails once")


@pytest.mark.parametrize("mode", ["slots", "budget"])
@pytest.mark.parametrize("batch", [1, 8, 13])
def test_a_fit_after_one_that_failed_trains_its_epoch_again(
    mode: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the callback, `fit` without a checkpoint begins the epoch anew; the broken window left nothing."""
    monkeypatch.chdir(tmp_path)
    used = launched.make_trainer(ONE_PROCESS, launched.balance(mode), FailsOnce(batch), Recorder(tmp_path, "again"))
    model = ScalarModel(lr=LEARNING_RATE)
    with pytest.raises(RuntimeError, match="fails once"):
        launched.fit(used, model)
    assert used.accumulate_grad_batches == ONE_PROCESS["accumulate_grad_batches"]
    epochs, weight, num_steps = range(used.current_epoch, 2), float(model.layer.weight.detach()), used.global_step
    model.served, model.epochs, model.gradients = [], [], []
    launched.fit(used, model)
    expected = [gradient for epoch in epochs for gradient in gradients_of_epoch(LENGTHS, epoch, SAMPLES_PER_STEP)]
    for epoch in epochs:
        served = [s for batch, own in zip(model.served, model.epochs, strict=True) if own == epoch for s in batch]
        assert sorted(served) == list(range(len(LENGTHS)))
    assert model.gradients == pytest.approx(expected, rel=1e-6)
    assert used.global_step == num_steps + len(expected)
    assert float(model.layer.weight.detach()) == pytest.approx(weight - LEARNING_RATE * math.fsum(expected), rel=1e-5)
    assert model.num_validations == 2


@pytest.mark.parametrize("mode", ["slots", "budget"])
def test_a_fit_after_one_that_max_steps_ended_begins_the_next_epoch(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the callback; a checkpoint instead would continue inside the epoch (tests/test_resume.py)."""
    monkeypatch.chdir(tmp_path)
    used = launched.make_trainer(ONE_PROCESS, launched.balance(mode), Recorder(tmp_path, "again"), max_epochs=3)
    used.fit_loop.epoch_loop.max_steps = 4
    model = launched.fit(used)
    assert used.global_step == 4
    model.served, model.epochs, model.gradients = [], [], []
    used.fit_loop.epoch_loop.max_steps = -1
    launched.fit(used, model)
    [record] = Record.read(tmp_path, "again")
    assert set(record.epochs) == {2}
    assert sorted(samples_of_epoch([record], 2)) == list(range(len(LENGTHS)))
    assert record.gradients == pytest.approx(gradients_of_epoch(LENGTHS, 2, SAMPLES_PER_STEP), rel=1e-6)


# ---------------------------------------------------------------------- SIGTERM


def stop_by_sigterm(command: list[str], folder: Path, cwd: Path, exit_codes: Sequence[int]) -> None:
    """Signal a job's first process, once, when all ranks are at the moment; launchers pass it on to all ranks."""
    with Job(command, cwd=cwd) as job:
        for rank in range(2):
            job.wait_for(folder / f"waits-rank{rank}", TIMEOUT_S)
        os.kill(job.pid, signal.SIGTERM)
        job.wait(TIMEOUT_S, exit_codes)


def check_continues(folder: Path, whole: list[Record]) -> None:
    stopped = Record.read(folder, "stopped")
    for saved in launched.SAVED:
        continued = Record.read(folder, saved)
        for before, after, uninterrupted in zip(stopped, continued, whole, strict=True):
            num_kept = len(uninterrupted.served) - len(after.served)
            assert 0 < num_kept <= len(before.served)
            assert before.served[:num_kept] + after.served == uninterrupted.served
            assert before.gradients + after.gradients == pytest.approx(uninterrupted.gradients, rel=1e-6)
            assert after.weight == pytest.approx(uninterrupted.weight, rel=1e-6)
            assert after.num_steps == uninterrupted.num_steps
            assert after.num_validations == 1  # that of the second epoch, in which the run was stopped


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.timeout(600)  # six jobs one after the other, each with its own timeout
def test_what_sigterm_leaves_continues_exactly(tmp_path: Path) -> None:
    place = {"strategy": "ddp", "num_ranks": 2}
    for name in ("in a window, budget", "before a step, slots", "after a batch, budget", "in validation, slots"):
        folder = tmp_path / name
        stop_by_sigterm(script("until_sigterm", place, folder), folder, tmp_path, exit_codes=[0])
    folder = tmp_path / "in a window, slots, torchrun"
    [command] = torchrun(SCRIPT, *words("until_sigterm", place, folder), num_ranks_per_node=2)
    stop_by_sigterm(command, folder, tmp_path, exit_codes=[1])
    with Job(script("after_sigterm", place, tmp_path), cwd=tmp_path) as job:
        job.wait(TIMEOUT_S)
    whole = {mode: Record.read(tmp_path, f"{mode}-whole") for mode in ("slots", "budget")}
    for records in whole.values():
        check(records, [0, 1])
    folders = sorted({path.parent for path in tmp_path.glob("*/*.ckpt")})
    assert len(folders) == 5
    for folder in folders:
        check_continues(folder, whole[launched.mode_of(folder)])
