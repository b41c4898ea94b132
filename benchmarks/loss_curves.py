"""Does balanced training reach the same loss after the same tokens, and how much sooner by the clock?

The demo's model on two DDP processes: plain shuffled batches in plain Lightning, against rebalance and a token budget
under BalanceCallback; the same number of samples per optimizer step, three seeds (of the shuffle and of the initial
weights) that all methods share, runs in turn. Every few steps the loss of held-out functions is taken, per target
token, with the clock stopped.

    OMP_NUM_THREADS=1 python -m benchmarks.loss_curves     # about 12 minutes; writes results/loss_curves.{json,png}
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from benchmarks import environment, peers
from benchmarks.options import positive_int
from benchmarks.ranks import gather, on_ranks
from benchmarks.training import Job, in_turn, median_and_range, samples_of
from lightning_balance import BalanceCallback
from lightning_balance.demo import CausalLM, TokenDataset
from lightning_balance.demo.data import IGNORED_LABEL

NUM_SLOTS, BATCH_SIZE = 2, 8
METHODS: dict[str, dict[str, Any] | None] = {
    peers.PLAIN: None,
    "rebalance": {},
    "token budget 4,096": {"max_tokens": 4096},
}
NUM_HELD_OUT = 64


class LossCurve(Callback):
    """Takes the loss of held-out samples every few steps.

    Attributes:
        points: real tokens that this rank has trained on, seconds of training, loss per target token.
    """

    def __init__(self, held_out: list[dict[str, torch.Tensor]], every_n_steps: int) -> None:
        self.points: list[tuple[int, float, float]] = []
        self._held_out, self._every_n_steps = held_out, every_n_steps
        self._num_tokens, self._seconds, self._step = 0, 0.0, 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Take the first point, and start the clock on all ranks."""
        self._take_point(trainer, module)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Count real tokens; no sample is counted twice, because all steps here have enough for every rank."""
        self._num_tokens += int((batch["labels"] != IGNORED_LABEL).sum())

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Take a point where it is time for one."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._step % self._every_n_steps == 0:
            self._seconds += perf_counter() - self._begun
            self._take_point(trainer, module)

    def _take_point(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        total, num_targets = 0.0, 0
        with torch.no_grad():
            for batch in self._held_out:
                count = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
                total, num_targets = total + float(module(batch)) * count, num_targets + count
        self.points.append((self._num_tokens, self._seconds, total / num_targets))
        trainer.strategy.barrier()
        self._begun = perf_counter()


def train(
    options: dict[str, Any] | None, data: TokenDataset, held_out: TokenDataset, seed: int, job: Job, every_n_steps: int
) -> list[dict[str, float]]:
    """Train one epoch; returns the points of all ranks together."""
    collate = job.collator
    batches = [collate([held_out[index + place] for place in range(8)]) for index in range(0, len(held_out), 8)]
    curve = LossCurve(batches, every_n_steps)
    callbacks: list[Callback] = [curve]
    if options is not None:
        callbacks.insert(
            0, BalanceCallback(loss_reduction="causal_token_mean", seed=seed, print_summary=False, **options)
        )
    L.seed_everything(seed, verbose=False)
    model = CausalLM(
        hidden_size=job.hidden_size, num_layers=job.num_layers, num_heads=job.num_heads, learning_rate=1e-3
    )
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    trainer = job.trainer("ddp", callbacks, accumulate_grad_batches=NUM_SLOTS, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader)
    of_ranks = gather(curve.points)
    return [
        {
            "tokens": sum(tokens for tokens, _, _ in points),
            "seconds": max(seconds for _, seconds, _ in points),
            "loss": points[0][2],
        }
        for points in zip(*of_ranks, strict=True)
    ]


def runs_on_this_rank(job: dict[str, Any], num_steps: int, num_seeds: int, every_n_steps: int) -> list[dict[str, Any]]:
    """Return the curve of every method and seed."""
    own_job = Job(**job)
    num_samples = num_steps * own_job.num_ranks * NUM_SLOTS * BATCH_SIZE
    everything = samples_of(num_samples + NUM_HELD_OUT)
    order = np.random.default_rng(0).permutation(len(everything)).tolist()
    sequences = [everything[index]["input_ids"].numpy() for index in order]
    data = TokenDataset(sequences[NUM_HELD_OUT:], max_length=1024)
    held_out = TokenDataset(sequences[:NUM_HELD_OUT], max_length=1024)
    train(METHODS[peers.PLAIN], TokenDataset(sequences[:64], max_length=1024), held_out, 0, own_job, 1)  # warms up
    runs = []
    for seed in range(num_seeds):
        for method in in_turn(list(METHODS), seed):
            points = train(METHODS[method], data, held_out, seed, own_job, every_n_steps)
            runs.append({"method": method, "seed": seed, "points": points})
            if dist.get_rank() == 0:
                print(method, seed, points[-1], flush=True)
    return runs


def seconds_to_reach(points: list[dict[str, float]], loss: float) -> float:
    """Return when a curve first is at a loss, between its points; infinity where it never is.

    >>> seconds_to_reach([{"seconds": 0.0, "loss": 4.0}, {"seconds": 2.0, "loss": 2.0}], 3.0)
    1.0
    """
    for before, after in itertools.pairwise(points):
        if after["loss"] <= loss:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before["seconds"] + max(share, 0.0) * (after["seconds"] - before["seconds"])
    return float("inf")


def figures_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each method, over seeds: the last loss, its distance from plain, and how much sooner it is at a loss.

    The loss is the highest of the last ones of a seed, so that every method gets there.
    """
    curves = {(run["method"], run["seed"]): run["points"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    targets = {seed: max(curves[method, seed][-1]["loss"] for method in METHODS) for seed in seeds}
    seconds = {key: seconds_to_reach(points, targets[key[1]]) for key, points in curves.items()}
    found = {}
    for method in METHODS:
        own = [curves[method, seed] for seed in seeds]
        plain = [curves[peers.PLAIN, seed] for seed in seeds]
        found[method] = {
            "last_loss": median_and_range([points[-1]["loss"] for points in own]),
            "loss_minus_plain": median_and_range(
                [points[-1]["loss"] - other[-1]["loss"] for points, other in zip(own, plain, strict=True)]
            ),
            "seconds": median_and_range([points[-1]["seconds"] for points in own]),
            "speed_up_to_loss": median_and_range(
                [seconds[peers.PLAIN, seed] / seconds[method, seed] for seed in seeds]
            ),
        }
    return found


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Held-out loss against real tokens and against seconds; a line per method and seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    colours = dict(zip(METHODS, ("grey", "tab:blue", "tab:green"), strict=True))
    for run in runs:
        losses = [point["loss"] for point in run["points"]]
        for panel, key, unit in zip(panels, ("tokens", "seconds"), (1e6, 1.0), strict=True):
            label = run["method"] if run["seed"] == 0 else None
            values = [point[key] / unit for point in run["points"]]
            panel.plot(values, losses, color=colours[run["method"]], linewidth=1.2, alpha=0.8, label=label)
    panels[0].set(xlabel="real tokens (millions)", ylabel="held-out loss per target token", title="By tokens")
    panels[1].set(xlabel="seconds of training", title="By the clock")
    panels[1].legend(fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=positive_int, default=96)
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument("--every-n-steps", type=positive_int, default=8, help="steps between two points of a curve")
    parser.add_argument("--redraw", action="store_true", help="only draw the figure again, from the JSON")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON and the figure")
    Job.add_options(parser)
    options = parser.parse_args()
    job = Job.of(options)
    if options.redraw:
        draw(json.loads((options.out / "loss_curves.json").read_text())["runs"], options.out / "loss_curves.png")
        return
    sizes = {"num_steps": options.steps, "num_seeds": options.seeds, "every_n_steps": options.every_n_steps}
    runs = on_ranks(runs_on_this_rank, job.num_ranks, job=asdict(job), **sizes)
    figures = {"job": asdict(job), **sizes, "methods": figures_of(runs), "runs": runs}
    for method, values in figures["methods"].items():
        print(method, values)
    command = environment.command_line("loss_curves", out="DIR")
    print(environment.save("loss_curves", figures, command=command, folder=options.out))
    draw(runs, options.out / "loss_curves.png")


if __name__ == "__main__":
    main()
