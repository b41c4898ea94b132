"""What does the callback cost where it has nothing to gain: samples of one length, in one process?

Baseline: plain Lightning on the same batches. Both train the demo's model in turn, in the same process; a run's figure
is the median of its steps, a round's is the ratio of two runs that follow each other. Steps are timed from batch end to
batch end, so that planning, weighting, the clock and the loggers are in them, and logging is on at every tenth step.

    OMP_NUM_THREADS=1 python -m benchmarks.overhead        # about 4 minutes; writes results/overhead.json
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from time import perf_counter, process_time
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from benchmarks.environment import command_line, save
from lightning_balance import BalanceCallback
from lightning_balance.demo import CausalLM

WARM_UP_STEPS = 5
MODES: dict[str, dict[str, Any]] = {
    "rebalance": {},
    "token budget": {"max_tokens": 8 * 256},
    "rebalance, token means": {"loss_reduction": "causal_token_mean"},
}


class StepTimes(Callback):
    """Processor and wall-clock seconds from one batch's end to the next one's."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.marks.append((process_time(), perf_counter()))

    def medians(self) -> tuple[float, float]:
        """Median of processor and of wall-clock seconds of a step."""
        steps = np.diff(np.array(self.marks[WARM_UP_STEPS:]), axis=0)
        return float(np.median(steps[:, 0])), float(np.median(steps[:, 1]))


def train(options: dict[str, Any] | None, num_steps: int, length: int) -> tuple[float, float]:
    """Train so many steps of 8 samples, plain where there are no options; return a step's seconds."""
    samples = [{"input_ids": torch.arange(length) % 97, "labels": torch.arange(length) % 97}] * (8 * num_steps)
    loader = DataLoader(samples, batch_size=8, shuffle=True)  # type: ignore[arg-type]  # a list is a dataset
    torch.manual_seed(0)
    times = StepTimes()
    balance = (
        [] if options is None else [BalanceCallback(lengths=[length] * len(samples), print_summary=False, **options)]
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=num_steps,
            callbacks=[*balance, times],
            logger=CSVLogger(folder),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(CausalLM(hidden_size=64), loader)
    return times.medians()


def measure(*, num_rounds: int, num_steps: int, length: int) -> dict[str, Any]:
    """Return the figures of every mode."""
    figures: dict[str, Any] = {"num_rounds": num_rounds, "num_steps": num_steps, "length": length}
    train(None, WARM_UP_STEPS + 2, length)
    for mode, of_callback in MODES.items():
        rounds = []
        for index in range(num_rounds):
            pair = [None, of_callback] if index % 2 else [of_callback, None]  # neither is always the first
            measured = {chosen is None: train(chosen, num_steps, length) for chosen in pair}
            rounds.append((measured[True], measured[False]))
        ratios = np.array([[ours / plain for plain, ours in zip(*pair, strict=True)] for pair in rounds])
        figures[mode] = {
            "plain_step_s": float(np.median([plain[1] for plain, _ in rounds])),
            "ratio_processor": [float(value) for value in np.quantile(ratios[:, 0], [0.5, 0, 1])],
            "ratio_wall": [float(value) for value in np.quantile(ratios[:, 1], [0.5, 0, 1])],
        }
        print(mode, figures[mode], flush=True)
    return figures


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    figures = measure(num_rounds=options.rounds, num_steps=options.steps, length=options.length)
    print(save("overhead", figures, command=command_line("overhead")))


if __name__ == "__main__":
    main()
