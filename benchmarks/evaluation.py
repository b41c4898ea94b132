"""How much faster is predict with a token budget than with plain batches of the same peak memory?

Both run the demo's model over the functions of the standard library, in turn, in one process: plain batches in the data
set's order, and micro-batches cut over the whole set under a budget that is the largest plain batch. A run's time is
that of ``trainer.predict`` as a whole, planning and putting results in order included. The predictions are compared,
too: the likeliest next token at every real position.

    OMP_NUM_THREADS=1 python -m benchmarks.evaluation     # about 3 minutes; writes results/evaluation.json
"""

from __future__ import annotations

import argparse
import logging
import warnings
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.environment import command_line, save
from benchmarks.options import positive_int
from benchmarks.training import Job, median_and_range
from lightning_balance import BalanceCallback
from lightning_balance.demo import CausalLM, FunctionsDataModule
from lightning_balance.evaluation.plan import plan_evaluation


def predict(model: CausalLM, loader: DataLoader[Any], max_tokens: int | None) -> tuple[float, list[Any]]:
    """Predict all samples; returns the seconds it took, and what came back."""
    balance = [] if max_tokens is None else [BalanceCallback(stages=["predict"], eval_max_tokens=max_tokens)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Job(num_ranks=1).trainer("auto", balance)
        started = perf_counter()
        predictions = trainer.predict(model, loader)
    assert predictions is not None
    return perf_counter() - started, predictions


def share_alike(plain: list[Tensor], balanced: list[Tensor], lengths: np.ndarray[Any, Any]) -> float:
    """Share of the real positions at which both runs predict the same token; plain outputs come by batch."""
    rows = [row for batch in plain for row in batch]
    alike = [
        int((row[:length] == other[:length]).sum())
        for row, other, length in zip(rows, balanced, lengths.tolist(), strict=True)
    ]
    return sum(alike) / int(lengths.sum())


def measure(*, num_functions: int, batch_size: int, hidden_size: int, num_rounds: int) -> dict[str, Any]:
    """Return the figures of both runs."""
    data = FunctionsDataModule(num_functions=num_functions, batch_size=batch_size)
    data.prepare_data()
    data.setup("fit")
    train = data.train_dataloader()
    loader = DataLoader(train.dataset, batch_size=batch_size, collate_fn=train.collate_fn)
    lengths = np.asarray(train.dataset.lengths)  # type: ignore[attr-defined]
    starts = np.arange(0, len(lengths), batch_size)
    plain_batches = np.diff(starts, append=len(lengths)) * np.maximum.reduceat(lengths, starts)
    max_tokens = int(plain_batches.max())
    plan = plan_evaluation(lengths, num_ranks=1, max_tokens=max_tokens)
    torch.manual_seed(0)
    model = CausalLM(hidden_size=hidden_size)
    seconds: dict[str, list[float]] = {"plain": [], "budget": []}
    predictions: dict[str, list[Any]] = {}
    for index in range(num_rounds + 1):
        for run in ("plain", "budget") if index % 2 else ("budget", "plain"):  # neither is always the first
            taken, predictions[run] = predict(model, loader, max_tokens if run == "budget" else None)
            if index:  # the first round warms up
                seconds[run].append(taken)
    real = int(lengths.sum())
    ratios = [plain / budget for plain, budget in zip(seconds["plain"], seconds["budget"], strict=True)]
    return {
        "num_samples": len(lengths),
        "num_rounds": num_rounds,
        "batch_size": batch_size,
        "largest_micro_batch": {"plain": max_tokens, "budget": int(plan.padded_tokens.max())},
        "num_micro_batches": {"plain": len(starts), "budget": plan.num_slots},
        "pad_efficiency": {
            "plain": real / int(plain_batches.sum()),
            "budget": real / int(plan.padded_tokens.sum()),
        },
        "tokens_per_second": {run: real / float(np.median(times)) for run, times in seconds.items()},
        "speed_up": median_and_range(ratios),
        "predictions_alike": share_alike(predictions["plain"], predictions["budget"], lengths),
    }


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--functions", type=positive_int, default=1000)
    parser.add_argument("--batch-size", type=positive_int, default=8)
    parser.add_argument("--hidden-size", type=positive_int, default=64)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    figures = measure(
        num_functions=options.functions,
        batch_size=options.batch_size,
        hidden_size=options.hidden_size,
        num_rounds=options.rounds,
    )
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(save("evaluation", figures, command=command_line("evaluation")))


if __name__ == "__main__":
    main()
