"""How many real tokens per second does each way of batching train, and what share of the ceiling is that?

Trains the demo's model on the functions of the standard library with Lightning on real processes (gloo, one thread
each; NCCL on GPUs), under DDP and under FSDP2. The compared batchings run in turn in the same processes, in another
order every round, on the same samples with the same number of samples per optimizer step; each trains one epoch from
the same weights. Peers' samplers serve plain Lightning, which averages their micro-batches as if they were equal; ours
run under BalanceCallback, whose weighting, measuring and planning are in the time. Before the rounds the cost model is
calibrated on these ranks, as ``lightning-balance calibrate`` does it; one row shows rebalance without.

The ceiling is training without padding and with equal work: the samples, sorted by length, are replaced in groups as
large as what a slot of plain batches runs by as many samples of their mean length, so that every micro-batch is full
and every rank has the same.

Padding is on the right of a causal model, so no row needs an attention mask; two rows show what one costs, because
attention then no longer skips the half that no token sees.

Memory is that of :mod:`benchmarks.peaks`: training on the largest micro-batches that a batching has served.

    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end      # about 25 minutes; writes results/end_to_end.json
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from benchmarks import environment, peers
from benchmarks.inputs import Shape
from benchmarks.options import positive_int
from benchmarks.peaks import Peaks
from benchmarks.ranks import gather, on_ranks
from benchmarks.training import STRATEGIES, Job, Watch, in_turn, median_and_range, random_samples, samples_of
from lightning_balance import BalanceCallback, CostModel
from lightning_balance.demo import TokenDataset

NUM_SLOTS, BATCH_SIZE = 2, 8
CEILING = "ceiling"
MASKED = ", attention mask"
"""Ends the name of a row whose padded micro-batches come with an attention mask."""
REFERENCES = (peers.PLAIN, peers.REBALANCED, CEILING)


def ours(max_tokens: int, cost: CostModel) -> dict[str, dict[str, Any]]:
    """Return the options of every row of ours."""
    return {
        "rebalance, default cost": {},
        "rebalance": {"cost": cost},
        f"token budget {max_tokens:,}": {"cost": cost, "max_tokens": max_tokens},
        "rebalance, lookahead 8": {"cost": cost, "lookahead": 8},
        f"token budget {max_tokens:,}, lookahead 8": {"cost": cost, "max_tokens": max_tokens, "lookahead": 8},
    }


def without_padding(lengths: NDArray[np.int64], shape: Shape) -> NDArray[np.int64]:
    """Return lengths, sorted and replaced by their mean in groups as large as a slot of plain batches.

    >>> without_padding(np.arange(1, 9), Shape(num_ranks=2, num_slots=1, batch_size=2))
    array([2, 2, 2, 2, 6, 6, 6, 6])
    """
    groups = np.sort(lengths).reshape(-1, shape.num_ranks * shape.batch_size)
    return np.repeat(groups.mean(axis=1).round().astype(np.int64), groups.shape[1])


def served_by_others(method: str, lengths: NDArray[np.int64], shape: Shape, seed: int) -> list[Any]:
    """Return the micro-batches of a peer, or of the ceiling, in the order slot 0 rank 0, slot 0 rank 1, ..."""
    if method in peers.SAMPLERS:
        return peers.SAMPLERS[method](lengths, **asdict(shape), seed=seed)
    slots = np.arange(len(lengths)).reshape(-1, shape.num_ranks, shape.batch_size)
    return list(slots[np.random.default_rng(seed).permutation(len(slots))].reshape(-1, shape.batch_size))


def train(
    method: str, options: Mapping[str, Any] | None, strategy: str, data: TokenDataset, seed: int, job: Job
) -> dict[str, Any]:
    """Train one epoch; returns the figures of this rank. No options: a peer's sampler, or the ceiling."""
    if method.endswith(MASKED):
        method, job = method.removesuffix(MASKED), replace(job, attention_mask=True)
    shape = Shape(num_ranks=job.num_ranks, num_slots=NUM_SLOTS, batch_size=BATCH_SIZE)
    lengths = np.asarray(data.lengths)
    if method == CEILING:
        lengths = without_padding(lengths, shape)
        data = random_samples(lengths)
    balance = None
    if options is not None:
        balance = BalanceCallback(loss_reduction="causal_token_mean", seed=seed, print_summary=False, **options)
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=job.collator)
    else:
        served = served_by_others(method, lengths, shape, seed)[dist.get_rank() :: job.num_ranks]
        loader = DataLoader(data, batch_sampler=[np.asarray(s).tolist() for s in served], collate_fn=job.collator)
    watch = Watch(job, balance)
    callbacks: list[Callback] = [watch] if balance is None else [balance, watch]
    trainer = job.trainer(
        strategy, callbacks, accumulate_grad_batches=NUM_SLOTS, use_distributed_sampler=False, max_epochs=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(job.model(), loader)
    figures = watch.figures()
    padded = sum(count * length for count, length in watch.shapes)
    return {**figures, "shapes": sorted(set(watch.shapes)), "padded_tokens": padded, "real_tokens": int(lengths.sum())}


def rounds_on_this_rank(
    strategy: str, job: dict[str, Any], num_steps: int, num_rounds: int, max_length: int
) -> dict[str, Any]:
    """Return every run of every method, with the figures of all ranks, and the calibrated cost."""
    own_job = Job(**job)
    data = samples_of(num_steps * own_job.num_ranks * NUM_SLOTS * BATCH_SIZE, max_length)
    cost = own_job.calibrated_cost(strategy, data, BATCH_SIZE)
    longest = int(np.max(data.lengths))
    rows = ours(BATCH_SIZE * longest // 2, cost)
    masked = [name + MASKED for name in (peers.PLAIN, list(rows)[-1])]
    methods = [*peers.SAMPLERS, *rows, CEILING, *masked]
    runs = []
    for index in range(num_rounds + 1):
        for method in in_turn(methods, index):
            of_ranks = gather(train(method, rows.get(method.removesuffix(MASKED)), strategy, data, index, own_job))
            if index:  # the first round warms up
                runs.append({"method": method, "round": index, "ranks": of_ranks})
        if dist.get_rank() == 0:
            print(f"{strategy}: round {index} of {num_rounds}", flush=True)
    return {"methods": methods, "cost": asdict(cost), "runs": runs}


def median_wait(runs: list[dict[str, Any]]) -> float:
    """Return the median over runs of the seconds per step of the rank that waits most."""
    return float(
        np.median([max(rank["waited_s"] for rank in run["ranks"]) / len(run["ranks"][0]["steps"]) for run in runs])
    )


def figures_of(measured: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return medians over rounds of what each batching did, and its ratios to others in the same round."""
    methods, runs = measured["methods"], measured["runs"]
    of_masked, of_others = Peaks(replace(job, attention_mask=True)), Peaks(job)
    speeds: dict[str, dict[int, float]] = {method: {} for method in methods}
    for run in runs:
        seconds = max(sum(rank["steps"]) for rank in run["ranks"])
        speeds[run["method"]][run["round"]] = run["ranks"][0]["real_tokens"] / seconds

    found: dict[str, Any] = {"cost": measured["cost"], "methods": {}}
    for method in methods:
        own = [run for run in runs if run["method"] == method]
        steps = np.concatenate([np.max([rank["steps"] for rank in run["ranks"]], axis=0) for run in own])
        padded = sum(rank["padded_tokens"] for rank in own[0]["ranks"])
        shapes = [tuple(shape) for run in own for rank in run["ranks"] for shape in rank["shapes"]]
        found["methods"][method] = {
            "tokens_per_second": float(np.median(list(speeds[method].values()))),
            "step_p50_s": float(np.quantile(steps, 0.5)),
            "step_p90_s": float(np.quantile(steps, 0.9)),
            "waited_per_step_s": None if job.accelerator == "gpu" else median_wait(own),
            "pad_efficiency": own[0]["ranks"][0]["real_tokens"] / padded,
            "peak_mib": (of_masked if method.endswith(MASKED) else of_others).of(shapes) / 2**20,
            "tokens_per_second_of_rounds": list(speeds[method].values()),
            **{
                f"over {other}": median_and_range([own / speeds[other][at] for at, own in speeds[method].items()])
                for other in REFERENCES
            },
        }
    return found


def measure(
    job: Job, *, strategies: list[str], num_steps: int, num_rounds: int, max_length: int
) -> Iterator[dict[str, Any]]:
    """Run everything; yields the figures so far after each strategy."""
    figures: dict[str, Any] = {
        "job": asdict(job), "num_steps": num_steps, "num_rounds": num_rounds,
        "samples_per_step": job.num_ranks * NUM_SLOTS * BATCH_SIZE,
    }  # fmt: skip
    sizes = {"num_steps": num_steps, "num_rounds": num_rounds, "max_length": max_length}
    for strategy in strategies:
        measured = on_ranks(rounds_on_this_rank, job.num_ranks, strategy=strategy, job=asdict(job), **sizes)
        figures[strategy] = figures_of(measured, job)
        yield figures


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=positive_int, default=16, help="optimizer steps of a run")
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--max-length", type=positive_int, default=1024, help="longer samples lose their end")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    Job.add_options(parser)
    options = parser.parse_args()
    command = environment.command_line("end_to_end", out="DIR")
    for figures in measure(
        Job.of(options),
        strategies=options.strategies,
        num_steps=options.steps,
        num_rounds=options.rounds,
        max_length=options.max_length,
    ):
        print(environment.save("end_to_end", figures, command=command, folder=options.out), flush=True)


if __name__ == "__main__":
    main()
