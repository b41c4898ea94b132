"""How good and how fast are the cuts, beside other samplers on the same lengths?

    python -m benchmarks.planner [--lengths DIR]

Inputs: a lognormal list of 10,000 lengths, controls where there is next to nothing to gain, and every profile in DIR
(JSON files with a list ``"lengths"``). Steps of 8 ranks x 4 slots x 8 samples, or a token budget of 8 times the longest
length. Times are what one rank needs to know its micro-batches of an epoch: all samplers in turn, again and again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import environment, peers
from benchmarks.inputs import Profile, Shape, read_profiles, synthetic_profiles
from benchmarks.options import positive_int
from benchmarks.served import ServedEpoch, figures_of
from benchmarks.timing import alternate
from lightning_balance import plan_epoch
from lightning_balance.epoch import EpochPlan

SEED = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """A sampler of the table.

    Attributes:
        name: how the table calls it.
        group: ``"samples"``: so many samples per step; ``"budget"``: a cap on padded tokens.
        serve: returns the epoch of all ranks.
        one_rank: what one rank runs for its own part; timed.
        max_tokens: the budget it was given.
    """

    name: str
    group: str
    serve: Callable[[], ServedEpoch]
    one_rank: Callable[[], Any]
    max_tokens: int | None = None


def entries(lengths: NDArray[np.int64], shape: Shape) -> list[Entry]:
    """Return all samplers for some lengths."""
    max_tokens = shape.batch_size * int(lengths.max())
    return [
        *_fixed_peers(lengths, shape),
        *_budget_peers(lengths, shape, max_tokens),
        *_ours(lengths, shape, max_tokens),
    ]


def _fixed_peers(lengths: NDArray[np.int64], shape: Shape) -> list[Entry]:
    ranks, slots, batch = shape.num_ranks, shape.num_slots, shape.batch_size
    listed = lengths.tolist()

    def entry(name: str, function: Callable[..., list[Any]]) -> Entry:
        def run() -> list[Any]:
            return function(lengths, num_ranks=ranks, num_slots=slots, batch_size=batch, seed=SEED)

        return Entry(name=name, group="samples", serve=lambda: peers.serve(run(), ranks, slots), one_rank=run)

    def rebalance(rank: int) -> list[list[int]]:
        return peers.batch_rebalance_for_one_rank(
            listed, num_ranks=ranks, num_slots=slots, batch_size=batch, seed=SEED, rank=rank
        )

    return [
        entry("random", peers.random_batches),
        entry("transformers LengthGroupedSampler", peers.length_grouped),
        Entry(
            name="transformers BatchRebalanceSampler",
            group="samples",
            serve=lambda: peers.serve(peers.batch_rebalance(lengths, **asdict(shape), seed=SEED), ranks, slots),
            one_rank=lambda: rebalance(0),
        ),
    ]


def _budget_peers(lengths: NDArray[np.int64], shape: Shape, max_tokens: int) -> list[Entry]:
    ranks = shape.num_ranks

    def entry(name: str, run: Callable[[], tuple[list[Any], list[int]]]) -> Entry:
        def serve() -> ServedEpoch:
            micro_batches, slots = run()
            return ServedEpoch.of(micro_batches, ranks, slots)

        return Entry(name=name, group="budget", serve=serve, one_rank=run, max_tokens=max_tokens)

    def per_step() -> tuple[list[Any], list[int]]:
        return peers.greedy_per_step(
            lengths, num_ranks=ranks, samples_per_step=shape.samples_per_step, max_tokens=max_tokens, seed=SEED
        )

    def shuffled() -> tuple[list[Any], list[int]]:
        return peers.greedy_shuffled(
            lengths, num_ranks=ranks, num_slots=shape.num_slots, max_tokens=max_tokens, seed=SEED
        )

    found = [entry("greedy fill of each step", per_step), entry("greedy fill of everything, shuffled", shuffled)]
    if peers.has_lhotse():
        cuts = peers.lhotse_cuts(lengths)

        def one_rank(rank: int) -> list[list[int]]:
            return peers.lhotse_for_one_rank(cuts, num_ranks=ranks, max_tokens=max_tokens, seed=SEED, rank=rank)

        found.append(
            Entry(
                name="lhotse DynamicBucketingSampler",
                group="budget",
                serve=lambda: peers.serve(peers.all_ranks(one_rank, ranks), ranks, shape.num_slots),
                one_rank=lambda: one_rank(0),
                max_tokens=max_tokens,
            )
        )
    return found


def _ours(lengths: NDArray[np.int64], shape: Shape, max_tokens: int) -> list[Entry]:
    fixed = {"samples_per_step": shape.samples_per_step, "num_slots": shape.num_slots}
    tokens = {"max_tokens": max_tokens, "num_slots": shape.num_slots, "step_unit": "tokens"}
    settings: list[tuple[str, str, dict[str, Any]]] = [
        ("ours", "samples", fixed),
        ("ours, sync=step", "samples", {**fixed, "sync": "step"}),
        ("ours, lookahead 8", "samples", {**fixed, "lookahead": 8}),
        (
            "ours, same samples per step",
            "budget",
            {"samples_per_step": shape.samples_per_step, "max_tokens": max_tokens},
        ),
        ("ours, step_unit=tokens", "budget", tokens),
        ("ours, step_unit=tokens, lookahead 8", "budget", {**tokens, "lookahead": 8}),
    ]

    def entry(name: str, group: str, arguments: dict[str, Any]) -> Entry:
        def make() -> EpochPlan:
            return plan_epoch(lengths, num_ranks=shape.num_ranks, seed=SEED, **arguments)

        return Entry(
            name=name,
            group=group,
            serve=lambda: ServedEpoch.of_plan(make()),
            one_rank=lambda: micro_batches_of_rank(make(), rank=0),
            max_tokens=max_tokens if group == "budget" else None,
        )

    return [entry(*setting) for setting in settings]


def micro_batches_of_rank(plan: EpochPlan, rank: int) -> list[NDArray[np.int64]]:
    """Return the micro-batches of one rank: plans every step."""
    micro_batches = []
    for index in range(plan.num_steps):
        step = plan.step(index)
        micro_batches += [step.micro_batch(rank, slot) for slot in range(step.num_slots)]
    return micro_batches


def measure(profile: Profile, shape: Shape, num_runs: int) -> dict[str, Any]:
    """Return the figures of every sampler on a profile."""
    lengths = profile.lengths
    candidates = entries(lengths, shape)
    times = alternate({entry.name: entry.one_rank for entry in candidates}, num_runs)
    rows = [
        {
            "sampler": entry.name,
            "group": entry.group,
            **figures_of(entry.serve(), lengths, max_tokens=entry.max_tokens).as_dict(),
            "planning": times[entry.name].as_dict(),
        }
        for entry in candidates
    ]
    return {
        "profile": profile.name,
        "source": profile.source,
        "is_control": profile.is_control,
        "num_samples": len(lengths),
        "mean_length": float(lengths.mean()),
        "longest": int(lengths.max()),
        "max_tokens": shape.batch_size * int(lengths.max()),
        "rows": rows,
    }


def main() -> None:
    """Measure every profile and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="folder of JSON files with a list 'lengths'")
    parser.add_argument(
        "--max-length", type=positive_int, default=32_768, help="lengths of profiles are clipped at most to this"
    )
    parser.add_argument("--max-samples", type=positive_int, default=10_000, help="samples taken from a profile at most")
    parser.add_argument("--runs", type=positive_int, default=5, help="timed runs of each sampler")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    profiles = synthetic_profiles()
    if args.lengths is not None:
        profiles += read_profiles(args.lengths, max_length=args.max_length, max_samples=args.max_samples)
    shape = Shape()
    results = [measure(profile, shape, args.runs) for profile in tqdm(profiles, desc="profiles", disable=None)]
    figures = {
        "shape": {"num_ranks": shape.num_ranks, "num_slots": shape.num_slots, "batch_size": shape.batch_size},
        "profiles": results,
    }
    command = environment.command_line("planner", lengths="DIR", out="DIR")
    print(environment.save("planner", figures, command=command, folder=args.out).name)


if __name__ == "__main__":
    main()
