"""What does planning cost as ranks and samples grow?

    python -m benchmarks.scale

One global batch on 1 ... 4,096 ranks beside transformers' ``BatchRebalanceSampler`` where that ends in reasonable
time; a whole epoch of a million samples with the memory it takes; the wait for the first micro-batch of ten million
samples. Lengths are lognormal. Memory is the peak of what Python and numpy allocate above the lengths (tracemalloc, in
a fresh process).
"""

from __future__ import annotations

import argparse
import multiprocessing
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import environment
from benchmarks.options import positive_int
from benchmarks.timing import Timing, alternate, run_timed
from lightning_balance import CostModel, plan_epoch, plan_step
from lightning_balance.efficiency import modelled_time
from lightning_balance.epoch import EpochPlan

BATCH_SIZE = 8
NUM_SLOTS = 4


def lengths_of(count: int) -> NDArray[np.int64]:
    """Return lognormal lengths between 16 and 1,024."""
    return np.clip(np.random.default_rng(0).lognormal(5, 1, count), 16, 1024).astype(np.int64)


def one_batch(num_ranks: int, num_slots: int, *, with_peer: bool, num_runs: int) -> dict[str, Any]:
    """Time the plan of one global batch with 8 samples per micro-batch, both syncs, and the peer's where wanted."""
    lengths = lengths_of(num_ranks * num_slots * BATCH_SIZE)
    listed = lengths.tolist()
    sampler = BatchRebalanceSampler(listed, len(listed), num_ranks, num_slots, shuffle=False)
    functions: dict[str, Callable[[], Any]] = {
        sync: lambda sync=sync: plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, sync=sync)
        for sync in ("micro_batch", "step")
    }
    if with_peer:
        functions["peer"] = lambda: next(iter(sampler))
    times = alternate(functions, num_runs)
    plans = {sync: functions[sync]() for sync in ("micro_batch", "step")}
    useful = float(CostModel().cost(1, lengths).sum())
    return {
        "num_ranks": num_ranks,
        "num_slots": num_slots,
        "num_samples": len(lengths),
        "planning": {name: timing.as_dict() for name, timing in times.items()},
        "model_efficiency": {
            sync: useful / (num_ranks * modelled_time(plan.costs, sync))  # type: ignore[arg-type]
            for sync, plan in plans.items()
        },
    }


EPOCHS: dict[str, dict[str, Any]] = {
    "64 ranks x 4 slots x 8": {"samples_per_step": 2048, "num_slots": 4},
    "the same, sync=step": {"samples_per_step": 2048, "num_slots": 4, "sync": "step"},
    "the same, lookahead 8": {"samples_per_step": 2048, "num_slots": 4, "lookahead": 8},
    "64 ranks, max_tokens=8192, 2,048 samples per step": {"samples_per_step": 2048, "max_tokens": 8192},
    "64 ranks x 4 slots, max_tokens=8192, step_unit=tokens": {
        "num_slots": 4,
        "max_tokens": 8192,
        "step_unit": "tokens",
    },
    "the same, step_unit=tokens, lookahead 8": {
        "num_slots": 4,
        "max_tokens": 8192,
        "step_unit": "tokens",
        "lookahead": 8,
    },
}


def whole_epoch(name: str, num_samples: int, num_runs: int) -> dict[str, Any]:
    """Time the plan of every step of an epoch, and measure the memory it takes above the lengths."""
    lengths = lengths_of(num_samples)
    runs = []
    for _ in range(num_runs):
        plan, seconds = run_timed(lambda: _walk(lengths, name))
        runs.append(seconds)
    return {
        "epoch": name,
        "num_samples": num_samples,
        "num_steps": plan.num_steps,
        "num_micro_batches": plan.num_micro_batches,
        "whole_epoch": Timing.of(runs).as_dict(),
        **in_new_process(_memory_of_epoch, name, num_samples),
    }


def _memory_of_epoch(name: str, num_samples: int) -> dict[str, float]:
    lengths = lengths_of(num_samples)
    plan_epoch(lengths[:4096], num_ranks=64, **EPOCHS[name]).step(0)  # imports and caches are not the epoch's
    tracemalloc.start()
    _walk(lengths, name)
    return {"peak_allocated_mb": tracemalloc.get_traced_memory()[1] / 1e6}


def _walk(lengths: NDArray[np.int64], name: str) -> EpochPlan:
    plan = plan_epoch(lengths, num_ranks=64, **EPOCHS[name])
    _ = plan.num_micro_batches
    for index in range(plan.num_steps):
        plan.step(index)
    return plan


def first_micro_batch(name: str, num_samples: int, num_runs: int) -> dict[str, Any]:
    """Time from a list of lengths to the first micro-batch, and from there to the number of micro-batches."""
    lengths = lengths_of(num_samples)
    first = []
    for run in range(num_runs):
        plan, seconds = run_timed(lambda run=run: _first(lengths, name, epoch=run))
        first.append(seconds)
    _, count = run_timed(lambda: plan.num_micro_batches)
    return {
        "epoch": name,
        "num_samples": num_samples,
        "first_micro_batch": Timing.of(first).as_dict(),
        "count_micro_batches": Timing.of([count]).as_dict(),
        **in_new_process(_memory_of_first, name, num_samples),
    }


def _first(lengths: NDArray[np.int64], name: str, epoch: int) -> EpochPlan:
    plan = plan_epoch(lengths, num_ranks=64, epoch=epoch, **EPOCHS[name])
    plan.step(0).micro_batch(0, 0)
    return plan


def _memory_of_first(name: str, num_samples: int) -> dict[str, float]:
    lengths = lengths_of(num_samples)
    tracemalloc.start()
    _first(lengths, name, epoch=0)
    return {"peak_allocated_mb": tracemalloc.get_traced_memory()[1] / 1e6}


def in_new_process(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run a function in a fresh process, whose memory nobody has used before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    """Measure and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-ranks", type=positive_int, default=4096, help="largest number of ranks")
    parser.add_argument(
        "--peer-groups", type=positive_int, default=1024, help="largest number of micro-batches for the peer"
    )
    parser.add_argument("--epoch-samples", type=positive_int, default=1_048_576, help="samples of the whole epoch")
    parser.add_argument(
        "--first-samples", type=positive_int, default=10_000_000, help="samples for the first micro-batch"
    )
    parser.add_argument("--runs", type=positive_int, default=5, help="timed runs of each")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    shapes = [(ranks, NUM_SLOTS) for ranks in (4**power for power in range(7)) if ranks <= args.most_ranks]
    shapes += [(ranks, 1024 // ranks) for ranks in (64, 1024) if ranks <= args.most_ranks]
    batches = []
    for ranks, slots in tqdm(shapes, desc="one batch", disable=None):
        with_peer = ranks * slots <= args.peer_groups
        num_runs = args.runs if ranks * slots < 1024 or not with_peer else min(args.runs, 3)
        batches.append(one_batch(ranks, slots, with_peer=with_peer, num_runs=num_runs))
    few = min(args.runs, 3)
    figures = {
        "one_batch": batches,
        "whole_epoch": [
            whole_epoch(name, args.epoch_samples, few) for name in tqdm(EPOCHS, desc="epochs", disable=None)
        ],
        "first_micro_batch": [
            first_micro_batch(name, args.first_samples, few) for name in tqdm(EPOCHS, desc="first", disable=None)
        ],
        "budget_of_a_million": whole_epoch("64 ranks, max_tokens=8192, 2,048 samples per step", 1_000_000, few)
        if args.epoch_samples >= 1_000_000
        else None,
    }
    command = environment.command_line("scale", out="DIR")
    print(environment.save("scale", figures, command=command, folder=args.out).name)


if __name__ == "__main__":
    main()
