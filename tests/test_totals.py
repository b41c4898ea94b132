"""Sums over many optimizer steps at once are those of the steps one by one."""

from dataclasses import astuple

import numpy as np
import pytest

from lightning_balance import plan_step
from lightning_balance.efficiency import cost_spread
from lightning_balance.fitting import Place
from lightning_balance.totals import DoneStep, PlannedSteps, Totals


def done_steps(num_steps=9, num_ranks=2):
    """Steps of two to four slots, of which some have fillers and some were cut by the end of an epoch."""
    random = np.random.default_rng(5)
    for index in range(num_steps):
        num_slots = 2 + index % 3
        lengths = random.integers(1, 90, size=3 if index == 4 else 20)
        plan = plan_step(lengths, num_ranks=num_ranks, num_slots=num_slots)
        run = 1 if index == 7 else num_slots
        place = Place(plan=plan, slot=run - 1, num_slots=run)
        yield DoneStep(place=place, seconds=0.5 + index, waited_seconds=0.25 * index, planning_seconds=0.125)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_many_steps_count_as_one_by_one(sync):
    steps = list(done_steps())
    at_once = Totals.of(steps, PlannedSteps(steps, sync))
    one_by_one = Totals()
    for step in steps:
        one_by_one.add(Totals.of([step], PlannedSteps([step], sync)))
    assert astuple(at_once) == pytest.approx(astuple(one_by_one), rel=1e-12)
    assert at_once.num_steps == len(steps)


@pytest.mark.parametrize("sync", ["micro_batch", "step"])
def test_a_step_counts_what_its_plan_says(sync):
    for step in done_steps():
        plan, num_slots = step.place.plan, step.place.num_slots
        totals = Totals.of([step], PlannedSteps([step], sync))
        costs = plan.costs[:num_slots]
        synchronised = costs if sync == "micro_batch" else costs.sum(axis=0, keepdims=True)
        assert totals.modelled_time == pytest.approx(synchronised.max(axis=1).sum())
        assert totals.cost_spread == pytest.approx(cost_spread(synchronised))
        assert totals.num_synchronisations == len(synchronised)
        assert totals.num_samples == totals.modelled_samples == step.place.num_samples
        assert totals.real_tokens == step.place.real_tokens
        assert totals.padded_tokens == plan.padded_tokens[:num_slots].sum()
        assert totals.largest_micro_batch == plan.padded_tokens[:num_slots].max()
        assert (totals.seconds, totals.waited_seconds) == (step.seconds, step.waited_seconds)
