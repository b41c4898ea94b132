"""What does ``lookahead`` buy, and what does it cost in randomness?

    python -m benchmarks.lookahead

The lognormal input of the planner's benchmark, 8 ranks x 4 slots x 8, with more and more steps that may exchange
samples. Randomness is measured: how many samples leave the step that the plain shuffle gives them, how far they move,
how alike the lengths inside a step are, and how much the size of steps varies.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import environment
from benchmarks.inputs import synthetic_profiles
from benchmarks.options import positive_int
from benchmarks.served import ServedEpoch, figures_of
from lightning_balance import plan_epoch
from lightning_balance.efficiency import length_correlation as intraclass_correlation
from lightning_balance.efficiency import mean_step_distance, moved_share

NUM_RANKS, NUM_SLOTS, BATCH_SIZE = 8, 4, 8


def measure(lengths: NDArray[np.int64], lookahead: int, num_epochs: int) -> dict[str, Any]:
    """Return what ``lookahead`` gains and how random its steps are, averaged over epochs."""
    epochs = [_measure_epoch(lengths, lookahead, epoch) for epoch in range(num_epochs)]
    return {
        "lookahead": lookahead,
        "num_epochs": num_epochs,
        **{name: float(np.mean([epoch[name] for epoch in epochs])) for name in epochs[0]},
    }


def _measure_epoch(lengths: NDArray[np.int64], lookahead: int, epoch: int) -> dict[str, float]:
    arguments = {"samples_per_step": NUM_RANKS * NUM_SLOTS * BATCH_SIZE, "num_ranks": NUM_RANKS, "num_slots": NUM_SLOTS}
    plan = plan_epoch(lengths, epoch=epoch, lookahead=lookahead, **arguments)
    plain = plan_epoch(lengths, epoch=epoch, **arguments)
    figures = figures_of(ServedEpoch.of_plan(plan), lengths, max_tokens=None)
    steps, plain_steps = (_step_of_samples(each, len(lengths)) for each in (plan, plain))
    counts = np.bincount(steps)
    return {
        "model_efficiency": figures.model_efficiency,
        "pad_efficiency": figures.pad_efficiency,
        "slot_efficiency": figures.slot_efficiency,
        "share_moved": moved_share(steps, plain_steps),
        "mean_distance_in_steps": mean_step_distance(steps, plain_steps),
        "length_correlation": intraclass_correlation(lengths, steps),
        "plain_length_correlation": intraclass_correlation(lengths, plain_steps),
        "least_samples_per_step": float(counts.min()),
        "most_samples_per_step": float(counts.max()),
        "std_of_samples_per_step": float(counts.std()),
    }


def _step_of_samples(plan: Any, num_samples: int) -> NDArray[np.int64]:
    steps = np.full(num_samples, -1)
    for index in range(plan.num_steps):
        steps[plan.step(index).order] = index
    assert (steps >= 0).all()
    return steps


def main() -> None:
    """Measure and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=positive_int, default=3, help="epochs that figures are averaged over")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    lengths = next(profile.lengths for profile in synthetic_profiles() if profile.name == "lognormal_whole_steps")
    rows = [
        measure(lengths, lookahead, args.epochs) for lookahead in tqdm((1, 2, 4, 8, 16), desc="lookahead", disable=None)
    ]
    command = environment.command_line("lookahead", out="DIR")
    print(environment.save("lookahead", {"rows": rows}, command=command, folder=args.out).name)


if __name__ == "__main__":
    main()
