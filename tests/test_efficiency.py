"""The formulas: a table of tiny cases, their bounds over random inputs, and what they say about no data."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from lightning_balance.efficiency import (
    cost_spread,
    length_correlation,
    mean_step_distance,
    model_efficiency,
    modelled_time,
    moved_share,
    pad_efficiency,
    slot_efficiency,
)

COST = st.just(0.0) | st.floats(1e-6, 1e6)  # a mean of subnormal numbers may underflow to 0
COSTS = arrays(np.float64, array_shapes(min_dims=1, max_dims=3, max_side=6), elements=COST)
STEP_COSTS = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=6), elements=COST)


@pytest.mark.parametrize(
    ("real", "padded", "expected"),
    [(3, 4, 0.75), ([3, 5], [4, 6], 0.8), (np.array([[8, 0]]), np.array([[8, 8]]), 0.5), (7, 7, 1.0), (0, 5, 0.0)],
)
def test_pad_efficiency_is_real_over_padded(real: npt.ArrayLike, padded: npt.ArrayLike, expected: float) -> None:
    assert pad_efficiency(real, padded) == expected


@pytest.mark.parametrize(("real", "padded"), [(0, 0), ([], [])])
def test_pad_efficiency_of_no_tokens_is_nan(real: npt.ArrayLike, padded: npt.ArrayLike) -> None:
    assert math.isnan(pad_efficiency(real, padded))


def test_pad_efficiency_counts_tokens_beyond_32_bits() -> None:
    assert pad_efficiency(np.full(4, 3 * 2**40), np.full(4, 2**42)) == 0.75


@pytest.mark.parametrize(
    ("costs", "spread", "slot"),
    [
        ([1.0], 0.0, 1.0),
        ([3.0, 1.0], 1.0, 2 / 3),
        ([[3.0, 1.0], [2.0, 2.0]], 0.5, 5 / 6),
        ([[0.0, 0.0], [4.0, 0.0]], 1.0, 0.75),
        ([[[3.0, 1.0]], [[1.0, 3.0]]], 1.0, 2 / 3),
        ([[1e308, 1e308, 0.0], [3e-308, 1e-308, 0.0]], 1.875, (2 / 3 + 4 / 9) / 2),
    ],
)
def test_spread_and_slot_efficiency_of_tiny_cases(costs: npt.ArrayLike, spread: float, slot: float) -> None:
    assert cost_spread(costs) == pytest.approx(spread)
    assert slot_efficiency(costs) == pytest.approx(slot)


@given(COSTS)
@settings(max_examples=200, deadline=None)
def test_spread_and_slot_efficiency_stay_in_their_bounds(costs: npt.NDArray[np.float64]) -> None:
    num_ranks = costs.shape[-1]
    assert 0 <= cost_spread(costs) <= num_ranks * (1 + 1e-9)
    assert (1 - 1e-9) / num_ranks <= slot_efficiency(costs) <= 1 + 1e-9


@given(COSTS)
@settings(max_examples=200, deadline=None)
def test_neither_the_order_of_ranks_nor_the_unit_matters(costs: npt.NDArray[np.float64]) -> None:
    for figure in (cost_spread, slot_efficiency):
        assert figure(costs[..., ::-1]) == pytest.approx(figure(costs))
        assert figure(costs * 4.0) == pytest.approx(figure(costs))


@pytest.mark.parametrize("figure", [cost_spread, slot_efficiency])
def test_no_synchronisation_gives_nan(figure: object) -> None:
    assert callable(figure)
    assert math.isnan(figure(np.empty((0, 4))))
    assert math.isnan(figure([]))


@given(STEP_COSTS)
@settings(max_examples=200, deadline=None)
def test_waiting_once_is_never_slower_than_waiting_in_every_slot(costs: npt.NDArray[np.float64]) -> None:
    once, always = modelled_time(costs, "step"), modelled_time(costs, "micro_batch")
    assert costs.sum(axis=0).mean() <= once * (1 + 1e-9) <= always * (1 + 1e-9) + 1e-300
    assert always == pytest.approx(sum(max(slot) for slot in costs))


def test_a_step_without_slots_takes_no_time() -> None:
    assert modelled_time(np.empty((0, 2))) == 0.0


def test_equal_ranks_without_padding_are_fully_efficient() -> None:
    assert model_efficiency(useful_cost=6.0, modelled_time=modelled_time([[3.0, 3.0]]), num_ranks=2) == 1.0
    assert math.isnan(model_efficiency(0.0, 0.0, num_ranks=2))


def test_model_efficiency_is_padding_times_waiting_for_a_linear_cost() -> None:
    real, padded = np.array([[6.0, 3.0], [5.0, 2.0]]), np.array([[8.0, 4.0], [5.0, 3.0]])
    time = modelled_time(padded)
    waiting = padded.sum() / (2 * time)
    assert model_efficiency(real.sum(), time, num_ranks=2) == pytest.approx(pad_efficiency(real, padded) * waiting)


def correlate_slowly(lengths: list[float], steps: list[int]) -> float:
    """Analysis of variance from its definition, one sample after the other."""
    members = [[length for length, own in zip(lengths, steps, strict=True) if own == step] for step in set(steps)]
    total, mean = len(lengths), sum(lengths) / len(lengths)
    between = within = squares = 0.0
    for group in members:
        own_mean = sum(group) / len(group)
        between += len(group) * (own_mean - mean) ** 2
        within += sum((length - own_mean) ** 2 for length in group)
        squares += len(group) ** 2
    between /= len(members) - 1
    within /= total - len(members)
    size = (total - squares / total) / (len(members) - 1)
    return (between - within) / (between + (size - 1) * within)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_randomness_is_what_a_slow_count_finds(samples: list[tuple[int, int, int]]) -> None:
    lengths, steps, plain = map(list, zip(*samples, strict=True))
    distances = [abs(own - other) for own, other in zip(steps, plain, strict=True)]
    assert moved_share(steps, plain) == pytest.approx(sum(map(bool, distances)) / len(distances))
    assert mean_step_distance(steps, plain) == pytest.approx(sum(distances) / len(distances))
    if 1 < len(set(steps)) < len(steps) and len(set(lengths)) > 1:
        assert length_correlation(lengths, steps) == pytest.approx(correlate_slowly(lengths, steps), abs=1e-9)
        assert length_correlation(lengths, steps) <= 1 + 1e-9
    else:
        assert math.isnan(length_correlation(lengths, steps))


def test_samples_that_stay_have_moved_nowhere() -> None:
    steps = np.random.default_rng(0).integers(0, 9, 100)
    assert (moved_share(steps, steps), mean_step_distance(steps, steps)) == (0.0, 0.0)


def test_steps_of_one_length_each_correlate_fully() -> None:
    steps = np.repeat(np.arange(5), [2, 3, 1, 7, 4])  # not in equal numbers
    assert length_correlation(np.array([7, 90, 7, 512, 33])[steps], steps) == 1.0
    assert length_correlation([1, 9, 1, 9], [0, 0, 1, 1]) == -1.0  # means that are equal by design, not by chance


def test_independent_shuffles_do_not_correlate() -> None:
    rng = np.random.default_rng(0)
    lengths, steps = rng.lognormal(5, 1, 20_000), np.arange(20_000) // 200
    found = [length_correlation(rng.permutation(lengths), steps) for _ in range(20)]
    assert abs(np.mean(found)) < 0.001
    assert max(map(abs, found)) < 0.005
    assert length_correlation(np.sort(lengths), steps) > 0.9  # the bounds tell sorted from shuffled


def test_randomness_of_no_samples_is_nan() -> None:
    for figure in (moved_share, mean_step_distance, length_correlation):
        assert math.isnan(figure([], [])), figure.__name__


def test_bad_input_names_the_argument_and_the_value() -> None:
    for figure in (moved_share, mean_step_distance, length_correlation):
        with pytest.raises(ValueError, match=r"steps must hold one step per sample, .* = \(3,\), got \(2,\)"):
            figure(*([[0, 1], [0, 1, 2]] if figure is not length_correlation else [[4, 5, 6], [0, 1]]))
    with pytest.raises(ValueError, match=r"costs must be at least 0, got -1"):
        cost_spread([1.0, -1.0])
    with pytest.raises(ValueError, match=r"ranks as its last axis, got the single number 3"):
        slot_efficiency(3)
    with pytest.raises(ValueError, match=r"shape \(num_slots, num_ranks\), got \(2,\)"):
        modelled_time([1.0, 2.0])
    with pytest.raises(ValueError, match=r"sync must be one of .* got 'never'"):
        modelled_time([[1.0]], "never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_ranks must be .* 1, got 0"):
        model_efficiency(1.0, 1.0, 0)
