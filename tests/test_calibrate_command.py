"""`lightning-balance calibrate` on the demo job: real processes, real module, the file read back by `fit`."""

import re
import sys

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_balance import BalanceCallback, BalancedDataModuleMixin, CostModel
from lightning_balance.calibration.file import read_cost_file
from lightning_balance.cli import main
from lightning_balance.demo import CausalLM, FunctionsDataModule
from lightning_balance.probing import calibration_callback
from tests.command import REPOSITORY, run_command

DEMO = str(REPOSITORY / "configs" / "demo.yaml")
TINY = (
    *("--data.num_functions", "60", "--data.max_length", "64", "--model.hidden_size", "16"),
    *("--trainer.accelerator", "cpu", "--calibrate.num_repeats", "1"),
)
ONE_PROCESS = (*TINY, "--num_cpu_processes", "null")


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-balance"])


@pytest.mark.slow
def test_two_processes_calibrate_and_only_write_the_cost_file(tmp_path):
    options = ["--trainer.enable_checkpointing", "true", "--calibrate.out", "my_cost.yaml"]
    run = run_command("calibrate", "--config", DEMO, *TINY, *options, cwd=tmp_path, timeout_s=280)
    assert run.returncode == 0, run.stdout[-4000:]
    assert [path.name for path in tmp_path.iterdir()] == ["my_cost.yaml"]
    content = yaml.safe_load((tmp_path / "my_cost.yaml").read_text())
    assert content["measured_on"]["num_ranks"] == 2
    assert content["measured_on"]["strategy"] == "DDPStrategy"
    assert content["measured_on"]["module"] == "CausalLM"
    assert content["measured_on"]["versions"]["torch"] == torch.__version__
    assert content["seconds_per_token"] > 0
    assert len(content["points"]) >= 10
    assert max(point["padded_length"] for point in content["points"]) == 64
    for text in ("measured", "fitted", "median error", "Calibrating"):
        assert text in run.stdout
    assert "train/loss" not in run.stdout


def test_fit_takes_the_file_that_calibrate_wrote(in_process, tmp_path, capsys):
    main(["calibrate", "--config", DEMO, *ONE_PROCESS])
    assert "wrote cost.yaml" in capsys.readouterr().out
    model = read_cost_file(tmp_path / "cost.yaml")
    (tmp_path / "use.yaml").write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning_balance.BalanceCallback\n"
        "      init_args: {loss_reduction: causal_token_mean, cost: cost.yaml}\n"
        "    - class_path: tests.test_calibrate_command.KeepsCost\n"
    )
    words = [*ONE_PROCESS[:-4], "--num_cpu_processes", "null", "--trainer.max_steps", "1", "--trainer.logger", "false"]
    main(["fit", "--config", DEMO, "--config", "use.yaml", *words])
    assert KeepsCost.seen == model
    assert model != CostModel()


class KeepsCost(Callback):
    """Remembers the cost that the run plans with."""

    seen = None

    def on_train_start(self, trainer, pl_module):
        (callback,) = [callback for callback in trainer.callbacks if isinstance(callback, BalanceCallback)]
        KeepsCost.seen = callback.settings.cost


class BalancedFunctions(BalancedDataModuleMixin, FunctionsDataModule):
    """A data module that brings its own balancing along."""

    def __init__(self):
        super().__init__(max_tokens=256, max_length=64)
        self.num_functions, self.max_length = 60, 64


def test_a_data_module_that_balances_itself_is_calibrated_within_its_own_budget(in_process, tmp_path):
    (tmp_path / "own.yaml").write_text(
        "model:\n  class_path: lightning_balance.demo.CausalLM\n  init_args: {hidden_size: 16, num_layers: 1}\n"
        "data: {class_path: tests.test_calibrate_command.BalancedFunctions}\n"
        "trainer: {accelerator: cpu, max_steps: 5, min_epochs: 2}\n"
    )
    main(["calibrate", "--config", "own.yaml", "--calibrate.num_repeats", "1"])
    points = yaml.safe_load((tmp_path / "cost.yaml").read_text())["points"]
    assert max(point["num_samples"] * point["padded_length"] for point in points) == 256


@pytest.mark.parametrize("old", [None, "version: 9\nintercept: 1\nalpha: 0"])
def test_a_config_may_name_the_file_that_is_to_be_written(old, in_process, tmp_path):
    (tmp_path / "use.yaml").write_text(
        "trainer: {callbacks: [{class_path: lightning_balance.BalanceCallback, init_args: {cost: cost.yaml}}]}\n"
    )
    if old is not None:
        (tmp_path / "cost.yaml").write_text(old)
    words = ["--config", DEMO, "--config", "use.yaml", *ONE_PROCESS[:-4], "--num_cpu_processes", "null"]
    with pytest.raises((SystemExit, ValueError)):
        main(["fit", *words])
    main(["calibrate", *words, "--calibrate.num_repeats", "1"])
    assert BalanceCallback(cost="cost.yaml").settings.cost == read_cost_file("cost.yaml")


class RunsOutOfMemory(CausalLM):
    """Fits next to nothing."""

    def training_step(self, batch, batch_idx):
        raise torch.OutOfMemoryError("CUDA out of memory.")


class EndsWithAnExport(CausalLM):
    """Has hooks around a training, one of which a training step needs and the others export."""

    def on_train_epoch_start(self):
        self.losses = []

    def training_step(self, batch, batch_idx):
        self.losses.append(1)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        raise AssertionError("exported")

    on_fit_end = on_train_end


def refused(capsys, *words):
    """What a calibration says that ends in one sentence and the status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", "--config", DEMO, *ONE_PROCESS, *words])
    error = capsys.readouterr().err
    (sentence,) = [line for line in error.splitlines() if line.startswith("lightning-balance calibrate: error: ")]
    assert error.endswith(f"{sentence}\n")
    return error


def calibrate(kind, *words):
    model = ["--model", f"tests.test_calibrate_command.{kind}"]
    main(["calibrate", "--config", DEMO, *model, *ONE_PROCESS, *words])


@pytest.mark.filterwarnings("ignore:.*run out of memory and are left out")
def test_memory_for_no_size_at_all_is_an_error_that_says_so(in_process, capsys):
    assert re.search(
        r"at least 3 sizes .* but (\d+) of \1 .* run out of memory: lower the cap",
        refused(capsys, "--model", "tests.test_calibrate_command.RunsOutOfMemory"),
    )


def test_a_calibration_calls_the_hooks_of_a_beginning_epoch_but_not_those_of_a_training_that_ends(in_process, tmp_path):
    calibrate("EndsWithAnExport")
    assert (tmp_path / "cost.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--calibrate.out", "cost.txt"), r"calibrate.out must end in .yaml or .yml, .* got 'cost.txt'"),
        (
            ("--calibrate.out", "none/cost.yaml"),
            "--calibrate.out none/cost.yaml cannot be written: there is no folder",
        ),
        (("--calibrate.out", "folder.yaml"), "--calibrate.out folder.yaml cannot be written: it is a folder"),
        (("--calibrate.memory_fraction", "0"), "memory_fraction must be above 0"),
        (("--calibrate.num_repeats", "0"), "calibrate.num_repeats must be an integer >= 1, got 0"),
        (("--calibrate.max_tokens", "-1"), "calibrate.max_tokens must be an integer >= 1, got -1"),
        (("--calibrate.max_tokens", "1"), "a fit needs at least 3 sizes of micro-batches, but max_tokens=1 "),
        (("--num_cpu_processes", "0"), "num_cpu_processes must be at least 1, or null for one process, got 0"),
        (("--find-max-tokens",), "finding max_tokens on 'cpu' needs memory_limit_gib"),
        (("--find-max-tokens", "--calibrate.memory_limit_gib", "1e-6"), "no max_tokens fits: the longest sample"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_measured(in_process, tmp_path, words, message, capsys):
    (tmp_path / "folder.yaml").mkdir()
    error = refused(capsys, *words)
    assert re.search(message, error)
    assert "Calibrating" not in error
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.yaml"]


class HasABug(CausalLM):
    def training_step(self, batch, batch_idx):
        raise ValueError("a bug of the module's own")


@pytest.mark.parametrize("words", [(), ("--find-max-tokens", "--calibrate.memory_limit_gib", "1")])
def test_an_error_of_the_module_itself_keeps_its_traceback(in_process, words):
    with pytest.raises(ValueError, match="a bug of the module's own"):
        calibrate("HasABug", *words)


def test_the_table_is_printed_also_where_the_file_cannot_be_written(in_process, capsys, monkeypatch):
    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(calibration_callback, "write_cost_file", fail)
    with pytest.raises(OSError, match="No space left"):
        main(["calibrate", "--config", DEMO, *ONE_PROCESS])
    assert "median error" in capsys.readouterr().out


def test_the_budget_finder_prints_what_it_tried(in_process, tmp_path, capsys):
    main(["calibrate", "--config", DEMO, *ONE_PROCESS, "--find-max-tokens", "--calibrate.memory_limit_gib", "0.01"])
    output = capsys.readouterr().out
    found = int(re.search(r"largest max_tokens that fits: (\d+)", output)[1])
    assert 64 <= found < 64 * 32  # a step of the demo: 8 samples, accumulated 4 times, of at most 64 tokens
    assert f"{found:,}" in output
    assert list(tmp_path.iterdir()) == []


def test_the_budget_finder_says_where_memory_is_not_the_limit(in_process, capsys):
    main(["calibrate", "--config", DEMO, *ONE_PROCESS, "--find-max-tokens", "--calibrate.memory_limit_gib", "8"])
    output = " ".join(capsys.readouterr().out.split())
    assert f"max_tokens that fits: {64 * 32}; memory is not the limit: no optimizer step has more" in output
    assert "largest" not in output


def test_help_shows_the_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["calibrate", "--help"])
    output = capsys.readouterr().out
    for option in ("--calibrate.out", "--calibrate.num_repeats", "--find-max-tokens", "--trainer.strategy"):
        assert option in output
