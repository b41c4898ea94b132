"""The plan of a whole data set: every sample once, the budget held, the fewest micro-batches."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_balance.evaluation.plan import plan_evaluation

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def fewest_by_trying(lengths: list[int], budget: int) -> int:
    """The fewest runs of the sorted samples that hold the budget, by dynamic programming."""
    ordered = sorted(lengths, reverse=True)
    fewest = [0]
    for end in range(1, len(ordered) + 1):
        fits = (start for start in range(end) if end - start == 1 or (end - start) * ordered[start] <= budget)
        fewest.append(1 + min(fewest[start] for start in fits))
    return fewest[-1]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 120), st.integers(1, 8))
@settings(deadline=None, max_examples=300)
def test_every_sample_once_within_the_budget(lengths: list[int], num_ranks: int, budget: int, multiple: int) -> None:
    plan = plan_evaluation(lengths, num_ranks=num_ranks, max_tokens=budget, pad_to_multiple_of=multiple)
    padded = -(-np.array(lengths) // multiple) * multiple
    served = []
    for slot in range(plan.num_slots):
        for rank in range(num_ranks):
            samples = plan.micro_batch(rank, slot)
            assert len(samples) == 1 or len(samples) * padded[samples].max() <= budget
            assert plan.padded_lengths[slot, rank] == padded[samples].max()
            served += [] if plan.is_filler(rank, slot) else samples.tolist()
    assert sorted(served) == list(range(len(lengths)))
    assert plan.num_slots == -(-fewest_by_trying(padded.tolist(), budget) // num_ranks)
    num_fillers = int((plan.num_samples == 0).sum())
    assert num_fillers == max(plan.num_slots * num_ranks - len(lengths), 0)  # only where there is nothing to split
    again = plan_evaluation(lengths, num_ranks=num_ranks, max_tokens=budget, pad_to_multiple_of=multiple)
    assert all(np.array_equal(getattr(plan, name), getattr(again, name)) for name in ("order", "starts", "costs"))


def test_the_most_expensive_micro_batches_run_first_and_together() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 5_000).astype(int) + 1
    plan = plan_evaluation(lengths, num_ranks=4, max_tokens=4096)
    slowest = plan.costs.max(axis=1)
    assert (np.diff(slowest) <= 0).all()
    assert ((slowest - plan.costs.min(axis=1)) / slowest).mean() < 0.1


def test_rank_zero_has_samples_where_any_rank_has() -> None:
    assert not plan_evaluation([3], num_ranks=4, max_tokens=8).is_filler(0, 0)


def test_a_sample_over_the_budget_runs_alone() -> None:
    plan = plan_evaluation([9, 1, 1], num_ranks=1, max_tokens=4)
    assert [plan.micro_batch(0, slot).tolist() for slot in range(2)] == [[0], [1, 2]]


def test_nothing_has_a_plan_without_micro_batches() -> None:
    plan = plan_evaluation([], num_ranks=3, max_tokens=4)
    assert (plan.num_slots, plan.num_ranks) == (0, 3)


def test_a_million_samples_are_planned_in_seconds() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 1_000_000).astype(int) + 1
    started = time.process_time()
    plan = plan_evaluation(lengths, num_ranks=64, max_tokens=16_384)
    assert plan.num_samples.sum() == 1_000_000
    assert time.process_time() - started < 5
