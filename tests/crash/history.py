"""What a run did from the surviving history's point of view, read from its books and its logs, and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.crash.job import NUM_EPOCHS, NUM_SAMPLES, Attempt, Sequences

Steps = dict[int, tuple[int, set[int]]]
"""Optimizer step -> epoch and samples."""


def newest_readable_checkpoint(folder: Path) -> tuple[Path | None, list[Path]]:
    """What a user continues from: the newest file that can be read. Also the newer ones, of which a death left parts.

    Those are deleted, as a user would.
    """
    torn = []
    for path in sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if is_readable(path):
            return path, torn
        torn.append(path)
        path.unlink()
    return None, torn


def is_readable(path: Path) -> bool:
    try:
        torch.load(path, map_location="cpu", weights_only=False)
    except (RuntimeError, EOFError, OSError):
        return False
    return True


def surviving_steps(attempts: Sequence[Attempt]) -> Steps:
    """Samples of each optimizer step from the ranks' logs; what an attempt did is lost from where a later one began."""
    steps: Steps = {}
    end = None
    for attempt in reversed(attempts):
        logs = [_read(attempt.log(rank)) for rank in range(attempt.num_ranks)]
        begins = {entry["begins_at_step"] for log in logs for entry in log if "begins_at_step" in entry}
        if not begins:
            continue  # died before it trained
        assert len(begins) == 1, f"the ranks of {attempt} begin at steps {begins}"
        for entry in (entry for log in logs for entry in log if "step" in entry):
            if end is None or entry["step"] < end:
                epoch, samples = steps.setdefault(entry["step"], (entry["epoch"], set()))
                assert epoch == entry["epoch"], f"step {entry['step']} belongs to epochs {epoch} and {entry['epoch']}"
                samples.update(entry["indices"])
        end = begins.pop() if end is None else min(end, begins.pop())
    return steps


def _read(log: Path) -> list[dict[str, Any]]:
    """Complete entries; a death may have cut the last one."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def read_result(attempt: Attempt) -> dict[str, Any]:
    """What the attempt's ranks ended with, the same on all of them."""
    results = [torch.load(attempt.result(rank), weights_only=False) for rank in range(attempt.num_ranks)]
    for result in results[1:]:
        assert_equal_results(result, results[0])
    return results[0]


def check_every_sample_trained_once(result: dict[str, Any], reduction: str) -> None:
    """By the books: each epoch's samples are in its steps once, with their weights, and the weights hold the same."""
    lengths = Sequences().lengths
    sums = torch.zeros(NUM_EPOCHS, NUM_SAMPLES, dtype=torch.float64)
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(NUM_EPOCHS)}
    for number, step in enumerate(result["books"].steps):
        assert step["step"] == number
        samples = list(step["weights"])
        seen[step["epoch"]] += samples
        units = {sample: lengths[sample] if reduction == "token_mean" else 1 for sample in samples}
        for sample, weight in step["weights"].items():
            expected = units[sample] / sum(units.values())
            assert abs(weight - expected) < 1e-12, f"sample {sample} weighs {weight} in step {number}, not {expected}"
            sums[step["epoch"], sample] += weight
    for epoch, samples in seen.items():
        assert sorted(samples) == list(range(NUM_SAMPLES)), f"epoch {epoch} trained {sorted(samples)}"
    torch.testing.assert_close(-result["weights"]["trained"], sums, rtol=1e-9, atol=0)
    assert result["global_step"] == len(result["books"].steps)
    assert result["epoch"] == NUM_EPOCHS


def check_logs(attempts: Sequence[Attempt], result: dict[str, Any]) -> None:
    """The ranks' logs tell the same history as the books."""
    books = {step["step"]: (step["epoch"], set(step["weights"])) for step in result["books"].steps}
    logs = surviving_steps(attempts)
    assert logs == books


def assert_equal_results(result: dict[str, Any], expected: dict[str, Any], *, weights: bool = True) -> None:
    """Equal steps, schedules, validations and, within rounding, weights and state of the optimizer."""
    assert result["global_step"] == expected["global_step"]
    assert result["scheduler"] == expected["scheduler"]
    assert result["books"].validations == expected["books"].validations
    assert len(result["books"].steps) == len(expected["books"].steps)
    for ours, theirs in zip(result["books"].steps, expected["books"].steps, strict=True):
        for name in ("step", "epoch", "lr"):
            assert ours[name] == theirs[name], f"{name} of step {ours['step']}"
        if weights:
            assert ours["weights"].keys() == theirs["weights"].keys(), f"samples of step {ours['step']}"
    if weights:
        for name in ("weights", "optimizer"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-9, atol=1e-12)
