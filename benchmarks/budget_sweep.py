"""What does a token budget buy, from small to large, beside fixed micro-batches of one and two samples?

Optimizer steps of 128 examples whose lengths are log-uniform between 64 and 32,768 tokens, budgets of 16,384, 32,768,
65,536 and 131,072 padded tokens per micro-batch; ``--scale`` shrinks lengths and budgets alike to what a machine can
run (1/32 on two CPU cores). Real trainers on real processes, DDP and FSDP2, activations recomputed in backward;
training (forward, backward, optimizer step), and validation (forward alone). All runs in turn, in another order every
round. A sample longer than the budget runs alone.

Tokens per second are real ones. The processor share is the processor time of all ranks over what their cores had;
on a GPU it is left out. Memory is that of :mod:`benchmarks.peaks` for the largest micro-batches served.

    OMP_NUM_THREADS=1 python -m benchmarks.budget_sweep    # about 20 minutes; writes results/budget_sweep.json
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from benchmarks import environment
from benchmarks.options import positive_float, positive_int
from benchmarks.peaks import Peaks
from benchmarks.ranks import gather, on_ranks
from benchmarks.training import STRATEGIES, Job, Watch, in_turn, median_and_range, random_samples
from lightning_balance import BalanceCallback
from lightning_balance.demo import TokenDataset

SHORTEST, LONGEST = 64, 32_768
BUDGETS = (16_384, 32_768, 65_536, 131_072)
FIXED = {"1 sample": 1, "2 samples": 2}
PASSES = ("training", "forward")


def lengths_of(num_samples: int, scale: float) -> NDArray[np.int64]:
    """Return log-uniform lengths, scaled; at least 2 tokens, of which one is predicted.

    >>> lengths = lengths_of(1000, 1.0)
    >>> bool(lengths.min() >= 64 and lengths.max() <= 32_768)
    True
    """
    low, high = np.log([SHORTEST * scale, LONGEST * scale])
    lengths = np.exp(np.random.default_rng(0).uniform(low, high, num_samples))
    return np.maximum(lengths.round(), 2).astype(np.int64)


def budgets_of(scale: float) -> dict[str, int]:
    """Return the budgets by their names.

    >>> budgets_of(1 / 32)["budget 512"]
    512
    """
    return {f"budget {budget:,}": budget for budget in (round(budget * scale) for budget in BUDGETS)}


def run_once(
    method: str, what: str, strategy: str, data: TokenDataset, job: Job, *, scale: float, num_steps: int
) -> dict[str, Any]:
    """Train some steps of all examples, or validate them once; figures of this rank."""
    budget = budgets_of(scale).get(method)
    batch_size = FIXED.get(method, 1)
    watch = Watch(job)
    loader = DataLoader(data, batch_size=batch_size, shuffle=what == "training", collate_fn=job.collator)
    balance = []
    if budget is not None:
        stage = {"max_tokens": budget, "samples_per_step": len(data), "loss_reduction": "causal_token_mean"}
        if what == "forward":
            stage = {"eval_max_tokens": budget, "stages": ["validate"]}
        balance = [BalanceCallback(print_summary=False, **stage)]  # type: ignore[arg-type]  # options by stage
    trainer = job.trainer(
        strategy,
        [*balance, watch],
        max_epochs=num_steps,
        accumulate_grad_batches=1 if budget is not None else len(data) // (batch_size * job.num_ranks),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what == "training":
            trainer.fit(job.model(), loader)
        else:
            trainer.validate(job.model(), loader, verbose=False)
    figures = watch.figures()
    return {
        **figures,
        "seconds_per_pass": float(np.mean(figures["steps"])),
        "busy_s": figures["busy_s"] / len(figures["steps"]),
        "padded_tokens": sum(count * length for count, length in watch.shapes) / len(watch.steps),
        "num_micro_batches": len(watch.shapes) / len(watch.steps),
        "shapes": sorted(set(watch.shapes)),
    }


def rounds_on_this_rank(
    strategy: str, job: dict[str, Any], num_samples: int, scale: float, num_steps: int, num_rounds: int
) -> list[dict[str, Any]]:
    """Return every run with the figures of all ranks."""
    own_job = Job(**job)
    data = random_samples(lengths_of(num_samples, scale))
    methods = [*FIXED, *budgets_of(scale)]
    runs = []
    for index in range(num_rounds + 1):
        for what in PASSES:
            for method in in_turn(methods, index):
                of_ranks = gather(run_once(method, what, strategy, data, own_job, scale=scale, num_steps=num_steps))
                if index:  # the first round warms up
                    runs.append({"method": method, "pass": what, "round": index, "ranks": of_ranks})
        if dist.get_rank() == 0:
            print(f"{strategy}: round {index} of {num_rounds}", flush=True)
    return runs


def figures_of(runs: list[dict[str, Any]], lengths: NDArray[np.int64], methods: list[str], job: Job) -> dict[str, Any]:
    """Return medians over rounds by pass and method."""
    found: dict[str, Any] = {}
    for what in PASSES:
        peaks = Peaks(job, backward=what == "training")
        seconds = {
            (run["method"], run["round"]): max(rank["seconds_per_pass"] for rank in run["ranks"])
            for run in runs
            if run["pass"] == what
        }
        found[what] = {}
        for method in methods:
            own = [run for run in runs if run["pass"] == what and run["method"] == method]
            of_first = own[0]["ranks"]
            busy = [
                sum(rank["busy_s"] for rank in run["ranks"]) / (len(run["ranks"]) * seconds[method, run["round"]])
                for run in own
            ]
            taken = [seconds[method, run["round"]] for run in own]
            shapes = [tuple(shape) for run in own for rank in run["ranks"] for shape in rank["shapes"]]
            found[what][method] = {
                "tokens_per_second": median_and_range([int(lengths.sum()) / value for value in taken]),
                "over 1 sample": median_and_range(
                    [seconds["1 sample", run["round"]] / seconds[method, run["round"]] for run in own]
                ),
                "processor_share": None if job.accelerator == "gpu" else float(np.median(busy)),
                "pad_efficiency": int(lengths.sum()) / sum(rank["padded_tokens"] for rank in of_first),
                "micro_batches_per_rank": max(rank["num_micro_batches"] for rank in of_first),
                "peak_mib": peaks.of(shapes) / 2**20,
            }
    return found


def measure(
    job: Job, *, strategies: list[str], num_samples: int, scale: float, num_steps: int, num_rounds: int
) -> Iterator[dict[str, Any]]:
    """Run everything; yields the figures so far after each strategy."""
    lengths = lengths_of(num_samples, scale)
    figures: dict[str, Any] = {
        "job": asdict(job), "num_samples": num_samples, "scale": scale,
        "num_steps": num_steps, "num_rounds": num_rounds,
        "shortest": int(lengths.min()), "longest": int(lengths.max()), "real_tokens": int(lengths.sum()),
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "num_samples": num_samples, "scale": scale, "num_steps": num_steps, "num_rounds": num_rounds,
    }  # fmt: skip
    for strategy in strategies:
        runs = on_ranks(rounds_on_this_rank, job.num_ranks, strategy=strategy, job=asdict(job), **sizes)
        figures[strategy] = figures_of(runs, lengths, [*FIXED, *budgets_of(scale)], job)
        yield figures


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=positive_int, default=128)
    parser.add_argument("--scale", type=positive_float, default=1 / 32, help="of lengths and budgets; 1 on a large GPU")
    parser.add_argument("--steps", type=positive_int, default=3, help="optimizer steps of a run, each of all samples")
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    Job.add_options(parser, activation_checkpointing=True)
    options = parser.parse_args()
    per_micro_batch = max(FIXED.values()) * options.num_ranks
    if options.samples % per_micro_batch:
        parser.error(f"--samples must be a multiple of {per_micro_batch}, got {options.samples}")
    command = environment.command_line("budget_sweep", out="DIR")
    for figures in measure(
        Job.of(options),
        strategies=options.strategies,
        num_samples=options.samples,
        scale=options.scale,
        num_steps=options.steps,
        num_rounds=options.rounds,
    ):
        print(environment.save("budget_sweep", figures, command=command, folder=options.out), flush=True)


if __name__ == "__main__":
    main()
