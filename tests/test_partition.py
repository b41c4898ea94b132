"""The cutting algorithms against slow and plain ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import trainer_pt_utils

from lightning_balance.cost import CostModel, prepare_cost
from lightning_balance.partition import cut, fewest_groups, make_problem, smallest_budget
from lightning_balance.partition.bounds import smallest_bound
from lightning_balance.partition.moves import balanced_by_moves
from lightning_balance.partition.shapes import choose_shapes, round_up_to
from lightning_balance.partition.slots import dealt_time, slot_cuts
from lightning_balance.plan import plan_step
from tests.planner_oracles import cuts, draw_lengths, least_time, least_time_of_neighbouring_slots


def problem_of(lengths, num_ranks, cost=None, max_tokens=None):
    padded = -np.sort(-np.asarray(lengths, dtype=np.int64))
    return make_problem(padded, prepare_cost(cost, padded, len(padded), max_tokens), max_tokens, num_ranks)


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=9),
    shape=st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (2, 4), (3, 3), (1, 1)]),
    sync=st.sampled_from(["micro_batch", "step"]),
    model=st.sampled_from([CostModel(), CostModel(alpha=0.05), CostModel(intercept=50.0, alpha=0.01)]),
    cap=st.sampled_from([None, 1.0, 1.3, 2.0]),
)
def test_small_steps_are_as_fast_as_the_best_of_every_cut_and_assignment(lengths, shape, sync, model, cap):
    num_ranks, num_slots = shape
    num_groups = num_ranks * num_slots
    lengths = (lengths * num_groups)[: max(len(lengths), num_groups)]
    max_tokens = 10**6
    if cap is not None:
        needed = smallest_budget(-np.sort(-np.array(lengths)), num_groups)
        max_tokens = int(cap * needed)
    plan = plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, max_tokens=max_tokens, cost=model, sync=sync)
    best = least_time(lengths, num_ranks, num_slots, model.cost, sync, max_tokens)
    assert plan.modelled_time(sync) == pytest.approx(best, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    shape=st.sampled_from([(2, 3), (3, 2), (4, 2), (2, 4), (6, 1)]),
    sync=st.sampled_from(["micro_batch", "step"]),
)
def test_steps_with_fillers_are_as_fast_as_the_best_assignment(lengths, shape, sync):
    num_ranks, num_slots = shape
    plan = plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, sync=sync)
    with_copies = lengths + [min(lengths)] * (num_ranks * num_slots - len(lengths))
    best = least_time(with_copies, num_ranks, num_slots, CostModel().cost, sync)
    assert plan.modelled_time(sync) == pytest.approx(best, rel=1e-9)


def test_cuts_are_within_a_third_of_a_percent_of_the_exact_programme():
    rng = np.random.default_rng(4)
    gaps = []
    for number in range(40):
        kind = ["lognormal", "uniform", "pareto", "bimodal"][number % 4]
        num_ranks, num_slots = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        num_samples = int(rng.integers(num_ranks * num_slots, 161)) if num_ranks * num_slots < 161 else 161
        lengths = draw_lengths(kind, num_samples, rng)
        max_tokens = -(-num_samples // (num_ranks * num_slots)) * int(lengths.max())
        model = CostModel(intercept=float(rng.choice([0.0, 200.0])), alpha=float(rng.choice([0.0, 0.001, 0.01])))
        plan = plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, cost=model)
        exact = least_time_of_neighbouring_slots(lengths, num_ranks, num_slots, model.cost, max_tokens)
        gaps.append(plan.modelled_time() / exact - 1)
    assert np.mean(gaps) <= 0.003
    assert np.max(gaps) <= 0.01


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tightness=st.sampled_from([None, 1.0, 1.2]))
def test_up_to_128_samples_no_slots_of_neighbours_are_faster(seed, tightness):
    rng = np.random.default_rng(seed)
    num_ranks, num_slots = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    num_groups = num_ranks * num_slots
    kind = ["lognormal", "uniform", "pareto", "bimodal"][seed % 4]
    lengths = draw_lengths(kind, int(rng.integers(num_groups, 100)), rng)
    max_tokens = -(-len(lengths) // num_groups) * int(lengths.max())
    if tightness is not None:
        max_tokens = int(tightness * smallest_budget(-np.sort(-lengths), num_groups))
    model = CostModel(alpha=float(rng.choice([0.0, 0.001, 0.01])))
    plan = plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots, max_tokens=max_tokens, cost=model)
    exact = least_time_of_neighbouring_slots(lengths, num_ranks, num_slots, model.cost, max_tokens)
    assert plan.modelled_time() <= exact * (1 + 1e-9)


def test_one_slot_has_the_smallest_slowest_rank_there_is():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 40, 10)
        problem = problem_of(lengths, num_ranks=4)
        found = smallest_bound(problem, 0, 10, 4, problem.enough)
        ordered = sorted(lengths.tolist(), reverse=True)
        model = CostModel()
        best = min(max(model.cost(end - start, ordered[start]) for start, end in split) for split in cuts(10, 4))
        assert found == pytest.approx(best)


def test_greedy_filling_needs_the_fewest_groups():
    rng = np.random.default_rng(1)
    for _ in range(30):
        padded = -np.sort(-rng.integers(1, 10, 8))
        max_tokens = int(rng.integers(padded[0], 40))
        fewest = next(
            num_groups
            for num_groups in range(1, 9)
            if any(
                all((end - start) * padded[start] <= max_tokens for start, end in split)
                for split in cuts(8, num_groups)
            )
        )
        assert fewest_groups(padded, max_tokens) == fewest


def test_the_smallest_budget_is_enough_and_one_less_is_not():
    rng = np.random.default_rng(2)
    for _ in range(50):
        padded = -np.sort(-rng.integers(1, 100, 20))
        num_groups = int(rng.integers(1, 20))
        budget = smallest_budget(padded, num_groups)
        assert fewest_groups(padded, budget) <= num_groups
        assert budget == 1 or fewest_groups(padded, budget - 1) > num_groups


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "pareto", "bimodal", "constant"])
@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_every_group_has_a_place_and_a_sample(kind, sync):
    lengths = draw_lengths(kind, 300, np.random.default_rng(5))
    found = cut(problem_of(lengths, num_ranks=6, max_tokens=10 * int(lengths.max())), num_slots=5, sync=sync)
    assert sorted(found.deal.ravel().tolist()) == list(range(30))
    assert (np.diff(found.starts) > 0).all()
    assert found.starts[0] == 0
    assert found.starts[-1] == 300


def test_ranks_that_wait_once_a_step_are_never_slower_than_slots_of_the_same_groups():
    rng = np.random.default_rng(3)
    for kind in ("lognormal", "uniform", "pareto"):
        lengths = draw_lengths(kind, 128, rng)
        by_slot = plan_step(lengths, num_ranks=4, num_slots=4, sync="micro_batch").modelled_time("step")
        by_rank = plan_step(lengths, num_ranks=4, num_slots=4, sync="step").modelled_time("step")
        assert by_rank <= by_slot * (1 + 1e-9)


def test_cuts_are_sorted_by_their_time():
    problem = problem_of(draw_lengths("lognormal", 200, np.random.default_rng(0)), num_ranks=5)
    times = [dealt_time(problem, starts) for starts in slot_cuts(problem, 4)]
    assert times == sorted(times)


def test_shapes_waste_the_fewest_tokens():
    rng = np.random.default_rng(6)
    for _ in range(20):
        lengths = rng.integers(1, 12, 30)
        shapes = choose_shapes(lengths, max_shapes=3, pad_to_multiple_of=1)
        wasted = round_up_to(lengths, shapes).sum()
        unique = np.unique(lengths)
        best = min(
            round_up_to(lengths, np.array([a, b, unique[-1]])).sum()
            for a in unique
            for b in unique
            if a < b < unique[-1]
        )
        assert len(shapes) <= 3
        assert wasted == best


def test_shapes_are_multiples_and_hold_every_length():
    lengths = np.random.default_rng(7).integers(1, 5000, 3000)
    shapes = choose_shapes(lengths, max_shapes=6, pad_to_multiple_of=16)
    assert len(shapes) == 6
    assert (shapes % 16 == 0).all()
    assert (round_up_to(lengths, shapes) >= lengths).all()


@pytest.mark.skipif(not hasattr(trainer_pt_utils, "BatchRebalanceSampler"), reason="this transformers is too old")
@pytest.mark.parametrize("seed", range(12))
def test_the_search_by_moves_is_as_good_as_the_published_sampler(seed):
    rng = np.random.default_rng(seed)
    num_ranks, num_slots = int(rng.integers(2, 9)), int(rng.integers(2, 9))
    lengths = rng.choice([120, 330, 1080, 1200], num_ranks * num_slots * 5) if seed % 2 else rng.integers(9, 900, 260)
    num_groups = num_ranks * num_slots
    problem = problem_of(lengths, num_ranks)
    (starts,) = balanced_by_moves(problem, num_groups)
    assert len(starts) == num_groups + 1
    assert (np.diff(starts) >= 1).all()
    sampler = trainer_pt_utils.BatchRebalanceSampler
    published = sampler(lengths.tolist(), len(lengths), num_ranks, num_slots, shuffle=False)
    ranks = published._assign(list(range(len(lengths))), published.lengths)
    costs = CostModel().cost(
        np.array([[len(group) for group in rank] for rank in ranks]),
        np.array([[lengths[group].max() for group in rank] for rank in ranks]),
    )
    assert dealt_time(problem, starts) <= costs.max(axis=0).sum() * (1 + 1e-12)


def test_the_search_by_moves_gives_nothing_that_the_cap_forbids():
    assert balanced_by_moves(problem_of([9, 1, 1, 1], 2, max_tokens=9), 2) != []
    assert balanced_by_moves(problem_of([9, 9, 1, 1, 1, 1], 2, max_tokens=9), 2) == []
