"""How far are the cuts from the best there are, and are they ever above those of the best published sampler?

    python -m benchmarks.optimality [--lengths DIR]

Three questions: against every way to form and place micro-batches (up to 9 samples), against an exact dynamic programme
(up to 256 samples, slots of neighbours), and against transformers' ``BatchRebalanceSampler`` on random batches.
Batches come from known distributions and, with ``--lengths``, from profiles of real data.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import environment
from benchmarks.inputs import DISTRIBUTIONS, draw, read_profiles, synthetic_profiles
from benchmarks.options import positive_int
from benchmarks.oracles import best_by_trying, best_of_slots
from lightning_balance import CostModel, plan_epoch, plan_step
from lightning_balance.cost import CostFunction
from lightning_balance.efficiency import modelled_time

ROUNDING = 1e-9
SYNCS = ("micro_batch", "step")


def _square_root(num_samples: Any, padded_length: Any) -> Any:
    """Return a cost with nothing linear in it, as a user's callable may be."""
    return np.sqrt(num_samples) * np.asarray(padded_length, dtype=np.float64) ** 1.5 + 3.0


COSTS: dict[str, CostFunction] = {
    "CostModel()": CostModel(),
    "CostModel(alpha=0)": CostModel(alpha=0.0),
    "CostModel(intercept=200, alpha=0.01)": CostModel(intercept=200.0, alpha=0.01),
    "sqrt(n) * L**1.5 + 3": _square_root,
}

Source = Callable[[np.random.Generator, int], NDArray[np.int64]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One batch to plan."""

    kind: str
    lengths: NDArray[np.int64]
    num_ranks: int
    num_slots: int


def sources(folder: Path | None) -> dict[str, Source]:
    """Return functions that draw a batch, by name: the distributions, then the profiles of a folder."""

    def of_kind(kind: str) -> Source:
        return lambda rng, count: draw(kind, rng, count)

    def of_profile(lengths: NDArray[np.int64]) -> Source:
        return lambda rng, count: rng.choice(lengths, count)

    found = {kind: of_kind(kind) for kind in DISTRIBUTIONS}
    if folder is not None:
        profiles = read_profiles(folder, max_length=32_768, max_samples=1_000_000)
        found |= {profile.name: of_profile(profile.lengths) for profile in profiles}
    return found


def default_cap(case: Case) -> int:
    """Return the cap that holds without ``max_tokens``: what a plain micro-batch could reach."""
    return -(-len(case.lengths) // (case.num_ranks * case.num_slots)) * int(case.lengths.max())


def against_trying(num_cases: int, named: dict[str, Source], seed: int = 1) -> dict[str, Any]:
    """Compare with every partition and assignment of up to 9 samples: both syncs, default cap, tight cap, no cap."""
    rng = np.random.default_rng(seed)
    groupings = [(ranks, slots) for ranks in range(1, 9) for slots in range(1, 9) if ranks * slots <= 8]
    rows = {(sync, cap): _Gaps() for sync in SYNCS for cap in ("default", "tight", "none")}
    wrong_errors = 0
    for _ in tqdm(range(num_cases), desc="every way", disable=None):
        ranks, slots = groupings[rng.integers(len(groupings))]
        source = named[str(rng.choice(list(named)))]
        case = Case(kind="", lengths=source(rng, int(rng.integers(1, 10))), num_ranks=ranks, num_slots=slots)
        cost = list(COSTS.values())[rng.integers(len(COSTS))]
        tight = int(case.lengths.max() * rng.uniform(0.5, 3))
        for cap_name, cap in (
            ("default", default_cap(case)),
            ("tight", tight),
            ("none", 10 * int(case.lengths.sum()) * 9),
        ):
            for sync in SYNCS:
                best = best_by_trying(case.lengths, num_ranks=ranks, num_slots=slots, cost=cost, cap=cap, sync=sync)
                ours = _time_of(case, cost, sync, None if cap_name == "default" else cap)
                if (ours is None) != (best == np.inf):
                    wrong_errors += 1
                elif ours is not None:
                    rows[sync, cap_name].add(ours / best - 1)
    return {
        "num_cases": num_cases,
        "num_wrong_errors": wrong_errors,
        "rows": [{"sync": sync, "cap": cap, **gaps.summary()} for (sync, cap), gaps in rows.items()],
    }


def against_programme(num_cases: int, named: dict[str, Source], seed: int = 2) -> dict[str, Any]:
    """Compare with an exact programme over slots of neighbours: up to 256 samples, ranks waiting in every slot."""
    rng = np.random.default_rng(seed)
    rows: dict[str, _Gaps] = {name: _Gaps() for name in ("all", *named, "default cap", "tight cap")}
    for index in tqdm(range(num_cases), desc="programme", disable=None):
        kind = list(named)[index % len(named)]
        case = _random_case(rng, kind, named[kind], most_ranks=16, most_samples=256)
        cost = list(COSTS.values())[rng.integers(len(COSTS))]
        cap_name, cap = "default cap", default_cap(case)
        if rng.random() < 0.5:
            cap_name, cap = "tight cap", int(cap * rng.uniform(0.3, 1))
        best = best_of_slots(case.lengths, num_ranks=case.num_ranks, num_slots=case.num_slots, cost=cost, cap=cap)
        if best == np.inf:
            continue
        ours = _time_of(case, cost, "micro_batch", cap)
        assert ours is not None
        for name in ("all", kind, cap_name):
            rows[name].add(ours / best - 1)
    return {"num_cases": num_cases, "rows": [{"batches": name, **gaps.summary()} for name, gaps in rows.items()]}


def on_the_input(num_steps: int) -> dict[str, Any]:
    """Compare with the programme on the steps that the planner's benchmark plans: 8 ranks x 4 slots x 8, lognormal."""
    lengths = next(profile.lengths for profile in synthetic_profiles() if profile.name == "lognormal_whole_steps")
    plan = plan_epoch(lengths, samples_per_step=256, num_ranks=8, num_slots=4)
    num_steps, gaps, times, bests, useful = min(num_steps, plan.num_steps), _Gaps(), 0.0, 0.0, 0.0
    cost, cap = CostModel(), 8 * int(lengths.max())  # an epoch's cap comes from its longest sample
    for index in tqdm(range(num_steps), desc="input", disable=None):
        step = plan.step(index)
        own = lengths[step.order]
        time, best = step.modelled_time(), best_of_slots(own, num_ranks=8, num_slots=4, cost=cost, cap=cap)
        gaps.add(time / best - 1)
        times, bests, useful = times + time, bests + best, useful + float(cost.cost(1, own).sum())
    return {
        "model_efficiency": useful / (8 * times),
        "model_efficiency_exact": useful / (8 * bests),
        **gaps.summary(),
    }


def against_peer(num_cases: int, named: dict[str, Source], most_groups: int = 512, seed: int = 3) -> dict[str, Any]:
    """Compare with ``BatchRebalanceSampler``: 1-64 ranks, 1-8 slots, 1-16 samples per micro-batch, its own cost."""
    rng = np.random.default_rng(seed)
    raised = "peer above the default cap, ours raised to its largest"
    names = ("all", "peer within the default cap", "peer above the default cap", raised, *named)
    rows = {(sync, name): _Gaps() for sync in SYNCS for name in names}
    seconds: dict[str, list[float]] = {"peer": [], **{sync: [] for sync in SYNCS}}
    worst: dict[str, dict[str, Any]] = {sync: {"ratio": 0.0} for sync in SYNCS}
    for index in tqdm(range(num_cases), desc="peer", disable=None):
        kind = list(named)[index % len(named)]
        case = _random_case(rng, kind, named[kind], most_ranks=64, most_samples=16 * most_groups)
        begin = process_time()
        costs, largest = _peer_costs(case)
        seconds["peer"].append(process_time() - begin)
        # A peer without a cap may win by a micro-batch that is larger than any plain one: counted on its own.
        capped = "peer above the default cap" if largest > default_cap(case) else "peer within the default cap"
        for sync in SYNCS:
            begin = process_time()
            ours = _time_of(case, CostModel(), sync, None)
            seconds[sync].append(process_time() - begin)
            assert ours is not None
            ratio = ours / modelled_time(costs, sync)  # type: ignore[arg-type]
            for name in ("all", capped, kind):
                rows[sync, name].add(ratio - 1)
            if largest > default_cap(case):
                freed = _time_of(case, CostModel(), sync, largest)
                assert freed is not None
                rows[sync, raised].add(freed / modelled_time(costs, sync) - 1)  # type: ignore[arg-type]
            if ratio > worst[sync]["ratio"]:
                worst[sync] = {
                    "ratio": ratio,
                    **_describe(case),
                    "peer_largest_per_default_cap": largest / default_cap(case),
                }
    return {
        "num_cases": num_cases,
        "worst": worst,
        "median_planning_s": {name: float(np.median(values)) for name, values in seconds.items()},
        "total_planning_s": {name: float(np.sum(values)) for name, values in seconds.items()},
        "rows": [{"sync": sync, "batches": name, **gaps.summary()} for (sync, name), gaps in rows.items()],
    }


class _Gaps:
    """Relative distances of the planner's time from another's; positive where the planner's is longer."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Add a distance."""
        self.values.append(value)

    def summary(self) -> dict[str, Any]:
        """Return counts and excesses, as shares."""
        if not self.values:
            return {"num_compared": 0}
        values = np.array(self.values)
        return {
            "num_compared": len(self.values),
            "num_above": int((values > ROUNDING).sum()),
            "num_below": int((values < -ROUNDING).sum()),
            "worst_excess": float(values.max()),
            "mean_excess": float(values.mean()),
            "median_excess": float(np.median(values)),
            "best_excess": float(values.min()),
        }


def _random_case(rng: np.random.Generator, kind: str, source: Source, *, most_ranks: int, most_samples: int) -> Case:
    while True:
        num_ranks, num_slots = round(float(np.exp(rng.uniform(0, np.log(most_ranks))))), int(rng.integers(1, 9))
        num_groups = num_ranks * num_slots
        num_samples = int(num_groups * rng.uniform(1, 16))
        if num_groups <= num_samples <= most_samples:
            return Case(kind=kind, lengths=source(rng, num_samples), num_ranks=num_ranks, num_slots=num_slots)


def _time_of(case: Case, cost: CostFunction, sync: str, max_tokens: int | None) -> float | None:
    """Return the planner's modelled time from the costs it reports, None where the cap does not hold the samples."""
    try:
        plan = plan_step(
            case.lengths,
            num_ranks=case.num_ranks,
            num_slots=case.num_slots,
            max_tokens=max_tokens,
            cost=cost,
            sync=sync,
        )
    except ValueError as error:
        if "does not hold" in str(error):
            return None
        raise
    return modelled_time(plan.costs, sync)  # type: ignore[arg-type]


def _peer_costs(case: Case) -> tuple[NDArray[np.float64], int]:
    """Return the costs of the peer's micro-batches, of shape ``(num_slots, num_ranks)``, and its largest in tokens."""
    count = len(case.lengths)
    sampler = BatchRebalanceSampler(case.lengths.tolist(), count, case.num_ranks, case.num_slots, shuffle=False)
    ranks: Sequence[Sequence[Sequence[int]]] = sampler._assign(list(range(count)), sampler.lengths)
    counts = np.array([[len(micro_batch) for micro_batch in rank] for rank in ranks]).T
    longest = np.array([[case.lengths[micro_batch].max() for micro_batch in rank] for rank in ranks]).T
    return np.asarray(CostModel().cost(counts, longest)), int((counts * longest).max())


def _describe(case: Case) -> dict[str, Any]:
    return {
        "batches": case.kind,
        "num_samples": len(case.lengths),
        "num_ranks": case.num_ranks,
        "num_slots": case.num_slots,
    }


def main() -> None:
    """Answer the three questions and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="folder of JSON files with a list 'lengths'")
    parser.add_argument("--trying-cases", type=positive_int, default=2000, help="batches of up to 9 samples")
    parser.add_argument("--programme-cases", type=positive_int, default=600, help="batches for the dynamic programme")
    parser.add_argument("--input-steps", type=positive_int, default=39, help="steps of the lognormal input")
    parser.add_argument("--peer-cases", type=positive_int, default=2000, help="batches beside the peer")
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    named = sources(args.lengths)
    figures = {
        "trying": against_trying(args.trying_cases, named),
        "programme": against_programme(args.programme_cases, named),
        "input": on_the_input(args.input_steps),
        "peer": against_peer(args.peer_cases, named),
    }
    command = environment.command_line("optimality", lengths="DIR", out="DIR")
    print(environment.save("optimality", figures, command=command, folder=args.out).name)


if __name__ == "__main__":
    main()
