"""The comparison: every figure against a slow count, sampled steps against all of them, budgets, time limit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest

from lightning_balance.epoch import EpochPlan, plan_epoch
from lightning_balance.unbalanced import length_grouped_order
from lightning_balance.what_if import Comparison, PlanOptions, compare
from lightning_balance.what_if.methods import Method, base_budget, budgets_to_try, methods_to_compare
from lightning_balance.what_if.options import SYNC_NAMES
from tests.test_report import batches_of_transformers, count_slowly, micro_batches_of_plan, micro_batches_of_torch
from tests.what_if.inputs import COST, LENGTHS, exact_comparison, run_options

RANDOMNESS = ("moved_share", "mean_step_distance", "length_correlation")


def steps_slowly(method: Method, options: PlanOptions):
    """Slots and ranks of every step with a method: lengths that run, and how many of them are real samples."""
    run = (options.batch_size, options.num_ranks, options.num_slots)
    order = np.random.default_rng([options.seed, options.epoch]).permutation(len(LENGTHS))
    if method.kind == "plain_shuffle":
        return micro_batches_of_torch(LENGTHS[order].tolist(), *run, drop_last=False)
    if method.kind == "length_grouped":
        grouped = length_grouped_order(LENGTHS, order, options.batch_size * options.num_slots).tolist()
        steps = batches_of_transformers(grouped, *run)
        return [[[(LENGTHS[samples].tolist(), real) for samples, real in slot] for slot in step] for step in steps]
    return micro_batches_of_plan(plan_slowly(method, options), LENGTHS)


def plan_slowly(method: Method, options: PlanOptions) -> EpochPlan:
    return plan_epoch(
        LENGTHS,
        samples_per_step=options.samples_per_step,
        num_ranks=options.num_ranks,
        num_slots=options.num_slots if method.kind == "rebalance" else None,
        max_tokens=method.max_tokens,
        lookahead=method.lookahead,
        cost=COST,
        sync=options.sync,
        seed=options.seed,
        epoch=options.epoch,
    )


def figures_slowly(method: Method, options: PlanOptions, places=slice(None)) -> dict[str, float]:
    steps = steps_slowly(method, options)
    chosen = steps[places] if isinstance(places, slice) else [steps[place] for place in places]
    figures = count_slowly(chosen, options.num_ranks, COST, options.sync)
    return {name: value for name, value in figures.items() if name not in RANDOMNESS}


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_every_figure_is_that_of_a_slow_count(sync) -> None:
    options = run_options(sync=sync)
    comparison = exact_comparison(sync)
    plain = figures_slowly(Method(kind="plain_shuffle"), options)
    assert comparison.is_exact
    assert comparison.num_steps == comparison.num_steps_planned == 13
    for outcome in comparison.outcomes:
        expected = figures_slowly(outcome.method, options)
        found = {name: value for name, value in dataclasses.asdict(outcome.summary).items() if name not in RANDOMNESS}
        assert found == pytest.approx(expected), outcome.method.name
        assert outcome.step_time == pytest.approx(expected["modelled_time"] / 13)
        assert outcome.speed_up == pytest.approx(plain["modelled_time"] / expected["modelled_time"])
        assert outcome.speed_up_error == 0
        assert outcome.micro_batches_per_step == pytest.approx(expected["num_micro_batches"] / 13)


def test_methods_stand_in_the_order_of_the_table() -> None:
    names = [outcome.method.name for outcome in exact_comparison().outcomes]
    assert names == [
        "plain shuffle",
        "length-grouped",
        "rebalance",
        "token budget 700",
        "token budget 2,048",
        "rebalance, lookahead 3",
        "token budget 2,048, lookahead 3",
    ]


def planned_steps(comparison: Comparison) -> list[int]:
    return comparison.rebalance.step_indices.tolist()


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_some_steps_have_the_figures_of_these_steps(sync) -> None:
    options = run_options(sync=sync)
    comparison = compare(LENGTHS, options, num_steps=5)
    steps = planned_steps(comparison)
    assert comparison.num_steps_planned == len(steps) == 6  # blocks of whole windows of 3
    assert all(steps[place] % 3 == place % 3 for place in range(6))
    plain_there = figures_slowly(Method(kind="plain_shuffle"), options, steps)
    plain = figures_slowly(Method(kind="plain_shuffle"), options)
    for outcome in comparison.outcomes:
        if not outcome.method.is_planned:
            assert outcome.is_exact
            assert outcome.summary.num_steps == 13
            continue
        expected = figures_slowly(outcome.method, options, steps)
        found = {name: value for name, value in dataclasses.asdict(outcome.summary).items() if name not in RANDOMNESS}
        assert not outcome.is_exact
        assert found == pytest.approx(expected), outcome.method.name
        ratio = expected["modelled_time"] / plain_there["modelled_time"]
        assert outcome.speed_up == pytest.approx(1 / ratio)
        assert outcome.step_time == pytest.approx(plain["modelled_time"] / 13 * ratio)


def test_with_and_without_all_steps_samples_move_equally_far() -> None:
    some, every = compare(LENGTHS, run_options(), num_steps=9), exact_comparison()
    assert some.num_steps_planned < every.num_steps_planned
    for part, whole in zip(some.outcomes, every.outcomes, strict=True):
        assert part.method == whole.method
        assert part.summary.moved_share == pytest.approx(whole.summary.moved_share, abs=0.1)
        assert part.summary.mean_step_distance == pytest.approx(whole.summary.mean_step_distance, abs=0.15)
        assert (part.summary.moved_share > 0) == (part.method.lookahead > 1 or part.method.kind == "length_grouped")


def test_the_error_of_a_speed_up_says_how_far_it_is_off() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1, 104 * 192), 16, 1024).astype(np.int64)
    deviations = []
    for seed in range(20):
        options = PlanOptions(num_ranks=32, batch_size=6, max_tokens=(8192,), lookahead=(1,), seed=seed)
        some, every = (compare(lengths, options, num_steps=num_steps).outcomes[2] for num_steps in (40, None))
        assert 0 < some.speed_up_error < 0.06
        deviations.append((some.speed_up / every.speed_up - 1) / some.speed_up_error)
    assert 0.6 < np.sqrt(np.mean(np.square(deviations))) < 1.5  # 1 on average, by the definition of a standard error
    assert abs(np.mean(deviations)) < 0.6


def test_one_block_of_steps_does_not_tell_the_error() -> None:
    outcome = compare(LENGTHS, run_options(), num_steps=1).outcomes[2]
    assert outcome.summary.num_steps == 3
    assert math.isnan(outcome.speed_up_error)


def test_equal_input_gives_equal_figures_and_another_seed_other_steps() -> None:
    first, again, other = (compare(LENGTHS, run_options(seed=seed), num_steps=6) for seed in (1, 1, 2))
    assert first.outcomes == again.outcomes
    assert planned_steps(first) == planned_steps(again)
    assert first.outcomes[0] != other.outcomes[0]


def test_a_time_limit_stops_after_a_block_and_what_was_planned_can_be_planned_again() -> None:
    lengths = np.tile(LENGTHS, 100)
    begin = time.perf_counter()
    limited = compare(lengths, run_options(), time_limit_s=0.5)
    assert time.perf_counter() - begin < 5
    assert 0 < limited.num_steps_planned < limited.num_steps
    again = compare(lengths, run_options(), num_steps=limited.num_steps_planned)
    assert again.outcomes == limited.outcomes


def test_one_block_is_planned_however_short_the_time() -> None:
    assert compare(LENGTHS, run_options(), time_limit_s=1e-9).num_steps_planned == 3


def test_progress_grows_from_block_to_block_to_the_end() -> None:
    seen: list[tuple[float, int]] = []
    compare(LENGTHS, run_options(), progress=lambda share, num_steps: seen.append((share, num_steps)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert sorted({num_steps for _, num_steps in seen}) == [
        0,
        3,
        6,
        9,
        12,
    ]  # while a block is planned it does not count


@pytest.mark.parametrize(
    ("lengths", "multiple", "budget"),
    [([5, 7] * 8, 1, 24), ([5, 7] * 8, 8, 24), ([1] * 15 + [100], 1, 100), ([1] * 15 + [100], 8, 104)],
)
def test_the_base_budget_is_a_mean_micro_batch_or_the_longest_sample(lengths, multiple, budget) -> None:
    options = PlanOptions(batch_size=4, pad_to_multiple_of=multiple)
    assert base_budget(np.array(lengths), options) == budget
    assert budget in budgets_to_try(np.array(lengths), options)


@pytest.mark.parametrize("batch_size", [1, 2, 8, 64, 1000])
@pytest.mark.parametrize("lengths", [[512] * 9, [1] * 99 + [4096], LENGTHS.tolist(), [1], [1, 2]], ids=len)
def test_the_sweep_reaches_from_the_longest_sample_to_a_batch_of_them(lengths, batch_size) -> None:
    budgets = budgets_to_try(np.array(lengths), PlanOptions(batch_size=batch_size))
    longest = max(lengths)
    assert 1 <= len(budgets) <= 6
    assert budgets == sorted(set(budgets))
    assert longest <= budgets[0] < 1.25 * longest or budgets[0] == base_budget(
        np.array(lengths), PlanOptions(batch_size=batch_size)
    )
    assert batch_size * longest / 1.25 < budgets[-1] <= batch_size * longest
    assert all(right / left > 1.2 for left, right in itertools.pairwise(budgets))


def test_budgets_and_lookaheads_are_taken_once_and_in_order() -> None:
    options = run_options(max_tokens=(4096, 700, 4096), lookahead=(8, 1, 2, 2))
    methods = methods_to_compare(LENGTHS, options)
    assert [method.max_tokens for method in methods if method.lookahead == 1][3:] == [700, 4096]
    assert [method.lookahead for method in methods if method.lookahead > 1] == [2, 2, 8, 8]


def test_without_lookahead_there_is_none() -> None:
    assert all(method.lookahead == 1 for method in methods_to_compare(LENGTHS, run_options(lookahead=(1,))))


def test_one_sample_is_an_epoch() -> None:
    comparison = compare(np.array([7]), run_options())
    assert [outcome.summary.num_samples for outcome in comparison.outcomes] == [1] * 7


def test_names_of_strategies_mean_when_their_ranks_wait() -> None:
    assert SYNC_NAMES["fsdp"] == SYNC_NAMES["ddp"] == SYNC_NAMES["micro_batch"] == "micro_batch"
    assert SYNC_NAMES["step"] == "step"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_ranks", 0),
        ("num_slots", 0),
        ("batch_size", -1),
        ("pad_to_multiple_of", 0),
        ("seed", -1),
        ("epoch", -1),
        ("max_tokens", (4096, 0)),
        ("lookahead", (0,)),
        ("sync", "fsdp"),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_name(name, value) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        PlanOptions(**{name: value})


def test_fewer_than_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps must be an integer >= 1, got 0"):
        compare(LENGTHS, run_options(), num_steps=0)
