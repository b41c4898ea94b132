"""How much memory does each way of batching need as the batch grows, and how large a batch fits into a given memory?

Plans an epoch of the demo's functions for 8 ranks x 2 slots at per-device batches of 4, 6, ... 18, the same samples per
optimizer step for all; a planned micro-batch's memory is measured by training on it, see :mod:`benchmarks.peaks`. One
process does it: what a rank needs depends on its own micro-batches only (DDP).

The token budget is ``batch_size`` times the mean length (at least the longest sample): the real tokens of a plain
micro-batch, without its padding. A fixed budget would need the same memory at any batch size.

The limit is what length grouping needs with a per-device batch of 8; the largest batch below it is bisected.

    OMP_NUM_THREADS=1 python -m benchmarks.memory          # about 5 minutes; writes results/memory.{json,png}
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import environment, peers
from benchmarks.inputs import Shape
from benchmarks.options import positive_int
from benchmarks.peaks import Peaks
from benchmarks.served import ServedEpoch
from benchmarks.training import Job, samples_of
from lightning_balance import plan_epoch
from lightning_balance.what_if.methods import base_budget
from lightning_balance.what_if.options import PlanOptions

REBALANCE, BUDGET = "rebalance", "token budget"
LOOKAHEAD = f"{REBALANCE}, lookahead 8"
METHODS = (*peers.SAMPLERS, REBALANCE, LOOKAHEAD, BUDGET)
BATCH_OF_LIMIT = 8
SEED = 0


def serve(method: str, lengths: NDArray[np.int64], shape: Shape) -> ServedEpoch:
    """Return the micro-batches of all ranks."""
    if method in peers.SAMPLERS:
        served = peers.SAMPLERS[method](lengths, **asdict(shape), seed=SEED)
        return peers.serve(served, shape.num_ranks, shape.num_slots)
    budget = {"max_tokens": base_budget(lengths, PlanOptions(batch_size=shape.batch_size))}
    cut: dict[str, Any] = budget if method == BUDGET else {"num_slots": shape.num_slots}
    if method == LOOKAHEAD:
        cut["lookahead"] = 8
    plan = plan_epoch(lengths, num_ranks=shape.num_ranks, samples_per_step=shape.samples_per_step, seed=SEED, **cut)
    return ServedEpoch.of_plan(plan)


class Batches:
    """Peaks of every method at any per-device batch.

    Args:
        lengths: of all samples.
        num_ranks: of the plan.
        num_slots: of the plan.
        peaks: measures.
    """

    def __init__(self, lengths: NDArray[np.int64], *, num_ranks: int, num_slots: int, peaks: Peaks) -> None:
        self._lengths, self._num_ranks, self._num_slots, self._peaks = lengths, num_ranks, num_slots, peaks
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    def of(self, method: str, batch_size: int) -> dict[str, Any]:
        """Return peak, largest micro-batch and micro-batches per step, over all whole steps of the samples."""
        key = method, batch_size
        if key not in self._known:
            self._known[key] = self._measure(method, batch_size)
        return self._known[key]

    def _measure(self, method: str, batch_size: int) -> dict[str, Any]:
        shape = Shape(num_ranks=self._num_ranks, num_slots=self._num_slots, batch_size=batch_size)
        num_steps = len(self._lengths) // shape.samples_per_step
        if not num_steps:
            raise ValueError(f"{len(self._lengths)} samples do not fill a step of {shape.samples_per_step}: take more")
        lengths = self._lengths[: num_steps * shape.samples_per_step]
        served = serve(method, lengths, shape)
        counts = served.counts.ravel()
        padded = served.padded_lengths(lengths)
        return {
            "peak_bytes": self._peaks.of(zip(counts.tolist(), padded.tolist(), strict=True)),
            "largest_micro_batch": int((counts * padded).max()),
            "micro_batches_per_step": len(counts) / num_steps / self._num_ranks,
        }

    def largest_below(self, method: str, limit: int, most: int) -> int:
        """Return the largest per-device batch whose peak is at most a limit; 0 where none is."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.of(method, middle)["peak_bytes"] <= limit else (low, middle)
        return low


def measure(
    job: Job, *, num_samples: int, max_length: int, batch_sizes: list[int], most: int, num_ranks: int, num_slots: int
) -> dict[str, Any]:
    """Return the figures of all methods."""
    lengths = np.random.default_rng(SEED).permutation(np.asarray(samples_of(num_samples, max_length).lengths))
    batches = Batches(lengths, num_ranks=num_ranks, num_slots=num_slots, peaks=Peaks(job))
    rows = {
        method: {str(size): batches.of(method, size) for size in batch_sizes}
        for method in tqdm(METHODS, desc="methods", disable=None)
    }
    limit = batches.of(peers.GROUPED, BATCH_OF_LIMIT)["peak_bytes"]
    return {
        "job": asdict(job),
        "counted": "allocator (max_memory_allocated)" if job.accelerator == "gpu" else "live tensors, exact",
        "num_ranks": num_ranks,
        "num_slots": num_slots,
        "num_samples": num_samples,
        "max_length": max_length,
        "limit_bytes": limit,
        "batch_of_limit": BATCH_OF_LIMIT,
        "most_tried": most,
        "methods": rows,
        "largest_batch": {
            method: batches.largest_below(method, limit, most)
            for method in tqdm(METHODS, desc="largest batches", disable=None)
        },
    }


def draw(figures: dict[str, Any], path: Path) -> None:
    """Peak against per-device batch, a line per method, and the limit."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, marker in zip(METHODS, "osv^PD", strict=True):
        of_sizes = figures["methods"][method]
        sizes = [int(size) for size in of_sizes]
        axes.plot(sizes, [row["peak_bytes"] / 2**20 for row in of_sizes.values()], marker=marker, label=method)
    limit = figures["limit_bytes"] / 2**20
    axes.axhline(limit, color="grey", linewidth=0.8)
    axes.annotate(
        "LengthGrouped with 8", (axes.get_xlim()[1], limit), ha="right", va="bottom", color="grey", fontsize=8
    )
    axes.set(xlabel="samples per device and slot", ylabel="peak memory (MiB)", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=positive_int, default=8192, help="functions of the demo")
    parser.add_argument("--max-length", type=positive_int, default=1024)
    parser.add_argument("--batch-sizes", type=positive_int, nargs="+", default=list(range(4, 19, 2)))
    parser.add_argument(
        "--most", type=positive_int, default=40, help="largest per-device batch that is tried under the limit"
    )
    parser.add_argument("--plan-ranks", type=positive_int, default=8)
    parser.add_argument("--plan-slots", type=positive_int, default=2)
    parser.add_argument("--no-picture", action="store_true", help="do not draw (matplotlib is not needed)")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    Job.add_options(parser, num_ranks=1)
    options = parser.parse_args()
    figures = measure(
        Job.of(options),
        num_samples=options.samples,
        max_length=options.max_length,
        batch_sizes=options.batch_sizes,
        most=options.most,
        num_ranks=options.plan_ranks,
        num_slots=options.plan_slots,
    )
    command = environment.command_line("memory", out="DIR")
    print(environment.save("memory", figures, command=command, folder=options.out))
    if not options.no_picture:
        draw(figures, options.out / "memory.png")


if __name__ == "__main__":
    main()
