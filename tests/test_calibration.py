"""Calibration without a machine: where to measure, what fits, how good it is, what the file says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_balance import BalanceCallback, CostModel
from lightning_balance.calibration.file import read_cost_file, write_cost_file
from lightning_balance.calibration.fit import fit_cost
from lightning_balance.calibration.grid import GridPoint, choose_grid
from lightning_balance.calibration.search import RESOLUTION, find_largest
from lightning_balance.settings import BalanceSettings

TRUE = CostModel(intercept=300.0, alpha=0.002)
LENGTHS = np.random.default_rng(0).lognormal(4.5, 1.0, 2000).clip(4, 1024).astype(np.int64)


def measured(points, scale=1e-5, num_repeats=5, noise=0.0, seed=0):
    """Seconds of a machine whose cost is TRUE."""
    rng = np.random.default_rng(seed)
    exact = np.array([TRUE.cost(point.num_samples, point.padded_length) for point in points]) * scale
    return exact[:, None] * np.exp(rng.normal(0, noise, (len(points), num_repeats)))


# ---------------------------------------------------------------------- the grid


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=4, max_size=200).map(np.array),
    max_tokens=st.integers(1, 20_000),
)
def test_every_point_is_within_the_cap_and_can_be_made_of_the_data(lengths, max_tokens):
    try:
        points = choose_grid(lengths, max_tokens=max_tokens)
    except ValueError as error:
        assert "at least 3 sizes" in str(error)  # noqa: PT017 - either a grid or this sentence
        return
    assert len(points) == len(set(points)) >= 3
    for point in points:
        assert point.tokens <= max_tokens
        assert point.num_samples <= len(lengths)
        assert point.num_samples & (point.num_samples - 1) == 0
        assert point.padded_length in lengths


def test_the_grid_has_the_shortest_and_the_longest_sample_alone_and_the_largest_micro_batch():
    points = choose_grid(LENGTHS, max_tokens=8192)
    assert GridPoint(1, LENGTHS.min()) in points
    assert GridPoint(1, LENGTHS.max()) in points
    assert max(point.tokens for point in points) > 8192 / 2
    assert len(points) <= 24


def test_too_small_a_cap_is_named():
    with pytest.raises(ValueError, match=r"max_tokens=3 and 2000 samples of up to \d+ padded tokens allow 0"):
        choose_grid(LENGTHS, max_tokens=3)


# ---------------------------------------------------------------------- the fit


def test_a_fit_recovers_the_machine():
    points = choose_grid(LENGTHS, max_tokens=8192)
    fit = fit_cost(points, measured(points, noise=0.03))
    assert fit.model.intercept == pytest.approx(TRUE.intercept, rel=0.1)
    assert fit.model.alpha == pytest.approx(TRUE.alpha, rel=0.1)
    assert fit.seconds_per_token == pytest.approx(1e-5, rel=0.05)
    assert fit.median_error < 0.03
    assert fit.r_squared > 0.99
    assert fit.warning() is None


def test_a_slow_moment_in_one_repeat_changes_nothing():
    points = choose_grid(LENGTHS, max_tokens=8192)
    times = measured(points)
    times[:, 0] *= 50
    assert fit_cost(points, times).worst_error < 1e-6


def test_a_few_points_that_are_slow_in_every_repeat_hardly_move_the_fit():
    points = choose_grid(LENGTHS, max_tokens=8192)
    times = measured(points, noise=0.01)
    times[[3, 11]] *= 4
    robust = fit_cost(points, times)
    assert robust.model.alpha == pytest.approx(TRUE.alpha, rel=0.15)
    assert robust.model.intercept == pytest.approx(TRUE.intercept, rel=0.15)
    assert sorted(np.abs(robust.errors).argsort()[-2:]) == [3, 11]


def test_coefficients_are_never_negative():
    points = choose_grid(LENGTHS, max_tokens=8192)
    concave = [[(point.tokens**0.5) * 1e-4] * 3 for point in points]
    fit = fit_cost(points, concave)
    assert min(fit.model.intercept, fit.model.alpha) >= 0
    assert fit.seconds_per_token > 0


def test_a_machine_of_another_form_is_a_warning_with_the_worst_point():
    points = choose_grid(LENGTHS, max_tokens=8192)
    steps = [[1e-3 if point.padded_length < 200 else 1.0] * 3 for point in points]
    fit = fit_cost(points, steps)
    worst = points[int(np.abs(fit.errors).argmax())]
    assert f"at n={worst.num_samples}, L={worst.padded_length}" in fit.warning()
    assert "a function of your own" in fit.warning()


def test_a_busy_machine_is_told_from_a_wrong_form():
    points = choose_grid(LENGTHS, max_tokens=8192)
    fit = fit_cost(points, measured(points, noise=0.6, num_repeats=3))
    assert "repeats of one point differ" in fit.warning()


def test_repeats_of_another_number_of_points_are_refused():
    with pytest.raises(ValueError, match=r"one row per point \(1\), got shape \(2, 1\)"):
        fit_cost([GridPoint(1, 1)], [[1.0], [2.0]])


# ---------------------------------------------------------------------- the file


def written(folder):
    points = choose_grid(LENGTHS, max_tokens=8192)
    fit = fit_cost(points, measured(points, noise=0.03))
    write_cost_file(folder / "cost.yaml", fit, {"device": "cpu", "num_ranks": 2})
    return fit, folder / "cost.yaml"


def test_the_file_gives_back_the_model_exactly(tmp_path):
    fit, path = written(tmp_path)
    assert read_cost_file(path) == fit.model
    assert BalanceSettings(cost=str(path)).cost == fit.model
    assert BalanceCallback(cost=str(path)).settings.cost == fit.model


def test_the_same_measurements_give_the_same_file(tmp_path):
    text = written(tmp_path)[1].read_text()
    assert written(tmp_path)[1].read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["cost.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no file"),
        ("intercept: 1", "must hold intercept and alpha"),
        ("[1, 2]", "must hold intercept and alpha"),
        ("a: b: c", "is not a YAML file"),
        (b"\xff\xfe\x00", "is not a YAML file"),
        ("[" * 5000, "is not a YAML file"),
        ("intercept: " + "9" * 5000 + "\nalpha: 0", "is not a YAML file"),
        ("intercept: " + "9" * 400 + "\nalpha: 0", "intercept must be at most 1e\\+100"),
        ("intercept: 1\nalpha: much", "alpha must be a number"),
        ("intercept: -1\nalpha: 0", "intercept must be a finite number of at least 0"),
        ("version: 9\nintercept: 1\nalpha: 0", "reads version 1"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text, message, tmp_path):
    path = tmp_path / "cost.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as error:
        BalanceSettings(cost=str(path))
    assert str(path) in str(error.value)


def test_two_numbers_by_hand_are_a_cost_file(tmp_path):
    (tmp_path / "cost.yml").write_text("intercept: 5\nalpha: 25e-2\n")  # which YAML takes for a text
    assert read_cost_file(tmp_path / "cost.yml") == CostModel(intercept=5.0, alpha=0.25)


# ---------------------------------------------------------------------- the search for a budget


def machine(limit, per_token=1.0, fixed=0.0, quadratic=0.0):
    """Memory shares of budgets, and every budget that was run."""
    ran = []

    def share_of(tokens):
        ran.append(tokens)
        return (fixed + per_token * tokens + quadratic * tokens**2) / limit

    return share_of, ran


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(1_000, 10**7),
    fixed=st.floats(0, 0.5),
    quadratic=st.sampled_from([0.0, 1e-5]),
    smallest=st.integers(1, 200),
)
def test_the_budget_found_fits_and_hardly_more_would(limit, fixed, quadratic, smallest):
    share_of, ran = machine(limit, fixed=fixed * limit, quadratic=quadratic)
    found = find_largest(share_of, smallest=smallest, largest=10**8)
    assert found.max_tokens in ran
    assert share_of(found.max_tokens) <= 1
    assert share_of(int(found.max_tokens * (1 + RESOLUTION)) + 2) > 1
    assert len(found.tries) < 40


def test_the_largest_budget_of_use_is_never_passed():
    share_of, ran = machine(10**9)
    assert find_largest(share_of, smallest=10, largest=1234).max_tokens == 1234
    assert max(ran) == 1234


def test_a_search_says_whether_memory_set_the_limit():
    share_of, _ = machine(1000)
    assert not find_largest(share_of, smallest=10, largest=1000).is_limited
    assert not find_largest(share_of, smallest=10, largest=10).is_limited
    assert find_largest(share_of, smallest=10, largest=1050).is_limited


def test_nothing_fits():
    found = find_largest(lambda tokens: float("inf"), smallest=10, largest=100)
    assert found.max_tokens is None
    assert len(found.tries) == 1


def test_budgets_far_over_the_limit_are_not_run():
    share_of, ran = machine(1000)
    assert find_largest(share_of, smallest=10, largest=10**6).max_tokens == pytest.approx(1000, rel=RESOLUTION)
    assert max(ran) <= 1050


def test_running_out_of_memory_only_costs_a_try():
    found = find_largest(lambda tokens: 0.5 if tokens <= 777 else float("inf"), smallest=10, largest=10**6)
    assert found.max_tokens == pytest.approx(777, rel=RESOLUTION)
