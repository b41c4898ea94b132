"""What does the callback cost where it has nothing to gain: samples of one length?

Baseline: plain Lightning on the same batches in one process. Both train the demo's model in short runs that follow
each other, in the other order every round; a run's figure is the median of its steps, a round's is the ratio of its two
runs. The median over many rounds stands with its 95 % interval (bootstrap), because a step repeated on this kind of
machine differs by more than what is measured. Steps are timed from batch end to batch end, so that planning,
weighting and the clock are in them. A median leaves out the one step of 50 that is logged.

Beside it the time inside the callback's own hooks, as a share of its steps: all of it, that of logged steps too, but
without what it does elsewhere (planning, the weight in backward, the loggers).

    OMP_NUM_THREADS=1 python -m benchmarks.overhead        # about 20 minutes; writes results/overhead.json
    OMP_NUM_THREADS=1 python -m benchmarks.overhead --length 512 --name overhead_long
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from benchmarks import environment
from benchmarks.options import at_least, positive_int
from benchmarks.training import Job
from lightning_balance import BalanceCallback

BATCH_SIZE = 8
WARM_UP_STEPS = 5
HOOKS = (
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
MODES: dict[str, Callable[[int], dict[str, Any]]] = {
    "rebalance": lambda length: {},
    "token budget": lambda length: {"max_tokens": BATCH_SIZE * length},
    "rebalance, token means": lambda length: {"loss_reduction": "causal_token_mean"},
}


class TimedBalance(BalanceCallback):
    """Adds up the seconds inside the hooks that run in every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = 0.0
        for name in HOOKS:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            begun = perf_counter()
            hook(*arguments)
            self.seconds += perf_counter() - begun

        return run


class StepTimes(Callback):
    """Seconds from one batch's end to the next one's."""

    def __init__(self, job: Job) -> None:
        self.marks: list[float] = []
        self._job = job

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self._job.synchronise()
        self.marks.append(perf_counter())

    def steps(self) -> NDArray[np.float64]:
        """Seconds of each step after the first few."""
        return np.diff(np.array(self.marks[WARM_UP_STEPS:]))


def train(job: Job, balance: BalanceCallback | None, num_steps: int, length: int) -> NDArray[np.float64]:
    """Train so many steps of 8 samples; returns the seconds of each."""
    samples = [{"input_ids": torch.arange(length) % 97, "labels": torch.arange(length) % 97}] * (BATCH_SIZE * num_steps)
    loader = DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True)  # type: ignore[arg-type]  # a list is a dataset
    times = StepTimes(job)
    callbacks: list[Callback] = [times] if balance is None else [balance, times]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = job.trainer("auto", callbacks, max_steps=num_steps, logger=CSVLogger(folder))
        trainer.fit(job.model(), loader)
    return times.steps()


def interval(values: NDArray[np.float64]) -> list[float]:
    """Return the median and its 95 % interval, from 10,000 bootstrap samples.

    >>> interval(np.array([1.0, 1.0, 1.0]))
    [1.0, 1.0, 1.0]
    """
    drawn = np.random.default_rng(0).choice(values, size=(10_000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return [float(np.median(values)), float(low), float(high)]


def measure(job: Job, *, num_rounds: int, num_steps: int, length: int) -> Iterator[dict[str, Any]]:
    """Run every mode; yields the figures so far after each."""
    figures: dict[str, Any] = {
        "job": asdict(job), "num_rounds": num_rounds, "num_steps": num_steps, "length": length, "modes": {},
    }  # fmt: skip
    train(job, None, WARM_UP_STEPS + 2, length)
    for mode, options_of in MODES.items():
        options = {"lengths": [length] * BATCH_SIZE * num_steps, "print_summary": False, **options_of(length)}
        rounds, hooks = [], []
        for index in range(num_rounds):
            measured = {}
            for is_plain in (True, False) if index % 2 else (False, True):  # neither is always the first
                balance = None if is_plain else BalanceCallback(**options)
                measured[is_plain] = float(np.median(train(job, balance, num_steps, length)))
            rounds.append((measured[True], measured[False]))
        for _ in range(3):
            timed = TimedBalance(**options)
            steps = train(job, timed, num_steps, length)
            hooks.append(timed.seconds / num_steps / float(np.median(steps)))
        figures["modes"][mode] = {
            "plain_step_s": float(np.median([plain for plain, _ in rounds])),
            "time_over_plain": interval(np.array([ours / plain for plain, ours in rounds])),
            "share_of_hooks": float(np.median(hooks)),
        }
        print(mode, figures["modes"][mode], flush=True)
        yield figures


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=positive_int, default=40)
    parser.add_argument("--steps", type=partial(at_least, WARM_UP_STEPS + 2), default=100)
    parser.add_argument("--length", type=positive_int, default=256)
    parser.add_argument("--name", default="overhead", help="of the JSON file, without its ending")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    Job.add_options(parser, num_ranks=1)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    command = environment.command_line("overhead", out="DIR")
    for figures in measure(Job.of(options), num_rounds=options.rounds, num_steps=options.steps, length=options.length):
        print(environment.save(options.name, figures, command=command, folder=options.out), flush=True)


if __name__ == "__main__":
    main()
