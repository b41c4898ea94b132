"""Every file in configs/ trains for two steps on two processes, started by the command; a saved one repeats its run."""

import csv
import math

import pytest

from tests.command import REPOSITORY, run_command
from tests.tiny_models import save_tiny_llama

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
SHORT = (
    *("--data.num_functions", 260, "--data.max_length", 64),
    *("--trainer.accelerator", "cpu", "--trainer.max_steps", 2, "--trainer.log_every_n_steps", 1),
    *("--trainer.limit_val_batches", 1),
)


def fit(config, cwd, *options):
    """Train, and return the output and the values logged per step."""
    run = run_command("fit", "--config", config, *options, cwd=cwd)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "Starting with 2 processes" in run.stdout
    (newest,) = sorted(cwd.glob("runs/*/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)[-1:]
    with newest.open() as file:
        return run.stdout, [row for row in csv.DictReader(file) if row.get("train/loss")]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_trains(config, tmp_path):
    options = [*SHORT]
    if config.stem == "finetune_checkpoint":
        save_tiny_llama(tmp_path / "tiny")
        options += ["--model.checkpoint", tmp_path / "tiny", "--data.checkpoint", tmp_path / "tiny"]
    output, rows = fit(config, tmp_path, *options)
    losses = [float(row["train/loss"]) for row in rows]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert any(name.startswith("balance/pad_efficiency") for name in rows[0])
    assert "pad efficiency" in output  # the table at the end


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token_budget_fsdp2"])
def test_a_saved_config_repeats_the_run(name, tmp_path):
    _, rows = fit(REPOSITORY / "configs" / f"{name}.yaml", tmp_path, *SHORT)
    (saved,) = tmp_path.glob("runs/*/version_0/config.yaml")
    _, rows_again = fit(saved, tmp_path)
    losses, losses_again = ([float(row["train/loss"]) for row in part] for part in (rows, rows_again))
    assert losses_again == pytest.approx(losses, rel=1e-4)


def test_every_config_is_here():
    assert {path.stem for path in CONFIGS} >= {
        "demo",
        "finetune_checkpoint",
        "rebalance_ddp",
        "token_budget_ddp",
        "token_budget_fsdp2",
    }
