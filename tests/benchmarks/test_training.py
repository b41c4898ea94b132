"""The benchmark scripts that train, at tiny sizes on real processes."""

import contextlib
import importlib
import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from benchmarks import (
    budget_sweep,
    calibration,
    end_to_end,
    environment,
    gpu,
    loss_curves,
    memory,
    overhead,
    peers,
    ranks,
    tensorboard_picture,
)
from benchmarks.inputs import Shape
from benchmarks.peaks import Peaks
from benchmarks.tables import documents
from benchmarks.training import Job
from tests.benchmarks.tables import SCRIPTS_WITH_TESTS, check_table

TINY = Job(hidden_size=16, num_ranks=2)
ALONE = Job(hidden_size=16, num_ranks=1)


def check_tables(script, figures, folder):
    environment.save(script, figures, command=f"python -m benchmarks.{script}", folder=folder)
    names = [name for name, (source, _) in documents.TABLES.items() if source == script]
    assert names
    for name in names:
        check_table(name, folder)


@pytest.mark.slow
def test_end_to_end_compares_the_same_samples_on_two_ranks(tmp_path):
    *_, figures = end_to_end.measure(TINY, strategies=["ddp", "FSDP2"], num_steps=1, num_rounds=1, max_length=64)
    for strategy in ("ddp", "FSDP2"):
        methods = figures[strategy]["methods"]
        of_ceiling = methods[end_to_end.CEILING]
        assert of_ceiling["pad_efficiency"] == of_ceiling[f"over {end_to_end.CEILING}"][0] == 1.0
        assert all(0 < values["pad_efficiency"] <= 1 for values in methods.values())
        assert methods[peers.PLAIN]["peak_mib"] >= methods["token budget 256"]["peak_mib"]
        assert figures[strategy]["cost"]["alpha"] >= 0
    check_tables("end_to_end", figures, tmp_path)


@pytest.mark.slow
def test_the_budget_sweep_runs_every_example_once_a_step(tmp_path):
    sizes = {"num_samples": 8, "scale": 0.002, "num_steps": 2, "num_rounds": 1}
    *_, figures = budget_sweep.measure(TINY, strategies=["ddp", "FSDP2"], **sizes)
    for strategy in ("ddp", "FSDP2"):
        for of_pass in figures[strategy].values():
            assert of_pass["1 sample"]["pad_efficiency"] == 1.0
            assert of_pass["1 sample"]["micro_batches_per_rank"] == 4
            assert of_pass["2 samples"]["micro_batches_per_rank"] == 2
            assert all(0 < values["pad_efficiency"] <= 1 for values in of_pass.values())
    check_tables("budget_sweep", figures, tmp_path)


@pytest.mark.slow
def test_loss_curves_of_exact_cuts_are_one_curve(tmp_path):
    arguments = {"job": json.loads(json.dumps(vars(TINY))), "num_steps": 2, "num_seeds": 1, "every_n_steps": 1}
    runs = ranks.on_ranks(loss_curves.runs_on_this_rank, 2, **arguments)
    losses = {run["method"]: [point["loss"] for point in run["points"]] for run in runs}
    tokens = {run["method"]: run["points"][-1]["tokens"] for run in runs}
    assert losses["rebalance"] == pytest.approx(losses["token budget 4,096"], rel=1e-6)
    assert len(set(tokens.values())) == 1
    assert losses["plain shuffle"][0] == losses["rebalance"][0]
    figures = {"methods": loss_curves.figures_of(runs), "runs": runs, "num_seeds": 1}
    check_tables("loss_curves", figures, tmp_path)
    loss_curves.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_memory_grows_with_the_batch_and_less_under_a_budget(tmp_path):
    sizes = {"num_samples": 200, "max_length": 128, "batch_sizes": [2, 4], "most": 6, "num_ranks": 2, "num_slots": 2}
    figures = memory.measure(ALONE, **sizes)
    for of_sizes in figures["methods"].values():
        assert of_sizes["2"]["peak_bytes"] < of_sizes["4"]["peak_bytes"]
    of_budget, of_plain = figures["methods"][memory.BUDGET], figures["methods"][peers.PLAIN]
    assert of_budget["4"]["peak_bytes"] < of_plain["4"]["peak_bytes"]
    assert figures["largest_batch"][memory.BUDGET] >= figures["largest_batch"][peers.PLAIN]
    check_tables("memory", figures, tmp_path)
    memory.draw(figures, tmp_path / "memory.png")


def test_the_largest_batch_is_the_last_one_under_the_limit():
    class Known(memory.Batches):
        def of(self, method, batch_size):
            return {"peak_bytes": 10 * batch_size}

    batches = Known(np.array([1]), num_ranks=1, num_slots=1, peaks=None)
    assert [batches.largest_below("any", limit, most=8) for limit in (9, 10, 39, 40, 1000)] == [0, 1, 3, 4, 8]


def test_a_peak_holds_weights_gradients_and_the_optimizer_s_state():
    num_bytes = 4 * sum(parameter.numel() for parameter in Peaks(ALONE)._model.parameters())
    small, large = Peaks(ALONE).of([(1, 8)]), Peaks(ALONE).of([(1, 8), (4, 32)])
    assert 4 * num_bytes <= small < large
    assert Peaks(ALONE, backward=False).of([(4, 32)]) < large - 2 * num_bytes


def test_overhead_and_calibration_have_tables(tmp_path):
    *_, figures = overhead.measure(ALONE, num_rounds=1, num_steps=overhead.WARM_UP_STEPS + 2, length=16)
    assert all(0 < found["share_of_hooks"] < 1 for found in figures["modes"].values())
    for name in ("overhead", "overhead_long"):
        check_tables(name, figures, tmp_path)
    words = ["--data.num_functions", "40", "--calibrate.num_repeats", "1", "--calibrate.max_tokens", "512"]
    check_tables("calibration", {"runs": [calibration.calibrate(words)]}, tmp_path)


def test_the_ceiling_has_full_and_equal_micro_batches():
    shape = Shape(num_ranks=2, num_slots=2, batch_size=8)
    even = end_to_end.without_padding(np.arange(1, 33), shape)
    batches = end_to_end.served_by_others(end_to_end.CEILING, even, shape, seed=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(32))
    assert all(len(set(even[batch].tolist())) == 1 for batch in batches)
    assert [even[batches[place]].sum() for place in (0, 2)] == [even[batches[place]].sum() for place in (1, 3)]


def test_a_loss_that_is_never_reached_takes_for_ever():
    points = [{"seconds": 0.0, "loss": 4.0}, {"seconds": 2.0, "loss": 2.0}]
    assert loss_curves.seconds_to_reach(points, 1.0) == float("inf")


def fails_on_rank_one():
    """Rank 0 waits for a rank that is gone."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    dist.barrier()


def test_a_rank_that_fails_ends_all_of_them():
    with pytest.raises(RuntimeError, match="fails_on_rank_one failed on 2 ranks"):
        ranks.on_ranks(fails_on_rank_one, 2)


def leaves_an_interpreter_that_aborts():
    """As threads of gloo do, if they still run when the interpreter ends."""
    import atexit
    import os

    atexit.register(os.abort)
    return "done"


def test_what_happens_after_the_answer_is_no_failure_of_a_rank():
    assert ranks.on_ranks(leaves_an_interpreter_that_aborts, 2) == "done"


def is_alive(mark):
    """Whether a process has the mark in its environment."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes():
                return True
    return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_a_script_that_is_stopped_leaves_no_rank_behind(tmp_path, monkeypatch):
    mark = f"benchmark-{uuid4().hex}"
    monkeypatch.setenv("MARK_OF_A_TEST", mark)
    assert not gpu.run("end_to_end", ["--num-ranks", "2", "--rounds", "99", "--out", str(tmp_path)], 20.0)
    end = time.monotonic() + 20
    while is_alive(mark) and time.monotonic() < end:
        time.sleep(0.2)
    assert not is_alive(mark)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("overhead", ["--steps", "3"], "must be a whole number of at least 7, got 3"),
        ("end_to_end", ["--rounds", "0"], "must be a whole number of at least 1, got 0"),
        ("end_to_end", ["--num-ranks", "0"], "must be a whole number of at least 1, got 0"),
        ("memory", ["--batch-sizes", "4", "0"], "must be a whole number of at least 1, got 0"),
        ("budget_sweep", ["--scale", "0"], "must be a number above 0, got 0"),
        ("budget_sweep", ["--samples", "6"], "--samples must be a multiple of 4, got 6"),
        ("tensorboard_picture", ["--chromium", "nosuch"], "must be a browser that can be run, got nosuch"),
        ("tables", ["nosuch"], "there is no table 'nosuch'"),
    ],
)
def test_a_bad_option_is_told_in_one_sentence(script, words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{script}{'.__main__' if script == 'tables' else ''}").main()
    assert message in capsys.readouterr().err


def test_a_browser_that_takes_no_picture_is_an_error_and_leaves_the_old_one(tmp_path):
    old = tmp_path / "tensorboard.png"
    old.write_text("the old one")
    for browser in ("true", "false"):
        with pytest.raises(RuntimeError, match=f"{browser} took no picture"):
            tensorboard_picture.take("http://localhost:1", old, browser)
    assert old.read_text() == "the old one"


@pytest.mark.slow
def test_tensorboard_serves_the_histograms_that_the_picture_shows(tmp_path):
    tensorboard_picture.train(tmp_path, num_epochs=1, num_functions=100)
    with tensorboard_picture.tensorboard(tmp_path / "runs") as address:
        of_ranks = [f"balance/{name}/rank_{rank}" for name in ("cost", "samples_per_micro_batch") for rank in range(2)]
        for tag in ["balance/lengths", *of_ranks]:
            query = urllib.parse.urlencode({"run": "demo/version_0", "tag": tag})
            with urllib.request.urlopen(f"{address}/data/plugin/histograms/histograms?{query}", timeout=30) as answer:
                [[_, _, bins]] = json.loads(answer.read())
            assert sum(count for _, _, count in bins) > 0


@pytest.mark.slow
def test_the_gpu_command_runs_all_its_scripts_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no result" not in done.stdout
    assert {path.stem for path in tmp_path.glob("*.json")} == set(gpu.SCRIPTS)


def test_the_scripts_of_a_gpu_end_within_ten_minutes_together():
    assert sum(limit for limit, _, _ in gpu.SCRIPTS.values()) <= 600
    assert set(gpu.SCRIPTS) <= SCRIPTS_WITH_TESTS
