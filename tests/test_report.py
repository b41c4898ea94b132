"""The report: against a slow count of every micro-batch, torch's own samplers, and published numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from lightning_balance.cost import CostModel
from lightning_balance.efficiency import length_correlation
from lightning_balance.epoch import EpochPlan, plan_epoch
from lightning_balance.report import (
    PlanSummary,
    comparison_rows,
    modelled_speed_up,
    summarize,
    summarize_micro_batches,
    summarize_plain,
)
from lightning_balance.shuffle import EpochOrder
from lightning_balance.unbalanced import length_grouped_batches, length_grouped_order

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1, 10_000), 16, 1024).astype(int)
SHORT = LENGTHS[:203]
COST = CostModel(intercept=50.0, alpha=0.002)

MicroBatches = list[list[tuple[list[int], int]]]
"""Per slot and rank: lengths that are run, and how many of them are real samples."""


def count_slowly(
    steps: list[MicroBatches],
    num_ranks: int,
    cost: Any,
    sync: str,
    multiple: int = 1,
    distances: Sequence[int] = (0,),
) -> dict[str, float]:
    """Every figure of a summary, from its definition, one micro-batch after the other."""
    modelled_time, spreads, efficiencies, useful = 0.0, [], [], 0.0
    real = padded = largest = samples = fillers = 0
    shapes = set()
    lengths_of_steps: list[list[int]] = []
    for step in steps:
        costs = []
        lengths_of_steps.append([length for slot in step for run, num_real in slot for length in run[:num_real]])
        for slot in step:
            costs.append([])
            for run, num_real in slot:
                length = math.ceil(max(run) / multiple) * multiple
                costs[-1].append(float(cost(len(run), length)))
                shapes.add((len(run), length))
                padded, largest = padded + len(run) * length, max(largest, len(run) * length)
                real, samples, fillers = real + sum(run[:num_real]), samples + num_real, fillers + (num_real == 0)
                useful += sum(float(cost(1, one)) for one in run[:num_real])
        for ranks in costs if sync == "micro_batch" else [np.sum(costs, axis=0)]:
            modelled_time += max(ranks)
            spreads.append((max(ranks) - min(ranks)) / np.mean(ranks))
            efficiencies.append(np.mean(ranks) / max(ranks))
    return {
        "num_ranks": num_ranks,
        "num_steps": len(steps),
        "num_micro_batches": sum(map(len, steps)),
        "num_samples": samples,
        "num_fillers": fillers,
        "num_shapes": len(shapes),
        "num_padded_lengths": len({length for _, length in shapes}),
        "real_tokens": real,
        "padded_tokens": padded,
        "largest_micro_batch": largest,
        "modelled_time": modelled_time,
        "pad_efficiency": real / padded,
        "cost_spread": float(np.mean(spreads)),
        "slot_efficiency": float(np.mean(efficiencies)),
        "model_efficiency": useful / (num_ranks * modelled_time),
        "fewest_samples_per_step": min(map(len, lengths_of_steps)),
        "most_samples_per_step": max(map(len, lengths_of_steps)),
        "moved_share": sum(distance > 0 for distance in distances) / len(distances),
        "mean_step_distance": sum(distances) / len(distances),
        "length_correlation": length_correlation(
            [length for own in lengths_of_steps for length in own],
            [step for step, own in enumerate(lengths_of_steps) for _ in own],
        ),
    }


def distances_slowly(plan: EpochPlan, order: list[int]) -> list[int]:
    """How many steps each sample is away from the slice of the order that a step of this size would be."""
    step_of, plain_step_of = {}, {}
    places = iter(order)
    for index in range(plan.num_steps):
        for sample in plan.step(index).order.tolist():
            step_of[sample] = index
            plain_step_of[next(places)] = index
    return [abs(step - plain_step_of[sample]) for sample, step in step_of.items()]


def micro_batches_of_plan(plan: EpochPlan, lengths: npt.NDArray[np.int64]) -> list[MicroBatches]:
    steps = [plan.step(index) for index in range(plan.num_steps)]
    return [
        [
            [
                (lengths[step.micro_batch(rank, slot)].tolist(), int(step.num_samples[slot, rank]))
                for rank in range(step.num_ranks)
            ]
            for slot in range(step.num_slots)
        ]
        for step in steps
    ]


def micro_batches_of_torch(
    lengths: list[int], batch_size: int, num_ranks: int, num_slots: int, drop_last: bool
) -> list[MicroBatches]:
    """What DistributedSampler and BatchSampler make of lengths that are already in shuffled order."""
    per_rank = []
    for rank in range(num_ranks):
        sampler = DistributedSampler(range(len(lengths)), num_ranks, rank, shuffle=False)  # type: ignore[arg-type]
        places = [(place, number * num_ranks + rank < len(lengths)) for number, place in enumerate(sampler)]
        per_rank.append(list(BatchSampler(places, batch_size, drop_last=drop_last)))  # type: ignore[arg-type]
    slots = [
        [([lengths[place] for place, _ in batch], sum(is_real for _, is_real in batch)) for batch in slot]
        for slot in zip(*per_rank, strict=True)
    ]
    return [slots[start : start + num_slots] for start in range(0, len(slots), num_slots)]


def assert_equal(summary: PlanSummary, expected: dict[str, float]) -> None:
    assert dataclasses.asdict(summary) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize(
    "options",
    [
        {"samples_per_step": 24, "num_ranks": 3, "num_slots": 2},
        {"samples_per_step": 64, "num_ranks": 2, "max_tokens": 2048, "pad_to_multiple_of": 16},
        {"num_ranks": 2, "num_slots": 2, "max_tokens": 1500, "lookahead": 4},
        {"samples_per_step": 12, "num_ranks": 2, "num_slots": 3, "lookahead": 5},
        {"samples_per_step": 100, "num_ranks": 4, "max_tokens": 600, "oversize": "skip", "drop_last": True},
        {"samples_per_step": 202, "num_ranks": 7},  # the second step has 1 sample, hence 6 fillers
    ],
    ids=str,
)
def test_a_plan_is_summarised_as_a_slow_count_does(options: dict[str, Any], sync: Any) -> None:
    plan = plan_epoch(SHORT, cost=COST, sync=sync, seed=3, **options)
    steps = micro_batches_of_plan(plan, SHORT)
    order = [sample for sample in np.random.default_rng([3, 0]).permutation(203).tolist() if sample not in plan.skipped]
    distances = distances_slowly(plan, order)
    expected = count_slowly(steps, plan.num_ranks, COST, sync, options.get("pad_to_multiple_of", 1), distances)
    summary = summarize(plan, SHORT, cost=COST, sync=sync)
    assert_equal(summary, expected)
    assert (summary.num_samples, summary.num_micro_batches) == (plan.num_samples, plan.num_micro_batches)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks_slots_batch", [(1, 1, 8), (3, 2, 8), (4, 3, 5), (7, 1, 200 // 7)], ids=str)
def test_plain_batches_are_those_of_torchs_samplers(
    ranks_slots_batch: tuple[int, int, int], drop_last: bool, sync: Any
) -> None:
    num_ranks, num_slots, batch_size = ranks_slots_batch
    # Where the ranks do not divide the samples torch's sampler repeats some and a full batch may hold copies.
    lengths = SHORT[: len(SHORT) - len(SHORT) % num_ranks] if drop_last else SHORT
    shuffled = lengths[np.random.default_rng([5, 2]).permutation(len(lengths))].tolist()
    steps = micro_batches_of_torch(shuffled, batch_size, num_ranks, num_slots, drop_last)
    summary = summarize_plain(
        lengths, batch_size=batch_size, num_ranks=num_ranks, num_slots=num_slots, cost=COST, sync=sync, seed=5, epoch=2,
        drop_last=drop_last,
    )  # fmt: skip
    assert_equal(summary, count_slowly(steps, num_ranks, COST, sync))


def test_fewer_samples_than_ranks_are_repeated() -> None:
    summary = summarize_plain([7], batch_size=2, num_ranks=4)
    assert (summary.num_samples, summary.padded_tokens, summary.real_tokens) == (1, 28, 7)


def test_any_cost_callable_is_taken() -> None:
    def cost(num_samples: Any, padded_length: Any) -> float:
        return float(num_samples * max(padded_length, 100))  # works on single numbers only

    shuffled = SHORT.tolist()
    expected = count_slowly(micro_batches_of_torch(shuffled, 8, 2, 1, False), 2, cost, "micro_batch")
    assert_equal(summarize_plain(SHORT, batch_size=8, num_ranks=2, cost=cost, shuffle=False), expected)


def test_the_published_figures_of_random_batches_come_out() -> None:
    plain = summarize_plain(LENGTHS, batch_size=8, num_ranks=8, num_slots=4)
    assert plain.pad_efficiency == pytest.approx(0.361, abs=0.01)
    assert plain.slot_efficiency == pytest.approx(0.559, abs=0.02)
    assert plain.model_efficiency == pytest.approx(0.168, abs=0.01)
    assert plain.largest_micro_batch == 8192


def test_a_balanced_plan_beats_plain_batches_in_every_figure() -> None:
    planned = summarize(plan_epoch(LENGTHS, samples_per_step=256, num_ranks=8, num_slots=4), LENGTHS)
    plain = summarize_plain(LENGTHS, batch_size=8, num_ranks=8, num_slots=4)
    for name in ("pad_efficiency", "slot_efficiency", "model_efficiency"):
        assert getattr(planned, name) > getattr(plain, name), name
    for name in ("cost_spread", "modelled_time", "padded_tokens"):
        assert getattr(planned, name) < getattr(plain, name), name
    assert planned.largest_micro_batch <= plain.largest_micro_batch
    assert modelled_speed_up(planned, plain) == pytest.approx(plain.modelled_time / planned.modelled_time)


def test_the_speed_up_counts_samples_that_were_left_out() -> None:
    plain = summarize_plain(SHORT, batch_size=8, num_ranks=2)
    half = dataclasses.replace(plain, num_samples=plain.num_samples // 2, modelled_time=plain.modelled_time / 4)
    assert modelled_speed_up(half, plain) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"samples_per_step": 20},
        {"samples_per_step": 20, "drop_last": True, "max_tokens": 900, "oversize": "skip"},
        {"max_tokens": 2048},
    ],
    ids=str,
)
def test_without_lookahead_no_sample_moves(options: dict[str, Any], shuffle: bool) -> None:
    plan = plan_epoch(SHORT, num_ranks=2, seed=4, epoch=1, shuffle=shuffle, **options)
    summary = summarize(plan, SHORT)
    assert (summary.moved_share, summary.mean_step_distance) == (0.0, 0.0)


def test_lookahead_moves_samples_inside_its_window_only() -> None:
    summaries = []
    for lookahead in (1, 2, 8):
        plan = plan_epoch(LENGTHS[:9984], samples_per_step=256, num_ranks=8, num_slots=4, lookahead=lookahead)
        summaries.append(summarize(plan, LENGTHS[:9984]))
    one, two, eight = summaries
    assert 0 == one.mean_step_distance < two.mean_step_distance < 1 < eight.mean_step_distance < 7
    assert 0 == one.moved_share < two.moved_share < eight.moved_share < 1
    assert abs(one.length_correlation) < 0.005 < two.length_correlation < eight.length_correlation < 0.2
    assert one.fewest_samples_per_step == one.most_samples_per_step == 256
    assert eight.fewest_samples_per_step < 256 < eight.most_samples_per_step


def test_plain_batches_are_as_random_as_a_plan_without_lookahead() -> None:
    plan = plan_epoch(SHORT, samples_per_step=48, num_ranks=3, num_slots=2, seed=7)
    planned = summarize(plan, SHORT)
    plain = summarize_plain(SHORT, batch_size=8, num_ranks=3, num_slots=2, seed=7)
    assert plain.length_correlation == pytest.approx(planned.length_correlation)
    for name in ("fewest_samples_per_step", "most_samples_per_step", "moved_share", "mean_step_distance"):
        assert getattr(plain, name) == getattr(planned, name), name


def test_the_rows_hold_both_sides() -> None:
    planned = summarize(plan_epoch(SHORT, samples_per_step=24, num_ranks=3), SHORT)
    plain = summarize_plain(SHORT, batch_size=8, num_ranks=3)
    rows = {row.label: row for row in comparison_rows(planned, plain)}
    assert rows["pad efficiency"].planned == planned.pad_efficiency
    assert rows["pad efficiency"].plain == plain.pad_efficiency
    assert rows["modelled speed-up"].planned == modelled_speed_up(planned, plain)
    assert rows["modelled speed-up"].plain == 1.0
    assert rows["most samples in a step"].planned == rows["most samples in a step"].plain == 24
    assert rows["correlation of lengths in a step"].planned == planned.length_correlation
    assert len(rows) == len(comparison_rows(planned, plain)) == 18
    assert comparison_rows(planned, plain, with_randomness=False) == comparison_rows(planned, plain)[:13]


def test_bad_input_is_refused_by_name() -> None:
    good: dict[str, Any] = {"batch_size": 8, "num_ranks": 2}
    for name in ("batch_size", "num_ranks", "num_slots", "pad_to_multiple_of"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            summarize_plain(SHORT, **{**good, name: 0})
    with pytest.raises(ValueError, match="sync must be one of"):
        summarize_plain(SHORT, sync="never", **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lengths\[1\] is 0"):
        summarize_plain([3, 0], **good)
    with pytest.raises(ValueError, match=r"drop_last=True leaves no full micro-batch: 3 samples .* num_ranks = 16"):
        summarize_plain([3, 1, 2], drop_last=True, **good)
    with pytest.raises(ValueError, match="sync must be one of"):
        summarize(plan_epoch(SHORT, samples_per_step=24, num_ranks=3), SHORT, sync="auto")  # type: ignore[arg-type]


def batches_of_transformers(order: list[int], batch_size: int, num_ranks: int, num_slots: int) -> list[Any]:
    """Steps, slots and ranks of (samples that run, how many are no copies): batches dealt to ranks in turn, made even.

    Equal to what ``accelerate.data_loader.BatchSamplerShard`` gives for the same batches.
    """
    even = -(-len(order) // (batch_size * num_ranks)) * batch_size * num_ranks
    places = [order[place % len(order)] for place in range(even)]
    batches = [
        (places[start : start + batch_size], min(max(len(order) - start, 0), batch_size))
        for start in range(0, even, batch_size)
    ]
    slots = [batches[start : start + num_ranks] for start in range(0, len(batches), num_ranks)]
    return [slots[start : start + num_slots] for start in range(0, len(slots), num_slots)]


@pytest.mark.parametrize("num_samples", [1, 3, 50, 203, 5000])
@pytest.mark.parametrize("batch_size", [1, 4, 24])
def test_the_length_grouped_order_is_that_of_transformers(num_samples: int, batch_size: int) -> None:
    lengths = LENGTHS[:num_samples]
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(7)).numpy()
    theirs = get_length_grouped_indices(lengths.tolist(), batch_size, generator=torch.Generator().manual_seed(7))
    assert length_grouped_order(lengths, order, batch_size).tolist() == theirs


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
@pytest.mark.parametrize("ranks_slots_batch", [(1, 1, 8), (3, 2, 8), (4, 3, 5), (7, 1, 200 // 7)], ids=str)
def test_length_grouped_batches_are_those_of_transformers_trainer(
    ranks_slots_batch: tuple[int, int, int], sync: Any
) -> None:
    num_ranks, num_slots, batch_size = ranks_slots_batch
    order = EpochOrder(len(SHORT), seed=5, epoch=2, shuffle=True)
    drawn = order.slice(0, len(SHORT))
    steps = batches_of_transformers(
        length_grouped_order(SHORT, drawn, batch_size * num_slots).tolist(), batch_size, num_ranks, num_slots
    )
    plain_step = {sample: place // (batch_size * num_ranks * num_slots) for place, sample in enumerate(drawn.tolist())}
    distances = [
        abs(plain_step[sample] - index)
        for index, step in enumerate(steps)
        for slot in step
        for samples, num_real in slot
        for sample in samples[:num_real]
    ]
    in_lengths = [[[(SHORT[samples].tolist(), real) for samples, real in slot] for slot in step] for step in steps]
    expected = count_slowly(in_lengths, num_ranks, COST, sync, distances=distances)
    epoch = length_grouped_batches(
        SHORT, order, batch_size=batch_size, num_ranks=num_ranks, num_slots=num_slots, cost=COST
    )
    assert_equal(summarize_micro_batches(epoch, cost=COST, sync=sync), expected)
    assert max(distances) > 0 or len(steps) < 3


def test_steps_can_be_taken_out_of_an_epoch() -> None:
    order = EpochOrder(len(SHORT), seed=5, epoch=2, shuffle=True)
    epoch = length_grouped_batches(SHORT, order, batch_size=8, num_ranks=3, num_slots=2, cost=COST)
    chosen = np.array([3, 0, 4])
    part = epoch.select(chosen)
    assert part.step_indices.tolist() == [3, 0, 4]
    for sync in ("micro_batch", "step"):
        assert part.step_times(sync).tolist() == epoch.step_times(sync)[chosen].tolist()
    ends = np.cumsum(epoch.samples_per_step)
    own = np.concatenate([np.arange(ends[step] - epoch.samples_per_step[step], ends[step]) for step in chosen])
    assert epoch.plain_steps is not None
    assert part.plain_steps is not None
    assert part.lengths.tolist() == epoch.lengths[own].tolist()
    assert part.plain_steps.tolist() == epoch.plain_steps[own].tolist()
    whole = epoch.select(np.arange(epoch.num_steps))
    assert summarize_micro_batches(whole, cost=COST) == summarize_micro_batches(epoch, cost=COST)
