"""Does balanced training follow the same loss curve as unbalanced training, step by step?

Baseline: plain Lightning in one process that runs every global batch as one padded micro-batch, which needs no
weighting to be exact. Against it, on two DDP processes: the callback with fixed slots, with a token budget, and plain
Lightning on the same samples without any weighting, to show what the weighting does. All runs have the same samples in
every step, the same seed and the same initial weights.

    python -m benchmarks.convergence                # about 10 minutes on 2 cores; writes results/convergence.{json,png}
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from benchmarks.environment import RESULTS, command_line, save
from benchmarks.options import positive_int
from lightning_balance import BalanceCallback
from lightning_balance.agreement import end_process_group, gather_objects
from lightning_balance.demo import CausalLM, FunctionsDataModule

SAMPLES_PER_STEP = 16
SEED = 0
RUNS: dict[str, dict[str, Any] | None] = {
    "one micro-batch per step, no callback": None,
    "rebalance, DDP x 2, 4 slots": {},
    "token budget 1,024, DDP x 2": {"max_tokens": 1024},
    "the same without weighting": {"max_tokens": 1024},
}


class RecordedLM(CausalLM):
    """Keeps loss times target tokens, and target tokens, of each optimizer step on this rank."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.steps: list[list[float]] = [[0.0, 0.0]]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Note the micro-batch's loss, unless it is a filler's."""
        loss = self(batch)
        num_targets = int((batch["labels"][:, 1:] != -100).sum())
        if not self._is_filler(batch_idx):
            self.steps[-1][0] += float(loss.detach()) * num_targets
            self.steps[-1][1] += num_targets
        return loss

    def _is_filler(self, batch_idx: int) -> bool:
        plan = getattr(self.trainer.train_dataloader.batch_sampler, "plan", None)
        if plan is None:
            return False
        step, slot = plan.locate(batch_idx)
        return plan.step(step).is_filler(self.global_rank, slot)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the notes of the next step."""
        self.steps.append([0.0, 0.0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW whose eps keeps rounding errors of tiny gradients from growing."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, eps=1e-6)


class NoWeights(BalanceCallback):
    """The same micro-batches, averaged as Lightning does."""

    def on_before_backward(self, *arguments: Any) -> None:
        """Leave the loss as it is, but for the length of this window, as plain accumulation would."""
        assert self._place is not None
        loss: Tensor = arguments[-1]
        factor = self._fit.trainer.accumulate_grad_batches / self._place.num_slots  # type: ignore[union-attr]
        loss.register_hook(lambda gradient: gradient * factor)

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        """No correction."""


def run(name: str, num_steps: int, max_length: int, output: Path) -> None:
    """Train one run and write its loss per step on rank 0."""
    torch.set_num_threads(1)
    L.seed_everything(SEED)
    options = RUNS[name]
    data = FunctionsDataModule(batch_size=2, max_length=max_length, num_functions=4000)
    data.setup("fit")
    module = RecordedLM(hidden_size=64, num_layers=2, num_heads=4, learning_rate=1e-3)
    common: dict[str, Any] = {
        "accelerator": "cpu", "max_steps": num_steps, "max_epochs": -1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": sys.stderr.isatty(), "enable_model_summary": False, "limit_val_batches": 0,
    }  # fmt: skip
    loader = data.train_dataloader()
    if options is None:
        order = np.random.default_rng([SEED, 0]).permutation(len(loader.dataset)).tolist()
        loader = DataLoader(
            Subset(loader.dataset, order), batch_size=SAMPLES_PER_STEP, collate_fn=loader.collate_fn, shuffle=False
        )
        trainer = L.Trainer(devices=1, **common)
    else:
        kind = NoWeights if name.endswith("without weighting") else BalanceCallback
        callback = kind(
            samples_per_step=SAMPLES_PER_STEP,
            loss_reduction="causal_token_mean",
            seed=SEED,
            print_summary=False,
            **options,
        )
        trainer = L.Trainer(devices=2, strategy="ddp", accumulate_grad_batches=4, callbacks=[callback], **common)
    trainer.fit(module, loader)
    ranks = np.sum(gather_objects(module.steps[:num_steps]), axis=0)
    if trainer.is_global_zero:
        output.write_text(json.dumps((ranks[:, 0] / ranks[:, 1]).tolist()))
    end_process_group()


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Loss curves on the left, their relative distance from the baseline on the right."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    baseline = np.array(next(iter(losses.values())))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    looks = [("-", 4.0, "silver"), ("--", 1.5, "tab:blue"), (":", 2.0, "tab:green"), ("-", 0.8, "tab:red")]
    for (name, values), (style, width, colour) in zip(losses.items(), looks, strict=True):
        left.plot(values, style, linewidth=width, color=colour, label=name)
        if name != next(iter(losses)):
            right.semilogy(np.maximum(np.abs(values / baseline - 1), 1e-9), style, color=colour, label=name)
    right.axhline(1e-3, color="grey", linewidth=0.8)
    right.annotate("1e-3", (0, 1.1e-3), color="grey")
    left.set(xlabel="optimizer step", ylabel="loss per target token", title="Loss of each step's global batch")
    right.set(xlabel="optimizer step", ylabel="relative distance", title="Distance from the exact baseline")
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run everything, or one run when called by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive_int, default=200)
    parser.add_argument("--max-length", type=positive_int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON and the figure")
    parser.add_argument("--redraw", action="store_true", help="only draw the figure again, from the JSON")
    parser.add_argument("--only", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run(options.only, options.steps, options.max_length, options.losses)
        return
    if options.redraw:
        saved = json.loads((options.output / "convergence.json").read_text())
        draw(saved["losses"], options.output / "convergence.png")
        return
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            path = Path(folder) / "losses.json"
            command = [sys.executable, "-m", "benchmarks.convergence", "--steps", str(options.steps), "--only", name]
            subprocess.run([*command, "--max-length", str(options.max_length), "--losses", str(path)], check=True)
            losses[name] = json.loads(path.read_text())
    baseline = np.array(next(iter(losses.values())))
    distances = {name: np.abs(np.array(values) / baseline - 1) for name, values in losses.items()}
    for name, distance in distances.items():
        print(f"{name:45s} loss {losses[name][-1]:.4f}, distance {distance[-1]:.1e}, largest {distance.max():.1e}")
    figures = {
        "samples_per_step": SAMPLES_PER_STEP,
        "relative_distance_at_last_step": {name: float(d[-1]) for name, d in distances.items()},
        "largest_relative_distance": {name: float(d.max()) for name, d in distances.items()},
        "losses": losses,
    }
    save("convergence", figures, command=command_line("convergence", output="DIR"), folder=options.output)
    draw(losses, options.output / "convergence.png")


if __name__ == "__main__":
    main()
