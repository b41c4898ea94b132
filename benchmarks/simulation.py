"""What share of the ideal is left on up to 4,096 ranks, who waits for whom, and what does planning take there?

    python -m benchmarks.simulation

No training: micro-batches of every rank are served, and each takes the time that a calibrated cost model gives it. The
planner knows that model, so without noise its plans are judged by the very times it planned with. Noise makes it
wrong: every rank has a speed of its own, and every micro-batch jitters. Ranks wait for each other in every slot
(``micro_batch``: FSDP, DDP under Lightning) or once a step (``step``: DDP by itself); ours is planned for the sync it
runs under. The time that all ranks are paid for is split into parts that sum to 1.

Lengths are lognormal, 8 samples x 4 slots per rank and step. Sizes of up to 64 ranks get 8 times as many steps.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import environment, peers
from benchmarks.inputs import Shape
from benchmarks.options import positive_int
from benchmarks.scale import lengths_of
from benchmarks.served import ServedEpoch
from benchmarks.timing import Timing, run_timed
from lightning_balance import CostModel, plan_epoch
from lightning_balance.cost import ROUNDING
from lightning_balance.epoch import EpochPlan
from lightning_balance.what_if.methods import base_budget
from lightning_balance.what_if.options import PlanOptions

SYNCS = ("micro_batch", "step")
LOOKAHEAD = 8
SEED = 0
PARTS = ("ideal", "padding", "fixed", "copies", "waiting_planned", "waiting_by_noise", "work_by_noise")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far real times are from the modelled ones.

    Attributes:
        speed: sigma of the lognormal speeds of ranks, each the same for the whole run; their mean is 1.
        jitter: sigma of the lognormal jitter of every micro-batch; its expectation is 1.
    """

    speed: float = 0.0
    jitter: float = 0.0

    def factors(self, num_slots: int, num_ranks: int, run: int) -> NDArray[np.float64]:
        """Return what every time is multiplied with, of shape ``(num_slots, num_ranks)``.

        Equal runs give equal draws, whatever is served: the speeds of all ranks, and the jitter of the n-th slot.

        >>> Noise().factors(2, 3, run=0).tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
        """
        speeds = np.exp(self.speed * np.random.default_rng([SEED, run, 0]).standard_normal(num_ranks))
        jitter = self.jitter * np.random.default_rng([SEED, run, 1]).standard_normal((num_slots, num_ranks))
        factors: NDArray[np.float64] = np.exp(jitter - self.jitter**2 / 2) * (speeds / speeds.mean())
        return factors


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """What the micro-batches of some steps cost without noise.

    Attributes:
        times: modelled time of each micro-batch, of shape ``(num_slots of all steps, num_ranks)``.
        num_slots_per_step: slots of each optimizer step.
        ideal: cost of the tokens of every sample by itself, without padding and without the fixed price.
        fixed: fixed price of all micro-batches with a sample that no other serves.
        copies: cost of samples that another micro-batch serves too; of fillers, everything.
    """

    times: NDArray[np.float64]
    num_slots_per_step: NDArray[np.int64]
    ideal: float
    fixed: float
    copies: float

    @property
    def padding(self) -> float:
        """Cost of padded tokens above that of the real ones: what is left of the work."""
        return float(self.times.sum()) - self.ideal - self.fixed - self.copies


def work_of(epoch: ServedEpoch, lengths: NDArray[np.int64], cost: CostModel) -> Work:
    """Return what an epoch costs. Of a sample served twice, the one in the larger micro-batch is the real one.

    >>> epoch = ServedEpoch.of([[0, 1], [1]], num_ranks=2, num_slots_per_step=[1])
    >>> work = work_of(epoch, np.array([4, 2]), CostModel(intercept=10.0, alpha=0.0))
    >>> work.ideal, work.padding, work.fixed, work.copies
    (6.0, 2.0, 10.0, 12.0)
    """
    tokens = CostModel(alpha=cost.alpha)
    counts = epoch.counts.ravel()
    served = lengths[epoch.samples]
    starts = np.cumsum(counts) - counts
    padded = epoch.padded_lengths(lengths)
    by_sample = np.lexsort((-np.repeat(counts, counts), epoch.samples))
    is_real = np.zeros(len(served), dtype=bool)
    is_real[by_sample] = np.diff(epoch.samples[by_sample], prepend=-1) != 0
    own = tokens.cost(1, served)
    times = cost.cost(counts, padded)
    is_filler = ~np.logical_or.reduceat(is_real, starts)
    copied = np.where(is_filler, times, np.add.reduceat(np.where(is_real, 0.0, own), starts))
    return Work(
        times=times.reshape(epoch.counts.shape),
        num_slots_per_step=epoch.num_slots_per_step,
        ideal=float(own[is_real].sum()),
        fixed=float(cost.intercept * np.count_nonzero(~is_filler)),
        copies=float(copied.sum()),
    )


def between_waits(times: NDArray[np.float64], num_slots_per_step: NDArray[np.int64], sync: str) -> NDArray[np.float64]:
    """Return how long each rank works from one synchronisation to the next, ``(num_synchronisations, num_ranks)``.

    >>> between_waits(np.array([[4.0, 2.0], [1.0, 3.0]]), np.array([2]), "step").tolist()
    [[5.0, 5.0]]
    """
    if sync == "micro_batch":
        return times
    sums: NDArray[np.float64] = np.add.reduceat(times, np.cumsum(num_slots_per_step) - num_slots_per_step, axis=0)
    return sums


def parts_of(work: Work, sync: str, factors: NDArray[np.float64] | None = None) -> dict[str, float]:
    """Return the parts of the time that all ranks are paid for, ``num_ranks`` times the elapsed time; they sum to 1.

    The first four are the work at its modelled times: ideal, padding, fixed price of micro-batches, copies. Planned
    waiting is what ranks would wait without noise. Noise adds the rest: the elapsed time with it minus that without, of
    which a little is work (heavy micro-batches may meet slow ranks more often than light ones), the rest waiting.

    >>> work = Work(times=np.array([[4.0, 2.0]]), num_slots_per_step=np.array([1]), ideal=6.0, fixed=0.0, copies=0.0)
    >>> parts = parts_of(work, "micro_batch")
    >>> parts["ideal"], parts["waiting_planned"]
    (0.75, 0.25)
    """
    noisy = work.times if factors is None else work.times * factors
    num_ranks = work.times.shape[1]
    paid, planned = (
        num_ranks * float(between_waits(times, work.num_slots_per_step, sync).max(axis=1).sum())
        for times in (noisy, work.times)
    )
    work_by_noise = float(noisy.sum() - work.times.sum())
    values = {
        "ideal": work.ideal,
        "padding": work.padding,
        "fixed": work.fixed,
        "copies": work.copies,
        "waiting_planned": planned - float(work.times.sum()),
        "waiting_by_noise": paid - planned - work_by_noise,
        "work_by_noise": work_by_noise,
    }
    return {name: value / paid for name, value in values.items()}


def who_waits(work: Work, sync: str, factors: NDArray[np.float64] | None = None) -> dict[str, float | int]:
    """Return who waits and who is waited for.

    Waiting is a share of the run. The slowest rank is the one that is so most often; ranks that are slowest together
    share that synchronisation among them, and in ``slowest_or_tied`` each of them counts it.

    >>> work = Work(times=np.array([[4.0, 2.0]]), num_slots_per_step=np.array([1]), ideal=6.0, fixed=0.0, copies=0.0)
    >>> who_waits(work, "step")
    {'mean_waited': 0.25, 'most_waited': 0.5, 'rank_that_waits_most': 1,
     'slowest_rank': 0, 'slowest_share': 1.0, 'slowest_or_tied': 1.0}
    """
    noisy = work.times if factors is None else work.times * factors
    own = between_waits(noisy, work.num_slots_per_step, sync)
    slowest = own.max(axis=1, keepdims=True)
    waited = (slowest - own).sum(axis=0) / slowest.sum()
    is_slowest = own >= slowest * (1 - ROUNDING)
    share = (is_slowest / is_slowest.sum(axis=1, keepdims=True)).mean(axis=0)
    return {
        "mean_waited": float(waited.mean()),
        "most_waited": float(waited.max()),
        "rank_that_waits_most": int(waited.argmax()),
        "slowest_rank": int(share.argmax()),
        "slowest_share": float(share.max()),
        "slowest_or_tied": float(is_slowest[:, share.argmax()].mean()),
    }


def heaviest_shares(work: Work) -> dict[str, float]:
    """Return how much of its step a rank spends in its heaviest micro-batch: mean and largest of ranks and steps.

    The jitter of that one is averaged out the least where ranks wait once a step.

    >>> work = Work(times=np.array([[3.0], [1.0]]), num_slots_per_step=np.array([2]), ideal=4.0, fixed=0.0, copies=0.0)
    >>> heaviest_shares(work)
    {'mean': 0.75, 'max': 0.75}
    """
    firsts = np.cumsum(work.num_slots_per_step) - work.num_slots_per_step
    shares = np.maximum.reduceat(work.times, firsts, axis=0) / np.add.reduceat(work.times, firsts, axis=0)
    return {"mean": float(shares.mean()), "max": float(shares.max())}


@dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """What a way of batching serves.

    Attributes:
        name: how tables call it.
        epoch: micro-batches of all ranks.
        planning: time that one rank needs to know the micro-batches of a step; None where there is nothing to plan.
        own_cost: the cost model that the method goes by, where it is another than the one it is judged by.
    """

    name: str
    epoch: ServedEpoch
    planning: Timing | None = None
    own_cost: CostModel | None = None


def peer_methods(lengths: NDArray[np.int64], shape: Shape, *, most_groups: int) -> Iterator[Method]:
    """Yield what other samplers serve, which know nothing of the cost model or of the sync."""
    ranks, slots = shape.num_ranks, shape.num_slots
    for name in (peers.PLAIN, peers.GROUPED):
        served = peers.SAMPLERS[name](lengths, **asdict(shape), seed=SEED)
        yield Method(name=name, epoch=peers.serve(served, ranks, slots))
    if ranks * slots <= most_groups:
        yield batch_rebalance(lengths, shape)


def batch_rebalance(lengths: NDArray[np.int64], shape: Shape) -> Method:
    """Return what transformers' ``BatchRebalanceSampler`` serves, every step planned once for all ranks.

    Every rank plans for all of them, so the time of one plan is what one rank needs.
    """
    ranks, slots = shape.num_ranks, shape.num_slots
    sampler = _KeepsItsPlan(lengths.tolist(), shape.samples_per_step, ranks, slots, seed=SEED, drop_last=False)
    mine = iter(sampler)
    micro_batches: list[list[int]] = []
    runs = []
    for _ in range(sampler.num_global_batches):
        _, seconds = run_timed(lambda: [next(mine) for _ in range(slots)])
        micro_batches += [sampler.plan[rank][slot] for slot in range(slots) for rank in range(ranks)]
        runs.append(seconds)
    return Method(
        name=peers.REBALANCED,
        epoch=peers.serve(micro_batches, ranks, slots),
        planning=Timing.of(runs),
        own_cost=CostModel(alpha=BatchRebalanceSampler.QUADRATIC_COST_COEF),
    )


class _KeepsItsPlan(BatchRebalanceSampler):
    """The sampler, which plans for all ranks and serves one: keeps the last plan, ``plan[rank][slot]``."""

    plan: list[list[list[int]]]

    def _assign(self, indices: list[int], lengths: list[int]) -> list[list[list[int]]]:
        self.plan = super()._assign(indices, lengths)  # type: ignore[no-untyped-call]
        return self.plan


def own_methods(lengths: NDArray[np.int64], shape: Shape, *, cost: CostModel, sync: str) -> Iterator[Method]:
    """Yield what the planner serves for a sync, with and without a budget, one step and 8 steps at a time."""
    budget = base_budget(lengths, PlanOptions(batch_size=shape.batch_size))
    for lookahead, ending in ((1, ""), (LOOKAHEAD, f", lookahead {LOOKAHEAD}")):
        for name, settings in (("rebalance", {"num_slots": shape.num_slots}), ("token budget", {"max_tokens": budget})):
            plan = plan_epoch(
                lengths,
                samples_per_step=shape.samples_per_step,
                num_ranks=shape.num_ranks,
                cost=cost,
                sync=sync,
                lookahead=lookahead,
                seed=SEED,
                **settings,  # type: ignore[arg-type]
            )
            yield _planned(name + ending, plan, lookahead)


def _planned(name: str, plan: EpochPlan, lookahead: int) -> Method:
    micro_batches: list[NDArray[np.int64]] = []
    slots, runs = [], []
    for index in range(plan.num_steps):
        step, seconds = run_timed(partial(plan.step, index))
        ranks = range(step.num_ranks)
        micro_batches += [step.micro_batch(rank, slot) for slot in range(step.num_slots) for rank in ranks]
        slots.append(step.num_slots)
        runs.append(seconds)
    epoch = ServedEpoch.of(micro_batches, plan.num_ranks, slots)
    return Method(name=name, epoch=epoch, planning=Timing.of(_per_step(runs, lookahead)))


def _per_step(runs: Sequence[tuple[float, float]], lookahead: int) -> list[tuple[float, float]]:
    """Return the mean of each window: the first step of a window plans all of it."""
    windows = [np.mean(runs[start : start + lookahead], axis=0) for start in range(0, len(runs), lookahead)]
    return [(float(processor), float(wall)) for processor, wall in windows]


def measure(
    shape: Shape, num_steps: int, *, cost: CostModel, noises: dict[str, Noise], num_runs: int, peer_groups: int
) -> list[dict[str, Any]]:
    """Return a row for every method under both syncs, on one number of ranks."""
    lengths = lengths_of(num_steps * shape.samples_per_step)
    gc.freeze()  # timing collects garbage: what was there before need not be looked at every time
    others = list(peer_methods(lengths, shape, most_groups=peer_groups))
    rows = [
        {"sync": sync, "num_ranks": shape.num_ranks, **row_of(method, lengths, cost, sync, noises, num_runs)}
        for sync in SYNCS
        for method in (*others, *own_methods(lengths, shape, cost=cost, sync=sync))
    ]
    gc.unfreeze()
    return rows


def row_of(
    method: Method, lengths: NDArray[np.int64], cost: CostModel, sync: str, noises: dict[str, Noise], num_runs: int
) -> dict[str, Any]:
    """Return the figures of what a method serves, without and with noise.

    Where the method goes by a cost of its own, also what it takes its micro-batches for.
    """
    work = work_of(method.epoch, lengths, cost)
    row: dict[str, Any] = {
        "method": method.name,
        "mean_slots_per_step": float(method.epoch.num_slots_per_step.mean()),
        "num_synchronisations": len(between_waits(work.times, work.num_slots_per_step, sync)),
        "heaviest_share": heaviest_shares(work),
        "planning": method.planning and method.planning.as_dict(),
        "without_noise": {**parts_of(work, sync), **who_waits(work, sync)},
        "with_noise": {name: _over_runs(work, sync, noise, num_runs) for name, noise in noises.items()},
    }
    if method.own_cost is not None:
        believed = work_of(method.epoch, lengths, method.own_cost)
        row["by_own_cost"] = {**parts_of(believed, sync), **who_waits(believed, sync)}
    return row


def _over_runs(work: Work, sync: str, noise: Noise, num_runs: int) -> dict[str, dict[str, float]]:
    """Return median and range over the runs of everything that noise changes."""
    runs = []
    for run in range(num_runs):
        factors = noise.factors(work.times.shape[0], work.times.shape[1], run)
        who = who_waits(work, sync, factors)
        shares = {name: who[name] for name in ("mean_waited", "most_waited", "slowest_share")}
        runs.append({**parts_of(work, sync, factors), **shares})
    return {
        name: {"median": float(np.median(values)), "min": min(values), "max": max(values)}
        for name, values in ((name, [run[name] for run in runs]) for name in runs[0])
    }


def calibrated(path: Path) -> tuple[CostModel, int]:
    """Return the cost model with the median coefficients of saved calibrations, and how many these are."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    intercept, alpha = (float(np.median([run[name] for run in runs])) for name in ("intercept", "alpha"))
    return CostModel(intercept=intercept, alpha=alpha), len(runs)


def steps_at(num_ranks: int, least: int) -> int:
    """Return the steps simulated on so many ranks: more where a step is small.

    >>> [steps_at(ranks, 8) for ranks in (8, 64, 512, 4096)]
    [64, 64, 8, 8]
    """
    return least * min(max(512 // num_ranks, 1), 8)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the share of the ideal over the number of ranks, a panel for each sync."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    sizes = sorted({row["num_ranks"] for row in rows})
    names = list(dict.fromkeys(row["method"] for row in rows))
    titles = {"micro_batch": "ranks wait in every slot", "step": "ranks wait once a step"}
    colours = ["silver", "tab:brown", "black", "tab:blue", "tab:orange", "tab:green", "tab:red"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    for panel, (sync, title) in zip(panels, titles.items(), strict=True):
        for name, colour in zip(names, colours, strict=False):
            chosen = [row for row in rows if row["sync"] == sync and row["method"] == name]
            ranks = [row["num_ranks"] for row in chosen]
            noisy = [row["with_noise"]["both"]["ideal"]["median"] for row in chosen]
            panel.plot(ranks, noisy, "-o", color=colour, markersize=4)
            panel.plot(ranks, [row["without_noise"]["ideal"] for row in chosen], "--", color=colour, linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.set(title=title, xlabel="ranks", ylim=(0, 1), yticks=np.arange(0, 1.01, 0.1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the ideal")
    handles = [Line2D([], [], color=colour, marker="o", markersize=4) for colour in colours[: len(names)]]
    handles += [Line2D([], [], color="grey"), Line2D([], [], color="grey", linestyle="--", linewidth=1)]
    figure.legend(handles, [*names, "with noise", "without noise"], loc="outside right center")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Simulate, save the figures and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--most-ranks", type=positive_int, default=4096, help="largest number of ranks, of 8, 64, 512, 4096"
    )
    parser.add_argument(
        "--peer-groups", type=positive_int, default=512, help="largest ranks x slots for BatchRebalanceSampler"
    )
    parser.add_argument(
        "--steps", type=positive_int, default=8, help="fewest optimizer steps, a multiple of the lookahead 8"
    )
    parser.add_argument("--noise-runs", type=positive_int, default=11, help="runs with noise")
    parser.add_argument("--speed-noise", type=float, default=0.02, help="sigma of the lognormal speeds of ranks")
    parser.add_argument("--jitter", type=float, default=0.05, help="sigma of the lognormal jitter of micro-batches")
    parser.add_argument(
        "--calibration", type=Path, default=environment.RESULTS / "calibration.json", help="JSON file of calibrations"
    )
    parser.add_argument("--out", type=Path, default=environment.RESULTS, help="folder of the JSON file and the picture")
    parser.add_argument("--redraw", action="store_true", help="only draw the picture again, from the JSON file")
    args = parser.parse_args()
    if args.redraw:
        draw(
            json.loads((args.out / "simulation.json").read_text(encoding="utf-8"))["rows"], args.out / "simulation.png"
        )
        return
    if args.steps < 1 or args.steps % LOOKAHEAD:
        parser.error(f"--steps must be a multiple of the lookahead {LOOKAHEAD}, got {args.steps}")
    if args.most_ranks < 8 or args.noise_runs < 1:
        parser.error("--most-ranks must be at least 8 and --noise-runs at least 1")
    cost, num_calibrations = calibrated(args.calibration)
    noises = {
        "both": Noise(speed=args.speed_noise, jitter=args.jitter),
        "speed": Noise(speed=args.speed_noise),
        "jitter": Noise(jitter=args.jitter),
    }
    shapes = [Shape(num_ranks=8**power) for power in range(1, 5) if 8**power <= args.most_ranks]
    rows = []
    for shape in tqdm(shapes, desc="ranks", disable=None):
        rows += measure(
            shape,
            steps_at(shape.num_ranks, args.steps),
            cost=cost,
            noises=noises,
            num_runs=args.noise_runs,
            peer_groups=args.peer_groups,
        )
    figures = {
        "cost": {"intercept": cost.intercept, "alpha": cost.alpha, "num_calibrations": num_calibrations},
        "noise": {"speed": args.speed_noise, "jitter": args.jitter, "num_runs": args.noise_runs},
        "sizes": [_size(shape, steps_at(shape.num_ranks, args.steps)) for shape in shapes],
        "rows": rows,
    }
    command = environment.command_line("simulation", out="DIR", calibration="FILE")
    print(environment.save("simulation", figures, command=command, folder=args.out).name)
    draw(rows, args.out / "simulation.png")


def _size(shape: Shape, num_steps: int) -> dict[str, int]:
    lengths = lengths_of(num_steps * shape.samples_per_step)
    max_tokens = base_budget(lengths, PlanOptions(batch_size=shape.batch_size))
    return {**asdict(shape), "num_steps": num_steps, "max_tokens": max_tokens}


if __name__ == "__main__":
    main()
