"""The cost of a micro-batch, its inverse, and the checks of a user's own cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_balance.cost import CostModel, prepare_cost


def test_cost_is_the_formula():
    assert CostModel(intercept=7.0, alpha=0.5).cost(3, 4) == 7.0 + 3 * 4 + 0.5 * 3 * 16


def test_cost_broadcasts():
    cost = CostModel(alpha=0.1).cost(np.array([[1], [2]]), np.array([10, 20, 30]))
    assert cost.shape == (2, 3)
    np.testing.assert_allclose(cost[1], 2 * cost[0])


def test_a_model_can_be_called_like_a_callable():
    model = CostModel(intercept=3.0)
    assert model(2, 8) == model.cost(2, 8)


@pytest.mark.parametrize("field", ["intercept", "alpha"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_coefficients_that_are_negative_or_not_finite_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a finite number"):
        CostModel(**{field: value})


@pytest.mark.parametrize("value", [1e308, 10**400])
def test_coefficients_whose_sums_would_not_be_finite_are_refused(value):
    with pytest.raises(ValueError, match=r"intercept must be at most 1e\+100, got 1"):
        CostModel(intercept=value)


def test_coefficients_of_another_type_are_refused():
    with pytest.raises(TypeError, match="alpha must be a number"):
        CostModel(alpha="0.1")  # type: ignore[arg-type]


def test_fit_recovers_the_coefficients():
    rng = np.random.default_rng(0)
    true = CostModel(intercept=500.0, alpha=0.002)
    counts, lengths = rng.integers(1, 64, 50), rng.integers(16, 2048, 50)
    fitted = CostModel.fit(counts, lengths, true.cost(counts, lengths) * 3e-6)
    assert fitted.intercept == pytest.approx(500.0, rel=1e-6)
    assert fitted.alpha == pytest.approx(0.002, rel=1e-6)


def test_fit_never_gives_a_negative_coefficient():
    counts, lengths = np.array([1, 2, 4, 8, 16]), np.array([100, 200, 300, 400, 500])
    concave = np.sqrt(counts * lengths)
    fitted = CostModel.fit(counts, lengths, concave)
    assert fitted.intercept >= 0
    assert fitted.alpha >= 0


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([1.0, 2.0], "at least 3"),
        ([1.0, 2.0, -1.0, 1.0], r"seconds\[2\]"),
        ([1.0, math.nan, 1.0, 1.0], r"seconds\[1\]"),
    ],
)
def test_fit_says_what_is_wrong_with_measurements(seconds, message):
    sizes = np.arange(1, len(seconds) + 1)
    with pytest.raises(ValueError, match=message):
        CostModel.fit(sizes, sizes, seconds)


costs = st.builds(
    CostModel,
    intercept=st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    alpha=st.sampled_from([0.0, 1e-3, 0.3]),
)


@settings(max_examples=50, deadline=None)
@given(model=costs, length=st.integers(1, 100_000), count=st.integers(1, 500))
def test_the_inverse_gives_back_the_count_of_its_own_cost(model, length, count):
    prepared = prepare_cost(model, np.array([length]), max_count=1000)
    largest = prepared.largest_counts(np.array([model.cost(count, length)]), np.array([length]))
    assert largest.item() == count


def test_the_inverse_of_a_callable_is_that_of_the_model_it_computes():
    model = CostModel(intercept=40.0, alpha=0.01)
    lengths = np.array([50, 17, 17, 4])
    bounds = np.array([10.0, 60.0, 500.0, 4000.0])
    by_rows = prepare_cost(lambda n, length: model.cost(n, length), lengths, max_count=200)
    np.testing.assert_array_equal(
        by_rows.largest_counts(bounds, lengths), prepare_cost(model, lengths, 200).largest_counts(bounds, lengths)
    )


def test_a_callable_for_single_numbers_only_is_enough():
    prepared = prepare_cost(lambda n, length: math.sqrt(n) * max(length, 10), np.array([4, 20]), max_count=9)
    np.testing.assert_allclose(prepared(np.array([4, 9]), 20), [40.0, 60.0])


def test_a_cost_that_falls_with_the_count_is_refused_with_a_counter_example():
    with pytest.raises(ValueError, match=r"must not fall when num_samples grows.*cost\(1, 8\).*cost\(2, 8\)"):
        prepare_cost(lambda n, length: length / n, np.array([8]), max_count=4)


def test_a_cost_that_falls_with_the_length_is_refused_with_a_counter_example():
    with pytest.raises(ValueError, match=r"must not fall when padded_length grows.*cost\(1, 8\).*cost\(1, 9\)"):
        prepare_cost(lambda n, length: n / length, np.array([8, 9]), max_count=4)


def test_a_cost_that_falls_between_the_points_checked_first_is_refused_when_it_is_met():
    prepared = prepare_cost(lambda n, length: n * length - 50 * (n == 999), np.array([8]), max_count=1000)
    with pytest.raises(ValueError, match=r"cost\(998, 8\)"):
        prepared.row(8)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_negative_or_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="finite and not negative"):
        prepare_cost(lambda n, length: value + 0 * n * length, np.array([8]), max_count=4)


def test_a_cost_that_is_no_callable_is_refused():
    with pytest.raises(TypeError, match="cost must be callable"):
        prepare_cost(3.0, np.array([8]), max_count=4)  # type: ignore[arg-type]


def test_only_a_cost_with_an_intercept_has_a_price_per_micro_batch():
    assert prepare_cost(CostModel(), np.array([8]), 4).price_per_micro_batch(8) == 0
    assert prepare_cost(CostModel(intercept=5.0), np.array([8]), 4).price_per_micro_batch(8) == pytest.approx(5.0)
