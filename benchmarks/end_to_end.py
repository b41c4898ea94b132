"""How many real tokens per second does each way of batching train, and what share of the ceiling is that?

Trains the demo's model on the functions of the standard library with Lightning on two real processes (gloo, one thread
each), under DDP and under FSDP2. The compared batchings run in turn in the same processes, in another order every
round, on the same samples with the same number of samples per optimizer step; each trains one epoch from the same
weights. Peers' samplers serve plain Lightning, which averages their micro-batches as if they were equal; ours run under
BalanceCallback, whose weighting, measuring and planning are in the time.

The ceiling is training without padding and with equal work: the samples, sorted by length, are replaced in groups as
large as what a slot of plain batches runs by as many samples of their mean length, so that every micro-batch is full
and every rank has the same.

Memory is counted apart, in one process: the peak of live tensors (exact, reproducible) in forward and backward of the
largest micro-batches that a batching has served.

    OMP_NUM_THREADS=1 python -m benchmarks.end_to_end      # about 15 minutes; writes results/end_to_end.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from benchmarks import environment, peers
from lightning_balance import BalanceCallback
from lightning_balance.demo import CausalLM, FunctionsDataModule
from lightning_balance.demo.data import PadCollator, TokenDataset
from lightning_balance.probing.live_bytes import LiveBytes
from lightning_balance.waiting import WaitClock

NUM_RANKS, NUM_SLOTS, BATCH_SIZE = 2, 2, 8
SAMPLES_PER_STEP = NUM_RANKS * NUM_SLOTS * BATCH_SIZE
PLAIN, GROUPED, PEER, CEILING = "plain shuffle", "LengthGrouped", "BatchRebalance", "ceiling"
OURS: dict[str, dict[str, Any]] = {
    "rebalance": {},
    "token budget 4,096": {"max_tokens": 4096},
    "rebalance, lookahead 8": {"lookahead": 8},
    "token budget 4,096, lookahead 8": {"max_tokens": 4096, "lookahead": 8},
}
METHODS = (PLAIN, GROUPED, PEER, *OURS, CEILING)
NUM_LARGEST = 3
"""So many of the largest micro-batches are run to count memory, by padded tokens and by the quadratic part."""


def samples_of(num_steps: int) -> TokenDataset:
    """The first functions of the demo, as many as so many steps take."""
    data = FunctionsDataModule(num_functions=2 * num_steps * SAMPLES_PER_STEP)
    data.prepare_data()
    data.setup("fit")
    assert data.train_dataset is not None
    sequences = [data.train_dataset[index]["input_ids"].numpy() for index in range(num_steps * SAMPLES_PER_STEP)]
    return TokenDataset(sequences, max_length=1024)


def without_padding(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths, sorted and replaced by their mean in groups as large as a slot of plain batches.

    >>> without_padding(np.arange(1, 33))
    array([ 8,  8,  8,  8,  8,  8,  8,  8,  8,  8,  8,  8,  8,  8,  8,  8, 24,
           24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24])
    """
    groups = np.sort(lengths).reshape(-1, NUM_RANKS * BATCH_SIZE)
    return np.repeat(groups.mean(axis=1).round().astype(np.int64), groups.shape[1])


def micro_batches_of(method: str, lengths: NDArray[np.int64], seed: int) -> list[Any]:
    """The micro-batches of a peer, or of the ceiling, in the order slot 0 rank 0, slot 0 rank 1, ..."""
    shape = {"num_ranks": NUM_RANKS, "num_slots": NUM_SLOTS, "batch_size": BATCH_SIZE, "seed": seed}
    if method == PLAIN:
        return peers.random_batches(lengths, **shape)
    if method == GROUPED:
        return peers.length_grouped(lengths, **shape)
    if method == PEER:
        return peers.all_ranks(
            lambda rank: peers.batch_rebalance_for_one_rank(lengths.tolist(), **shape, rank=rank), NUM_RANKS
        )
    slots = np.arange(len(lengths)).reshape(-1, NUM_RANKS, BATCH_SIZE)
    return list(slots[np.random.default_rng(seed).permutation(len(slots))].reshape(-1, BATCH_SIZE))


class Watch(Callback):
    """Times steps, counts what is waited and padded, and keeps the shapes of micro-batches."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.waited = 0.0
        self.shapes: list[tuple[int, int]] = []
        self._clock = WaitClock()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Begin together."""
        trainer.strategy.barrier()
        self._begun, self._step = perf_counter(), 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Note the shape."""
        self.shapes.append(tuple(batch["input_ids"].shape))
        self._clock.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Note the time where a step ends."""
        self.waited += self._clock.stop()
        if trainer.global_step > self._step:
            self._step, now = trainer.global_step, perf_counter()
            self.steps.append(now - self._begun)
            self._begun = now


def train(method: str, strategy: str, data: TokenDataset, seed: int, hidden_size: int) -> dict[str, Any]:
    """Train one epoch; figures of this rank."""
    lengths = np.asarray(data.lengths)
    if method == CEILING:
        lengths = without_padding(lengths)
        tokens = np.random.default_rng(0).integers(1, 250, size=int(lengths.max()))
        data = TokenDataset([tokens[:length] for length in lengths], max_length=1024)
    torch.manual_seed(0)
    watch = Watch()
    callbacks: list[Callback] = [watch]
    if method in OURS:
        # It has to see the samples that the others see: every epoch of one seed is the same in all of them.
        options = {"loss_reduction": "causal_token_mean", "seed": seed, "print_summary": False, **OURS[method]}
        callbacks.insert(0, BalanceCallback(**options))
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=PadCollator())
    else:
        served = micro_batches_of(method, lengths, seed)[dist.get_rank() :: NUM_RANKS]
        batch_sampler = [np.asarray(samples).tolist() for samples in served]
        loader = DataLoader(data, batch_sampler=batch_sampler, collate_fn=PadCollator())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=NUM_RANKS,
            strategy=strategy_of(strategy),
            accumulate_grad_batches=NUM_SLOTS,
            use_distributed_sampler=False,
            max_epochs=1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(CausalLM(hidden_size=hidden_size), loader)
    padded = sum(count * length for count, length in watch.shapes)
    return {
        "steps": watch.steps,
        "waited_s": watch.waited,
        "padded_tokens": padded,
        "real_tokens": int(lengths.sum()),
        "shapes": sorted(set(watch.shapes)),
    }


def strategy_of(name: str) -> Any:
    """The strategy, new for every trainer."""
    return ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1) if name == "FSDP2" else name


def run_rank(strategy: str, num_steps: int, num_rounds: int, hidden_size: int, out: Path) -> None:
    """What every process does; rank 0 writes the runs of all."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = samples_of(num_steps)
    runs = []
    for index in range(num_rounds + 1):
        order = [METHODS[(place + index) % len(METHODS)] for place in range(len(METHODS))]
        for method in order:
            own = train(method, strategy, data, index, hidden_size)
            of_ranks: list[Any] = [None] * NUM_RANKS
            dist.all_gather_object(of_ranks, own)
            if index:  # the first round warms up
                runs.append({"method": method, "round": index, "ranks": of_ranks})
        if dist.get_rank() == 0:
            print(f"{strategy}: round {index} of {num_rounds}", flush=True)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(runs))
    dist.destroy_process_group()


def launch(strategy: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both ranks of a strategy, and return every run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", "-m"]
        sizes = [options.steps, options.rounds, options.hidden_size]
        words += ["benchmarks.end_to_end", "--rank-of", strategy, "--steps", str(sizes[0]), "--rounds", str(sizes[1])]
        words += ["--hidden-size", str(sizes[2]), "--runs-file", str(out)]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        runs: list[dict[str, Any]] = json.loads(out.read_text())
        return runs


def figures_of(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds of what each batching did, and its ratios to others in the same round."""
    speeds: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    for run in runs:
        seconds = max(sum(rank["steps"]) for rank in run["ranks"])
        speeds[run["method"]][run["round"]] = run["ranks"][0]["real_tokens"] / seconds

    def ratio(method: str, other: str) -> list[float]:
        of_rounds = [speed / speeds[other][index] for index, speed in speeds[method].items()]
        return [float(value) for value in np.quantile(of_rounds, [0.5, 0, 1])]

    found = {}
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        steps = np.concatenate([np.max([rank["steps"] for rank in run["ranks"]], axis=0) for run in own])
        padded = sum(rank["padded_tokens"] for rank in own[0]["ranks"])
        waited = [max(rank["waited_s"] for rank in run["ranks"]) / len(run["ranks"][0]["steps"]) for run in own]
        found[method] = {
            "tokens_per_second": float(np.median(list(speeds[method].values()))),
            "step_p50_s": float(np.quantile(steps, 0.5)),
            "step_p90_s": float(np.quantile(steps, 0.9)),
            "waited_per_step_s": float(np.median(waited)),
            "pad_efficiency": own[0]["ranks"][0]["real_tokens"] / padded,
            **{f"over {other}": ratio(method, other) for other in (PLAIN, PEER, CEILING)},
        }
    return found


def peak_of(shapes: list[tuple[int, int]], hidden_size: int) -> float:
    """Live bytes at the peak of forward and backward of the largest micro-batches, in MiB; the model's own included."""
    torch.manual_seed(0)
    model = CausalLM(hidden_size=hidden_size)
    model.configure_model()
    largest = {
        tuple(shape)
        for key in (lambda shape: shape[0] * shape[1], lambda shape: shape[0] * shape[1] ** 2)
        for shape in sorted(shapes, key=key)[-NUM_LARGEST:]
    }
    peaks = []
    for shape in largest:
        model.zero_grad()
        tokens = torch.ones(shape, dtype=torch.long)
        batch = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
        with LiveBytes(model.parameters()) as live:
            model(batch).backward()
        peaks.append(live.peak)
    return max(peaks) / 2**20


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything."""
    figures: dict[str, Any] = {
        "num_steps": options.steps, "num_rounds": options.rounds, "samples_per_step": SAMPLES_PER_STEP,
        "hidden_size": options.hidden_size,
    }  # fmt: skip
    for strategy in options.strategies:
        runs = launch(strategy, options)
        figures[strategy] = figures_of(runs)
        for method in METHODS:
            shapes = [
                tuple(shape)
                for run in runs
                if run["method"] == method
                for rank in run["ranks"]
                for shape in rank["shapes"]
            ]
            figures[strategy][method]["peak_mib"] = peak_of(shapes, options.hidden_size)
    return figures


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--strategies", nargs="+", choices=["ddp", "FSDP2"], default=["ddp", "FSDP2"])
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    parser.add_argument("--rank-of", choices=["ddp", "FSDP2"], help=argparse.SUPPRESS)
    parser.add_argument("--runs-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, options.steps, options.rounds, options.hidden_size, options.runs_file)
        return
    figures = measure(options)
    for strategy in options.strategies:
        for method, values in figures[strategy].items():
            print(strategy, method, json.dumps(values))
    command = environment.command_line("end_to_end", out="DIR")
    print(environment.save("end_to_end", figures, command=command, folder=options.out))


if __name__ == "__main__":
    main()
